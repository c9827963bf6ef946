"""Prove which variables may be updated in place.

A segment may write a variable's next value over the variable if every other reader of the old value
lies in an earlier segment, or is an ancestor of the writer in the same segment: execution order
within a segment proves nothing, since ONNX Runtime chooses it. Who reads a view of the variable (a
Reshape, or what ONNX Runtime may optimise away) reads the variable. A writer that reads the variable
itself must tolerate that its input and output are one memory. A next value that is sent in a bucket is
written where the bucket is.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, State
from partc.passes.scheduling.schedule import Chunk, Item

RUNS_IN_PLACE = frozenset(
    ["Add", "Sub", "Mul", "Div", "Sum", "Max", "Min", "Where", "Neg", "Identity", "Sqrt", "Clip"]
)
# Ops whose result may be the very memory of an operand: ONNX Runtime runs the first in place and
# removes the others where they change nothing (1.26: NoopElimination, CastElimination, and so on).
MAY_ALIAS = frozenset(
    "Reshape Flatten Squeeze Unsqueeze Identity Transpose Cast CastLike Expand Slice Pad Tile Split".split()
)
NEUTRAL_ELEMENTS = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
SCATTERS = frozenset({"ScatterND", "ScatterElements"})


def prove_in_place(lowered: LoweredGraph, items: Sequence[Item]) -> set[State]:
    """Return the states whose next value may be written over the present one."""
    proof = _Proof(lowered, items)
    updates = [update for state in lowered.states if (update := proof.update(state)) is not None]
    by_place: dict[int, list[_Update]] = defaultdict(list)
    for update in updates:
        by_place[update.place].append(update)
    return {
        update.state
        for place, states in by_place.items()
        for update in _behind_their_readers(items[place].nodes, states)
    }


@dataclass(frozen=True, slots=True)
class _Update:
    """A write over a variable that is safe if it waits for the readers within its segment."""

    state: State
    place: int  # the item that it is in
    writer: str
    readers: tuple[str, ...]


class _Proof:
    """Who makes and who reads every value, and where."""

    def __init__(self, lowered: LoweredGraph, items: Sequence[Item]) -> None:
        self.lowered = lowered
        self.writers: dict[str, tuple[int, gs.Node]] = {}
        self.readers: dict[str, list[tuple[int, gs.Node]]] = defaultdict(list)
        self.next_values = Counter(state.next for state in lowered.states)
        self.outputs = {value for _, value, _ in lowered.outputs}
        self.in_buckets: set[str] = set()
        for place, item in enumerate(items):
            for node in item.nodes:
                for tensor in node.inputs:
                    self.readers[tensor.name].append((place, node))
                if isinstance(item, Chunk):
                    self.writers.update((tensor.name, (place, node)) for tensor in node.outputs)
                elif item.bucket is not None:
                    self.in_buckets.update(tensor.name for tensor in node.inputs)

    def update(self, state: State) -> _Update | None:
        """Return what is left to be proved of a state, None if it may not be written over."""
        has_own_place = state.next not in self.in_buckets and self.next_values[state.next] == 1
        if state.next not in self.writers or not has_own_place or state.value in self.outputs:
            return None
        place, writer = self.writers[state.next]
        views = self._views(state.value, place)
        shared = (state.value, *self._pulled(state.value))
        is_read_later = any(at > place for value in shared for at, _ in self.readers[value])
        if is_read_later or not _tolerates(writer, state, views, self.lowered):
            return None
        readers = {node.name for view in views for at, node in self.readers[view] if at == place}
        return _Update(state, place, writer.name, tuple(readers - {writer.name}))

    def _pulled(self, value: str) -> list[str]:
        """Return what a Pull makes of a value: it lies in the buffer of which the owned rows are a part."""
        pulls = [node for _, node in self.readers[value] if node.op == "Pull"]
        return [tensor.name for node in pulls for tensor in node.outputs]

    def _views(self, value: str, place: int) -> set[str]:
        """Return a value and all that may share its memory within a segment."""
        views, stack = {value}, [value]
        while stack:
            readers = [node for at, node in self.readers[stack.pop()] if at == place and _may_be_view(node)]
            aliases = {tensor.name for node in readers for tensor in node.outputs} - views
            views |= aliases
            stack.extend(aliases)
        return views


def _behind_their_readers(nodes: Sequence[gs.Node], updates: Sequence[_Update]) -> list[_Update]:
    """Return the updates of a segment that come after all their readers in any order of execution.

    One walk over sorted nodes: each value carries the set of the readers that it waits for, as bits, until
    its last use.
    """
    readers = {name for update in updates for name in update.readers}
    bits = {name: 1 << bit for bit, name in enumerate(sorted(readers))}
    last_use = {name: index for index, node in enumerate(nodes) for name in _names(node.inputs)}
    waits: dict[str, int] = {}  # value -> the readers that it waits for
    waiting: dict[str, int] = {}  # writer -> the same
    writers = {update.writer for update in updates}
    for index, node in enumerate(nodes):
        pending = bits.get(node.name, 0)
        for name in _names(node.inputs):
            pending |= waits.get(name, 0)
        for name in _names(node.inputs):
            if last_use[name] == index:
                waits.pop(name, None)
        waits.update((name, pending) for name in _names(node.outputs) if name in last_use)
        if node.name in writers:
            waiting[node.name] = pending
    return [u for u in updates if all(waiting[u.writer] & bits[reader] for reader in u.readers)]


def _names(tensors: Iterable[gs.Tensor]) -> list[str]:
    return [tensor.name for tensor in tensors if tensor.name]


def _may_be_view(node: gs.Node) -> bool:
    if node.op in ("Concat", "Sum", "Max", "Min"):
        return len(node.inputs) == 1
    if node.op in NEUTRAL_ELEMENTS:
        constants = [tensor.values for tensor in node.inputs if isinstance(tensor, gs.Constant)]
        return any(np.all(values == NEUTRAL_ELEMENTS[node.op]) for values in constants)
    return node.op in MAY_ALIAS


def _tolerates(node: gs.Node, state: State, views: set[str], lowered: LoweredGraph) -> bool:
    """Tell whether the kernel may write over the variable while it reads it."""
    places = [index for index, tensor in enumerate(node.inputs) if tensor.name in views]
    if not places:
        return True
    if node.op in SCATTERS:
        return places == [0]
    shape = lowered.shapes.get(state.value)
    alike = [node.outputs[0].name, *(node.inputs[index].name for index in places)]
    return node.op in RUNS_IN_PLACE and all(lowered.shapes.get(value) == shape for value in alike)
