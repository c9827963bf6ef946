"""Prove which variables may be updated in place.

A segment may write a variable's next value over the variable if every other reader of the old value
lies in an earlier segment, or is an ancestor of the writer in the same segment: execution order
within a segment proves nothing, since ONNX Runtime chooses it. Who reads a view of the variable (a
Reshape, or what ONNX Runtime may optimise away) reads the variable. A writer that reads the variable
itself must tolerate that its input and output are one memory.
"""

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, State
from partc.passes.scheduling.schedule import Chunk, Item, Message

POINTWISE = frozenset(
    ["Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Where", "Neg", "Identity", "Sqrt", "Clip"]
)
# Ops whose result may be the very memory of an operand: ONNX Runtime runs the first in place and
# removes the others where they change nothing (1.26: NoopElimination, CastElimination, and so on).
VIEWS = frozenset(
    "Reshape Flatten Squeeze Unsqueeze Identity Transpose Cast CastLike Expand Slice Pad Tile Split".split()
)
NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
SCATTERS = frozenset({"ScatterND", "ScatterElements"})


def prove_in_place(lowered: LoweredGraph, items: Sequence[Item]) -> set[State]:
    """Return the states whose next value may be written over the present one."""
    return {state for state in lowered.states if _is_safe(state, lowered, items)}


def _is_safe(state: State, lowered: LoweredGraph, items: Sequence[Item]) -> bool:
    writer = _writer(state, items)
    if writer is None or sum(other.next == state.next for other in lowered.states) > 1:
        return False
    place, chunk, node = writer
    views = _views(state.value, chunk.nodes)
    if not _tolerates(node, state, views, lowered):
        return False
    ancestors = _ancestors(chunk.nodes, node)
    if any(_reads(reader, views) and reader.name not in ancestors for reader in chunk.nodes):
        return False
    shared = {state.value} | _pulled(state.value, lowered)
    if any(_reads(reader, shared) for item in items[place + 1 :] for reader in item.nodes):
        return False
    return all(value != state.value for _, value, _ in lowered.outputs)


def _pulled(value: str, lowered: LoweredGraph) -> set[str]:
    """Return what a Pull makes of a value: it lies in the buffer of which the owned rows are a part."""
    return {
        t.name for node in lowered.nodes if node.op == "Pull" and _reads(node, {value}) for t in node.outputs
    }


def _writer(state: State, items: Sequence[Item]) -> tuple[int, Chunk, gs.Node] | None:
    for index, item in enumerate(items):
        if isinstance(item, Message):
            continue
        for node in item.nodes:
            if any(tensor.name == state.next for tensor in node.outputs):
                return index, item, node
    return None


def _views(value: str, nodes: Sequence[gs.Node]) -> set[str]:
    """Return a value and all that may share its memory within a segment."""
    views = {value}
    for node in nodes:
        if _reads(node, views) and _may_be_view(node):
            views.update(tensor.name for tensor in node.outputs)
    return views


def _may_be_view(node: gs.Node) -> bool:
    if node.op in ("Concat", "Sum", "Max", "Min"):
        return len(node.inputs) == 1
    if node.op in NEUTRAL:
        constants = [tensor.values for tensor in node.inputs if isinstance(tensor, gs.Constant)]
        return any(np.all(values == NEUTRAL[node.op]) for values in constants)
    return node.op in VIEWS


def _reads(node: gs.Node, values: set[str]) -> bool:
    return any(tensor.name in values for tensor in node.inputs)


def _tolerates(node: gs.Node, state: State, views: set[str], lowered: LoweredGraph) -> bool:
    """Tell whether the kernel may write over the variable while it reads it."""
    places = [index for index, tensor in enumerate(node.inputs) if tensor.name in views]
    if not places:
        return True
    if node.op in SCATTERS:
        return places == [0]
    shape = lowered.shapes.get(state.value)
    alike = [node.outputs[0].name, *(node.inputs[index].name for index in places)]
    return node.op in POINTWISE and all(lowered.shapes.get(value) == shape for value in alike)


def _ancestors(nodes: Sequence[gs.Node], last: gs.Node) -> set[str]:
    """Names of the writer and of all nodes of its segment that it waits for."""
    wanted = {tensor.name for tensor in last.inputs}
    found = {last.name}
    for node in reversed(nodes):
        if any(tensor.name in wanted for tensor in node.outputs):
            found.add(node.name)
            wanted.update(tensor.name for tensor in node.inputs)
    return found
