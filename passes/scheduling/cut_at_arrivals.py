"""Cut what waits for several messages: what reads the first to arrive runs while others are under way.

the end of a step   whole  sum(B) sum(A)        . B = B - dB, A = A - dA
                    cut    sum(B) sum(A)  B = B - dB    .    A = A - dA
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby

import onnx_graphsurgeon as gs

from partc.cost.cluster.profiles import SLOT_S
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Chunk, Communication, Item, late_nodes


def cut_at_arrivals(
    items: Sequence[Item], lowered: LoweredGraph, seconds: Callable[[Item], float]
) -> list[Item]:
    """Return the items, segments cut by the last message that their nodes wait for; but for micro-batches.

    What is computed from variables alone waits for who reads it first: an update is one pass over memory.
    `seconds`: of a part of a segment; one of less than SLOT_S waits for the next.
    """
    late = {node.name for node in late_nodes(lowered)}
    arrival_of: dict[str, int] = {}  # value -> place of the message that brings it
    cut: list[Item] = []
    for place, item in enumerate(items):
        if isinstance(item, Communication):
            arrival_of.update(dict.fromkeys(item.writes, place))
            cut.append(item)
        elif item.is_repeated:
            cut.append(item)
        else:
            cut += _joined(
                [Chunk(item.site, nodes) for nodes in _by_arrival(item.nodes, arrival_of, late)], seconds
            )
    return cut


def _by_arrival(
    nodes: Sequence[gs.Node], arrival_of: Mapping[str, int], late: Collection[str]
) -> list[list[gs.Node]]:
    """Return the nodes by the last message that each waits for, in their order."""
    own: dict[str, int] = {}
    last: dict[int, int] = {}  # by a node's id
    for node in nodes:
        waited = (own.get(t.name, arrival_of.get(t.name, -1)) for t in node.inputs)
        last[id(node)] = max(waited, default=-1)
        own.update((tensor.name, last[id(node)]) for tensor in node.outputs)
    first_read: dict[str, int] = {}
    for node in reversed(nodes):
        if node.name in late:
            reads = [first_read[tensor.name] for tensor in node.outputs if tensor.name in first_read]
            last[id(node)] = min(reads, default=last[id(node)])
        for tensor in node.inputs:
            first_read[tensor.name] = min(last[id(node)], first_read.get(tensor.name, last[id(node)]))
    in_order = sorted(nodes, key=lambda node: last[id(node)])
    return [list(group) for _, group in groupby(in_order, key=lambda node: last[id(node)])]


def _joined(pieces: Sequence[Chunk], seconds: Callable[[Item], float]) -> list[Chunk]:
    """Join pieces that are not worth a segment to those behind them."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        if seconds(joined[-1]) < SLOT_S:
            joined[-1] = Chunk(piece.site, [*joined[-1].nodes, *piece.nodes])
        else:
            joined.append(piece)
    return joined
