"""One rank's values: buffers, the slices of them, variables, constants, and what segments make."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from partc.runtime.data.initial import FirstValues
from partc.runtime.errors import BadPlan
from partc.runtime.execution.arrays import Array
from partc.runtime.execution.device import ExecutionDevice
from partc.runtime.plan.members import shard_values
from partc.runtime.plan.program import Plan, Rank, Slice


class Environment:
    """Value name -> tensor, all on one device.

    `fixed` values keep their memory for the whole training; `tensors` holds these and what exists at
    the moment besides.
    """

    def __init__(self, plan: Plan, rank: Rank, device: ExecutionDevice, initial: FirstValues) -> None:
        self.device = device
        self.arrays = device.arrays
        self._memory: dict[str, Array] = {}
        self._shapes = _shapes_of_slices(plan, rank)
        self._allocate_buffers(plan, rank)
        self.fixed = {name: self.arrays.tensor(array) for name, array in self._memory.items()}
        for name, vector in (plan.constants | rank.constants).items():
            self._fix(name, np.array(vector, np.int64))
        self.constants = frozenset(plan.constants | rank.constants)
        for name, value in shard_values(plan, rank).items():
            self._fix(name, value)
        for piece in rank.pieces:
            self._hold(piece.value, initial.part(piece.variable, piece.box))
        self.tensors = dict(self.fixed)

    def array(self, name: str) -> Array:
        """Return a value in host memory: the value's own memory where it lies there, else a copy."""
        return self.arrays.in_host_memory(self.held(name))

    def held(self, name: str) -> Array:
        """Return a value where it lies: NumPy's array, or a GPU's."""
        return self._memory[name] if name in self._memory else self.arrays.view(self.tensors[name])

    def memory(self, name: str) -> Array | None:
        """Return the fixed memory of a value, None if it has none."""
        return self._memory.get(name)

    def declared(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Return the shape and element type that the plan gives a value, held by this rank or not."""
        if name in self._memory:
            return self._memory[name].shape, self._memory[name].dtype
        return self._shapes.get(name)

    def put(self, name: str, array: Array) -> None:
        """Give a value a new content, which may lie elsewhere. A fixed value must fit its memory."""
        if name in self._memory:
            self._copy(self._memory[name], array)
        else:
            self.tensors[name] = self.arrays.tensor(self.arrays.placed(array))

    def drop(self, names: Iterable[str]) -> None:
        """Forget values that nobody reads again in this step."""
        for name in names:
            if name not in self.fixed:
                self.tensors.pop(name, None)

    def feed(self, feeds: Mapping[str, Array]) -> None:
        """Put one step's data."""
        for name, array in feeds.items():
            self.put(name, array)

    def fix(self, memory: Mapping[str, Array]) -> None:
        """Give values memory on the device that they keep."""
        self._memory.update(memory)
        self.fixed.update({name: self.arrays.tensor(array) for name, array in memory.items()})
        self.tensors.update({name: self.fixed[name] for name in memory})

    def _allocate_buffers(self, plan: Plan, rank: Rank) -> None:
        buffers = {
            buffer.name: self.arrays.zeros(buffer.elements, np.dtype(buffer.dtype))
            for buffer in plan.buffers
            if buffer.memory is None and set(buffer.sites) & set(rank.sites)
        }
        buffers |= {b.name: buffers[b.memory][: b.elements] for b in plan.buffers if b.memory in buffers}
        self._memory.update(buffers)
        for piece in (*plan.slices, *rank.slices):
            if piece.buffer in buffers:
                self._memory[piece.value] = _view(buffers[piece.buffer], piece)

    def _hold(self, value: str, initial: Array) -> None:
        if value in self._memory:
            self._copy(self._memory[value], initial)
        else:
            self._fix(value, initial)

    def _fix(self, value: str, array: Array) -> None:
        self._memory[value] = self.arrays.placed(array)
        self.fixed[value] = self.arrays.tensor(self._memory[value])

    def _copy(self, target: Array, source: Array) -> None:
        if target.size != source.size or target.dtype != source.dtype:
            raise BadPlan(
                f"{_described(source)} was made, {_described(target)} was planned",
                at="values",
                fix="compile the model again",
            )
        if source is not target:
            self.arrays.copy(target, source.reshape(target.shape))


def _described(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _shapes_of_slices(plan: Plan, rank: Rank) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    dtypes = {buffer.name: np.dtype(buffer.dtype) for buffer in plan.buffers}
    whole = {buffer.name: ((buffer.elements,), dtypes[buffer.name]) for buffer in plan.buffers}
    return whole | {
        piece.value: (piece.shape, dtypes[piece.buffer]) for piece in (*plan.slices, *rank.slices)
    }


def _view(buffer: Array, piece: Slice) -> Array:
    size = int(np.prod(piece.shape, dtype=np.int64))
    if piece.offset < 0 or piece.offset + size > buffer.size:
        raise BadPlan(
            f"a slice ends at element {piece.offset + size} of a buffer of {buffer.size}",
            at=f"slices: {piece.value}",
            fix="compile the model again",
        )
    return buffer[piece.offset : piece.offset + size].reshape(piece.shape)
