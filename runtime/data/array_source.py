"""Samples of files, a step's after the other's.

An input with a sample axis has M samples along it, and step s takes samples [s B, (s+1) B) modulo M of the
total batch B, at most M; shuffled, each epoch of M has an order of its own. Without a sample axis: an array
of the input's rank is read every step, one with a further leading axis has one entry per step of the
training, however many samples those before had.

Epochs follow one another, each shuffled by itself if asked. A shuffled epoch is a permutation that is
computed place by place, in no memory: a Feistel network on the fewest bits, an even number of them, that
count all samples, applied again to what falls behind the last one ("cycle walking").

Source: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3 and 4.
"""

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from partc.runtime.data.batches import (
    check_total_batch,
    check_values_taken,
    index_in_total,
    inputs_of,
    place_in_batch,
    refuse_empty,
    total_shape,
)
from partc.runtime.data.column import Column
from partc.runtime.data.not_finite import Index, element
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import Plan, Rank
from partc.runtime.plan.variables import DataInput

Indices = np.ndarray[Any, np.dtype[np.int64]]

_ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


class SampleOrder:
    """Sample number k of a training -> which of `count` samples that is. `seed` None: as they lie."""

    def __init__(self, count: int, seed: int | None = None) -> None:
        self.count = count
        self._seed = seed

    def indices(self, first: int, samples: int) -> Indices:
        """Return int64[samples]: which samples a training uses from its `first` on."""
        numbers = np.arange(first, first + samples, dtype=np.int64)
        epochs, places = np.divmod(numbers, self.count)
        if self._seed is None:
            return places
        indices = np.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if samples else ():
            indices[epochs == epoch] = permuted(places[epochs == epoch], self.count, f"{self._seed}/{epoch}")
        return indices


def permuted(places: Indices, count: int, key: str) -> Indices:
    """Return where a permutation of `count` places, which the key chooses, takes these."""
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), np.uint64)[:_ROUNDS]
    moved = _network(places.astype(np.uint64), half, keys)
    while (behind := moved >= count).any():
        moved[behind] = _network(moved[behind], half, keys)
    return moved.astype(np.int64)


def _network(
    values: np.ndarray[Any, np.dtype[np.uint64]], half: np.uint64, keys: np.ndarray[Any, np.dtype[np.uint64]]
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        mixed = (right ^ key) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX[1]
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << half) | right


Array = np.ndarray[Any, np.dtype[Any]]

# Values of what is larger are checked step by step: nobody waits until all of it was read.
CHECKED_AT_ONCE_BYTES = 1 << 28


