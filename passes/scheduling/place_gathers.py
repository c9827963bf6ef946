"""Gather variables that ranks share in the order in which they are read: at once, or as late as may be.

    at once   G1 G2 G3 │ F1 │ F2 │ F3 B3 B2 B1                     wholes live until the way back
    late      G1 G2 │ F1 │ G3 │ F2 │ G2' │ F3 B3 │ G1' │ B2 │ B1   one is read while the next arrives

Steps with a limit of memory gather late, and again for the way back. Buffers of what is gathered late share
memory: one takes what another is done with.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from partc.passes.scheduling.share_memory import uses_of
from partc.runtime.plan.program import Buffer, Instruction


def gather_again(lowered: LoweredGraph, forward: Collection[str]) -> None:
    """Give the nodes of the way back an AllGather of their own of each variable that both ways read.

    `forward`: names of original nodes. Needs `copy_where_shared`: what is sent is a copy of the variable.
    """
    copies = _copies_of_variables(lowered)
    late = _find_late(lowered, forward)
    read_early, read_late = (
        {t.name for node in lowered.nodes if (node.name in late) == is_late for t in node.inputs}
        for is_late in (False, True)
    )
    again: dict[str, gs.Variable] = {}
    nodes: list[gs.Node] = []
    for node in lowered.nodes:
        for index, tensor in enumerate(node.inputs if node.name in late else ()):
            if tensor.name in again:
                node.inputs[index] = again[tensor.name]
        nodes.append(node)
        if _gathers(node, copies) and node.outputs[0].name in read_early & read_late:
            added = _repeat(lowered, node, copies[node.inputs[0].name])
            again[node.outputs[0].name] = added[-1].outputs[0]
            nodes += added
    lowered.nodes = nodes


def _copies_of_variables(lowered: LoweredGraph) -> dict[str, gs.Node]:
    """Return value -> the node that copies a variable into it."""
    variables = {state.value for state in lowered.states}
    return {
        node.outputs[0].name: node
        for node in lowered.nodes
        if node.op == "Identity" and node.inputs[0].name in variables
    }


def _gathers(node: gs.Node, copies: Mapping[str, gs.Node]) -> bool:
    return is_communication(node) and node.op == "AllGather" and node.inputs[0].name in copies


def _find_late(lowered: LoweredGraph, forward: Collection[str]) -> set[str]:
    """Return the nodes of the way back: of what has no original, those that only such nodes read."""
    late: set[str] = set()
    readers: dict[str, list[str]] = {}
    for node in reversed(lowered.nodes):
        original = lowered.original.get(node.name)
        behind = [name for tensor in node.outputs for name in readers.get(tensor.name, ())]
        if original not in forward if original is not None else late.issuperset(behind):
            late.add(node.name)
        for tensor in node.inputs:
            readers.setdefault(tensor.name, []).append(node.name)
    return late


def _repeat(lowered: LoweredGraph, gather: gs.Node, copy: gs.Node) -> list[gs.Node]:
    """Return what copies a variable and gathers it once more."""
    sent, whole = (_again(lowered, tensor) for tensor in (gather.inputs[0], gather.outputs[0]))
    sender = gs.Node("Identity", f"{sent.name}.node", {}, [copy.inputs[0]], [sent])
    lowered.site_of[sender.name] = lowered.site_of[copy.name]
    attributes = {**gather.attrs, "again": True}
    name = f"{gather.op}.{whole.name}"
    return [sender, gs.Node(gather.op, name, attributes, [sent], [whole], domain=gather.domain)]


def _again(lowered: LoweredGraph, tensor: gs.Tensor) -> gs.Variable:
    name = f"{tensor.name}.again"
    lowered.shapes[name] = lowered.shapes[tensor.name]
    lowered.nbytes[name] = lowered.nbytes[tensor.name]
    if tensor.name in lowered.meanings:
        lowered.meanings[name] = lowered.meanings[tensor.name]
    return gs.Variable(name, dtype=tensor.dtype)


@dataclass(frozen=True)
class _Unit:
    """A message, what copies the variables that it sends, and the place of the item that reads it first."""

    copies: tuple[gs.Node, ...]
    message: Communication
    read_at: int


def place_gathers(
    items: Sequence[Item], lowered: LoweredGraph, are_late: bool
) -> tuple[list[Item], set[str]]:
    """Put the AllGathers of variables in order, each behind the copies that it sends; return their buckets.

    They begin with the step, or, `are_late`, where the one before is first read.
    """
    units = _units(items, lowered)
    begin = [0, *(unit.read_at if are_late else 0 for unit in units)]
    moved = {id(unit.message) for unit in units}
    taken = {copy.name for unit in units for copy in unit.copies}
    result: list[Item] = []
    for place, item in enumerate([*items, None]):
        for unit, at in zip(units, begin, strict=False):
            if at == place:
                site = lowered.site_of[unit.copies[0].name]
                result += [Chunk(site, list(unit.copies)), unit.message]
        if isinstance(item, Chunk):
            remaining = [node for node in item.nodes if node.name not in taken]
            result += [replace(item, nodes=remaining)] if remaining else []
        elif item is not None and id(item) not in moved:
            result.append(item)
    return result, {unit.message.bucket.name for unit in units if unit.message.bucket is not None}


def _units(items: Sequence[Item], lowered: LoweredGraph) -> list[_Unit]:
    """Return the AllGathers of variables with the copies that they send, as they are read."""
    copies = _copies_of_variables(lowered)
    units: list[_Unit] = []
    read_at: dict[str, int] = {}
    for place, item in enumerate(items):
        for node in item.nodes:
            for tensor in node.inputs:
                read_at.setdefault(tensor.name, place)
    for item in items:
        if isinstance(item, Chunk) or item.bucket is None or not _gathers(item.nodes[0], copies):
            continue
        if all(value in copies for value in item.reads):
            sent = tuple(copies[value] for value in item.reads)
            first = min(read_at.get(value, len(items)) for value in item.writes)
            units.append(_Unit(sent, item, first))
    return sorted(units, key=lambda unit: unit.read_at)


def share_gathered(
    instructions: Sequence[Instruction],
    buffers: Sequence[Buffer],
    buffer_of: Mapping[str, str],
    late: Collection[str],
) -> list[Buffer]:
    """Let each buffer that is gathered late take memory that is free then, the one nearest in size.

    `buffer_of`: value -> the buffer that it lies in. The largest of those that share gives its memory.
    """
    uses = uses_of(instructions, {**buffer_of, **{buffer.name: buffer.name for buffer in buffers}})
    rooms: list[list[Buffer]] = []
    waiting = sorted((b for b in buffers if b.name in late and b.name in uses), key=lambda b: uses[b.name])
    for buffer in waiting:
        free = [
            room
            for room in rooms
            if uses[room[-1].name][1] < uses[buffer.name][0]
            and (room[0].dtype, room[0].sites) == (buffer.dtype, buffer.sites)
        ]
        if free:
            min(free, key=lambda room: abs(_most(room) - buffer.elements)).append(buffer)
        else:
            rooms.append([buffer])
    memory: dict[str, str] = {}
    for room in rooms:
        largest = max(room, key=lambda buffer: buffer.elements)
        memory.update((buffer.name, largest.name) for buffer in room if buffer is not largest)
    return [msgspec.structs.replace(b, memory=memory.get(b.name, b.memory)) for b in buffers]


def _most(room: Sequence[Buffer]) -> int:
    return max(buffer.elements for buffer in room)
