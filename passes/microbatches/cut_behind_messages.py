"""Cut what a micro-batch runs behind what its messages wait for: who receives them begins earlier.

    dx = dy W'   which the stage before waits for     whole  dx dW send(dx)     cut  dx send(dx)
    dW = x' dy   which nobody waits for                                                 dW

As in zero-bubble schedules, gradients of inputs come before those of weights (Qi et al. 2024, Zero Bubble
Pipeline Parallelism, section 2); a micro-batch counts as under way until both are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from partc.cost.cluster.profiles import SLOT_S
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.microbatches.find_repeated import joins_microbatches
from partc.passes.scheduling.schedule import Chunk, Communication, Item


def cut_behind_messages(
    items: Sequence[Item], lowered: LoweredGraph, seconds: Callable[[Item], float]
) -> list[Item]:
    """Return the items, what runs for each micro-batch cut behind what messages wait for."""
    awaited: set[str] = set()  # what messages read, and what they come of
    cut: list[Item] = []
    for item in reversed(items):
        if isinstance(item, Communication):
            if not joins_microbatches(item.nodes[0], lowered.meshes):
                awaited.update(item.reads)
            cut.append(item)
            continue
        first, second = _divide(item.nodes, awaited)
        is_worth_it = item.is_repeated and first and seconds(Chunk(item.site, second)) >= SLOT_S
        pieces = [replace(item, nodes=nodes) for nodes in (first, second)] if is_worth_it else [item]
        cut += reversed(pieces)
    return cut[::-1]


def _divide(nodes: Sequence[gs.Node], awaited: set[str]) -> tuple[list[gs.Node], list[gs.Node]]:
    """Return the nodes of which something awaited comes, and the others; what the former read is awaited."""
    first: list[gs.Node] = []
    second: list[gs.Node] = []
    for node in reversed(nodes):
        is_awaited = any(tensor.name in awaited for tensor in node.outputs)
        (first if is_awaited else second).append(node)
        if is_awaited:
            awaited.update(tensor.name for tensor in node.inputs)
    return first[::-1], second[::-1]
