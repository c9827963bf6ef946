"""Prove which variables may be updated in place.

A segment may write a variable's next value over the variable if every other reader of the old value
lies in an earlier segment, or is an ancestor of the writer in the same segment: execution order
within a segment proves nothing, since ONNX Runtime chooses it. A writer that reads the variable
itself must tolerate that its input and output are one memory.
"""

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, State
from partc.passes.scheduling.schedule import Chunk, Item, Message

POINTWISE = frozenset(
    ["Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Where", "Neg", "Identity", "Sqrt", "Clip"]
)
SCATTERS = frozenset({"ScatterND", "ScatterElements"})


def prove_in_place(lowered: LoweredGraph, items: Sequence[Item]) -> set[State]:
    """Return the states whose next value may be written over the present one."""
    return {state for state in lowered.states if _is_safe(state, lowered, items)}


def _is_safe(state: State, lowered: LoweredGraph, items: Sequence[Item]) -> bool:
    writer = _writer(state, items)
    if writer is None or sum(other.next == state.next for other in lowered.states) > 1:
        return False
    place, chunk, node = writer
    if not _tolerates(node, state, lowered):
        return False
    ancestors = _ancestors(chunk.nodes, node)
    for index, item in enumerate(items):
        for reader in item.nodes:
            if not any(tensor.name == state.value for tensor in reader.inputs):
                continue
            is_before = index < place or (index == place and reader.name in ancestors)
            if not is_before:
                return False
    return all(value != state.value for _, value, _ in lowered.outputs)


def _writer(state: State, items: Sequence[Item]) -> tuple[int, Chunk, gs.Node] | None:
    for index, item in enumerate(items):
        if isinstance(item, Message):
            continue
        for node in item.nodes:
            if any(tensor.name == state.next for tensor in node.outputs):
                return index, item, node
    return None


def _tolerates(node: gs.Node, state: State, lowered: LoweredGraph) -> bool:
    """Tell whether the kernel may write over the variable while it reads it."""
    places = [index for index, tensor in enumerate(node.inputs) if tensor.name == state.value]
    if not places:
        return True
    if node.op in SCATTERS:
        return places == [0]
    shape = lowered.shapes.get(state.value)
    return node.op in POINTWISE and lowered.shapes.get(node.outputs[0].name) == shape


def _ancestors(nodes: Sequence[gs.Node], last: gs.Node) -> set[str]:
    """Names of the writer and of all nodes of its segment that it waits for."""
    wanted = {tensor.name for tensor in last.inputs}
    found = {last.name}
    for node in reversed(nodes):
        if any(tensor.name in wanted for tensor in node.outputs):
            found.add(node.name)
            wanted.update(tensor.name for tensor in node.inputs)
    return found
