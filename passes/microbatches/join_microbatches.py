"""Write down what joins micro-batches, which no message does: running sums, and one behind the other.

AllReduce along micro-batches   the chunk that makes a term adds it to the sum of those before
AllGather                       a Concat of every micro-batch's value, once
"""

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.microbatches.find_repeated import Repeated, joins_microbatches
from partc.passes.scheduling.schedule import Chunk, Communication, Item, RunningSum

ADDS = {"sum": "Add", "max": "Max", "min": "Min"}


def join_microbatches(items: Sequence[Item], lowered: LoweredGraph, repeated: Repeated) -> list[Item]:
    """Return the items without communications along micro-batches; makers of terms keep their sums."""
    maker = {
        tensor.name: place
        for place, item in enumerate(items)
        if isinstance(item, Chunk) and item.is_repeated
        for node in item.nodes
        for tensor in node.outputs
    }
    sums: dict[int, list[RunningSum]] = {}
    joined: dict[int, Chunk] = {}
    for place, item in enumerate(items):
        if not isinstance(item, Communication) or not joins_microbatches(item.nodes[0], lowered.meshes):
            continue
        (node,) = item.nodes
        if node.op != "AllReduce":
            joined[place] = Chunk(node.attrs["site"], [_concat(node, repeated, lowered)])
            continue
        term, total = node.inputs[0], node.outputs[0]
        if term.name not in maker:  # it came by a message
            joined[place] = Chunk(node.attrs["site"], is_repeated=True)
        sums.setdefault(maker.get(term.name, place), []).append(
            RunningSum(term, total, ADDS[node.attrs["reduction"]])
        )
        lowered.shapes.setdefault(f"{total.name}.before", lowered.shapes.get(total.name, ()))
    result: list[Item] = []
    for place, item in enumerate(items):
        if place in joined or (isinstance(item, Chunk) and place in sums):
            chunk = joined.get(place, item)
            assert isinstance(chunk, Chunk)
            result.append(replace(chunk, sums=tuple(sums.get(place, ()))))
        elif isinstance(item, Chunk) or not joins_microbatches(item.nodes[0], lowered.meshes):
            result.append(item)
    return result


def _concat(node: gs.Node, repeated: Repeated, lowered: LoweredGraph) -> gs.Node:
    """Put the pieces of all micro-batches one behind the other."""
    piece, whole = node.inputs[0], node.outputs[0]
    pieces = [
        gs.Variable(repeated.name(piece.name, number), dtype=piece.dtype) for number in range(repeated.count)
    ]
    for own in pieces:
        if piece.name in lowered.shapes:
            lowered.shapes.setdefault(own.name, lowered.shapes[piece.name])
        lowered.nbytes.setdefault(own.name, lowered.nbytes.get(piece.name, 0))
    result = gs.Variable(whole.name, dtype=whole.dtype)
    return gs.Node("Concat", f"{node.name}.of_all", {"axis": 0}, pieces, [result])