class ArraySource:
    """Arrays that hold all samples.

    `name`: the file or folder that the user gave, if it is one. `shuffle_seed` None: samples as they lie.
    `steps_ahead`: by how much steps are ahead of batches, where a training went on with others.
    Raises BadData where arrays do not fit the plan's inputs or each other.
    """

    def __init__(
        self,
        plan: Plan,
        columns: Mapping[str, Column],
        name: str = "",
        shuffle_seed: int | None = None,
        steps_ahead: int = 0,
    ) -> None:
        self._plan = plan
        self._steps_ahead = steps_ahead
        self._name = name
        self._columns = dict(columns)
        self._shuffle_seed = shuffle_seed
        fitting = {
            data_input.name
            for data_input in plan.data_inputs
            if data_input.name in columns and _has_rank(data_input, columns[data_input.name])
        }
        self._orders = {
            data_input.name: SampleOrder(columns[data_input.name].shape[data_input.sample_axis], shuffle_seed)
            for data_input in plan.data_inputs
            if data_input.sample_axis is not None and data_input.name in fitting
        }
        first = {
            data_input.name: self._rows(data_input, 0, 0, 1)
            for data_input in plan.data_inputs
            if data_input.name in fitting
        }
        stray = {name: np.empty(0) for name in columns.keys() - fitting}
        check_total_batch(plan, {**first, **stray})
        self._check_samples()

    def total(self, step: int) -> dict[str, Array]:
        """Return the batch of all replicas."""
        return {data_input.name: self._rows(data_input, step, 0, 1) for data_input in self._plan.data_inputs}

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed. Raises BadData of values that the model does not take."""
        shares: dict[str, Array] = {}
        for data_input in inputs_of(self._plan, rank):
            rows = self._rows(data_input, step, rank.replica or 0, self._plan.replicas)
            if self._columns[data_input.name].nbytes > CHECKED_AT_ONCE_BYTES:
                check_values_taken(data_input, rows, None, f"{self._name or 'data'}, step {step + 1}, ")
            shares[data_input.name] = rows
        return shares

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say where the user finds an element: in the file, or in a batch."""
        if not self._name:
            return place_in_batch("data", self._plan, rank, step, data_input, index)
        column, axis = self._columns[data_input.name], data_input.sample_axis
        if axis is None:
            entry = (step + self._steps_ahead) % max(1, column.shape[0]) if column.ndim else 0
            in_file = index if column.ndim == len(index) else (entry, *index)
        else:
            in_total = index_in_total(self._plan, rank, data_input, index)
            number = step * self._batch(data_input, axis) + in_total[axis]
            sample = int(self._orders[data_input.name].indices(number, 1)[0])
            in_file = (*index[:axis], sample, *index[axis + 1 :])
        return f"{self._name}: {element(data_input.name, in_file)}"

    def _rows(self, data_input: DataInput, step: int, part: int, parts: int) -> Array:
        """Return part `part` of `parts` of one step's samples."""
        column, axis = self._columns[data_input.name], data_input.sample_axis
        if axis is None:
            whole = column.whole()
            is_of_all = column.ndim == len(data_input.shape)
            return np.asarray(whole if is_of_all else whole[(step + self._steps_ahead) % len(whole)])
        batch = self._batch(data_input, axis)
        start, stop = part_range(batch, parts, part)
        return column.take(self._orders[data_input.name].indices(step * batch + start, stop - start))

    def _batch(self, data_input: DataInput, axis: int) -> int:
        """Return how many entries a step takes: as declared, else all there are."""
        declared = total_shape(self._plan, data_input)[axis]
        return declared if isinstance(declared, int) else self._columns[data_input.name].shape[axis]

    def _check_samples(self) -> None:
        """Refuse inputs of unequal length, whose samples would be paired wrongly, and values out of range."""
        counts: dict[str, tuple[int, int]] = {}  # entries, and those of a step
        for data_input in self._plan.data_inputs:
            column, axis = self._columns[data_input.name], data_input.sample_axis
            declared = 0 if axis is None else total_shape(self._plan, data_input)[axis]
            batch = declared if axis is not None and isinstance(declared, int) else None
            if column.nbytes <= CHECKED_AT_ONCE_BYTES:
                check_values_taken(data_input, column.whole(), batch)
            if axis is not None:
                _refuse_short(data_input, column.shape[axis], batch)
                counts[data_input.name] = column.shape[axis], batch or 1
        for (one, (count, batch)), (other, (others, its)) in pairwise(counts.items()):
            if count * its != others * batch:
                raise BadData(
                    f"{count} samples of {one!r} and {others} of {other!r}: they would be paired wrongly",
                    at=f"data inputs {one!r} and {other!r}",
                    fix="give every input the same samples, in the same order",
                )
            if count != others and self._shuffle_seed is not None:
                raise BadUsage(
                    f"a step takes {batch} of {one!r} and {its} of {other!r}: what goes together?",
                    at="--shuffle",
                    fix="shuffle the files, and leave --shuffle out",
                )


def _refuse_short(data_input: DataInput, samples: int, batch: int | None) -> None:
    """Refuse a file that does not fill one step: some of its samples would count twice in it."""
    if batch is not None and samples < batch:
        raise BadData(
            f"{samples} samples, where a step takes {batch}: some would count twice in it",
            at=f"data input {data_input.name!r}",
            fix=f"supply {batch} samples at least, or compile for a smaller batch or fewer replicas",
        )


def _has_rank(data_input: DataInput, column: Column) -> bool:
    refuse_empty(data_input, column)
    further = 1 if data_input.sample_axis is None else 0
    ranks = (len(data_input.shape), len(data_input.shape) + further)
    if column.ndim in ranks and (column.ndim == 0 or column.shape[0]):
        return True
    raise BadData(
        f"an array has shape {list(column.shape)}, the model reads {list(data_input.shape)}",
        at=f"data input {data_input.name!r}",
        fix=f"supply an array of rank {' or '.join(map(str, sorted(set(ranks))))} that is not empty",
    )
