"""Where training data comes from: an npz file, a seed, or a Python function.

FILE.npz       one array per input. With a sample axis, the array's sample axis has M samples and step s
               takes samples [s B, (s+1) B) modulo M of the total batch B, at most M. Without: an array of
               the input's rank is read every step, one with a further leading axis has one entry per step.
synthetic      random values addressed by (seed, input, step): normal, or integers on [0, high)
MODULE:FUNC    a function that returns an iterator of total batches (input name -> array), or one of
               (num_shards, shard_id) that returns one replica's batches: every rank reads its own
"""

import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from partc.runtime.data.batches import (
    check_input,
    check_total_batch,
    check_values_taken,
    index_in_total,
    inputs_of,
    refuse_empty,
    share_of,
    share_of_input,
    total_shape,
)
from partc.runtime.data.draws import integer_rows, normal_rows
from partc.runtime.data.not_finite import Index, element
from partc.runtime.data.npz import read_npz
from partc.runtime.data.sharded import ShardedSource, is_read_by_shard
from partc.runtime.errors import BadData, naming
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import Plan, Rank
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]

# What synthetic data feeds a scalar that all samples share: a learning rate, a temperature.
SYNTHETIC_SCALAR = 0.01
STAGED_FILE = "staged-batches.npz"  # of batches that were handed over, in a job's folder


_FUNCTION = (
    "name a module on the Python path, and in it a function without arguments, or of (num_shards, shard_id), "
    "that returns an iterator of batches, each a dict of input name -> array"
)


class Shares(Protocol):
    """What ranks are fed by step, counted from 0."""

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed."""

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say where the user finds an element of a rank's share, or of the total batch, for messages."""


class Source(Shares, Protocol):
    """Total batches by step, and each rank's share."""

    def total(self, step: int) -> dict[str, Array]:
        """Return the batch of all replicas."""


def open_source(data: str, plan: Plan, seed: int = 0) -> Source:
    """Open what the `--data` option names. Raises BadData."""
    if data == "synthetic":
        return SyntheticSource(plan, seed)
    if data.endswith(".npz"):
        path = Path(data)
        with naming(path, BadData):
            return ArraySource(plan, read_npz(path), "" if path.name == STAGED_FILE else str(path))
    if ":" in data:
        function = find_function(data)
        sharded = is_read_by_shard(function)
        return ShardedSource(plan, function, data) if sharded else FunctionSource(plan, data)
    raise BadData(
        f"data {data!r} is of no known form", at="--data", fix="give FILE.npz, synthetic or MODULE:FUNC"
    )


class ArraySource:
    """Arrays that hold all samples."""

    def __init__(self, plan: Plan, arrays: Mapping[str, Array], name: str = "") -> None:
        """`name`: the file that the user gave, if it is one."""
        self._plan = plan
        self._name = name
        self._arrays = dict(arrays)
        first = {
            data_input.name: self._rows(data_input, 0, 0, 1)
            for data_input in plan.data_inputs
            if data_input.name in self._arrays and _has_rank(data_input, self._arrays[data_input.name])
        }
        stray = {name: array for name, array in self._arrays.items() if name not in first}
        check_total_batch(plan, {**first, **stray})
        self._check_samples()

    def _check_samples(self) -> None:
        """Refuse inputs of unequal length, whose samples would be paired wrongly, and values out of range."""
        batches: dict[str, tuple[Fraction, int]] = {}
        for data_input in self._plan.data_inputs:
            array, axis = self._arrays[data_input.name], data_input.sample_axis
            declared = 0 if axis is None else total_shape(self._plan, data_input)[axis]
            batch = declared if axis is not None and isinstance(declared, int) else None
            check_values_taken(data_input, array, batch)
            if axis is not None:
                count = array.shape[axis]
                _refuse_short(data_input, count, batch)
                batches[data_input.name] = (Fraction(count, batch) if batch else Fraction(count), count)
        for (one, (first, count)), (other, (second, others)) in pairwise(batches.items()):
            if first != second:
                raise BadData(
                    f"{count} samples of {one!r} and {others} of {other!r}: they would be paired wrongly",
                    at=f"data inputs {one!r} and {other!r}",
                    fix="give every input the same samples, in the same order",
                )

    def total(self, step: int) -> dict[str, Array]:
        """Return the batch of all replicas."""
        return {data_input.name: self._rows(data_input, step, 0, 1) for data_input in self._plan.data_inputs}

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed."""
        return {
            data_input.name: self._rows(data_input, step, rank.replica or 0, self._plan.replicas)
            for data_input in inputs_of(self._plan, rank)
        }

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say where the user finds an element: in the file, or in a batch."""
        if not self._name:
            return _place_in_batch("data", self._plan, rank, step, data_input, index)
        array, axis = self._arrays[data_input.name], data_input.sample_axis
        if axis is None:
            in_file = index if array.ndim == len(index) else (step % len(array), *index)
        else:
            in_total = index_in_total(self._plan, rank, data_input, index)
            declared = total_shape(self._plan, data_input)[axis]
            batch = declared if isinstance(declared, int) else array.shape[axis]
            sample = (step * batch + in_total[axis]) % array.shape[axis]
            in_file = (*index[:axis], sample, *index[axis + 1 :])
        return f"{self._name}: {element(data_input.name, in_file)}"

    def _rows(self, data_input: DataInput, step: int, part: int, parts: int) -> Array:
        """Return part `part` of `parts` of one step's samples."""
        array = self._arrays[data_input.name]
        axis = data_input.sample_axis
        if axis is None:
            return array if array.ndim == len(data_input.shape) else array[step % len(array)]
        declared = total_shape(self._plan, data_input)[axis]
        batch = declared if isinstance(declared, int) else array.shape[axis]
        start, stop = part_range(batch, parts, part)
        first, samples = (step * batch + start) % array.shape[axis], stop - start
        if first + samples <= array.shape[axis]:
            index = (slice(None),) * axis + (slice(first, first + samples),)
            return np.asarray(array[index], order="C")
        wrapped: Array = np.take(array, np.arange(first, first + samples) % array.shape[axis], axis=axis)
        return wrapped


class SyntheticSource:
    """Random values addressed by (seed, input, step)."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self._seed = seed
        self._shapes = {data_input.name: _known_shape(plan, data_input) for data_input in plan.data_inputs}
        for data_input in plan.data_inputs:
            check_input(plan, data_input, np.broadcast_to(_zero(data_input), self._shapes[data_input.name]))

    def total(self, step: int) -> dict[str, Array]:
        """Return the batch of all replicas."""
        return {data_input.name: self._rows(data_input, step, 0, 1) for data_input in self._plan.data_inputs}

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed; where samples are rows, only these are drawn."""
        return {
            data_input.name: self._share(rank, data_input, step) for data_input in inputs_of(self._plan, rank)
        }

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say which element of a batch it is."""
        return _place_in_batch("synthetic data", self._plan, rank, step, data_input, index)

    def _share(self, rank: Rank, data_input: DataInput, step: int) -> Array:
        if data_input.sample_axis == 0:
            return self._rows(data_input, step, rank.replica or 0, self._plan.replicas)
        return share_of_input(self._plan, rank, data_input, self._rows(data_input, step, 0, 1))

    def _rows(self, data_input: DataInput, step: int, part: int, parts: int) -> Array:
        shape = self._shapes[data_input.name]
        dtype = np.dtype(data_input.dtype)
        if not shape:
            return np.array(SYNTHETIC_SCALAR if dtype.kind == "f" else 0, dtype)
        start, stop = part_range(shape[0], parts, part) if data_input.sample_axis == 0 else (0, shape[0])
        digest = hashlib.sha256(f"{self._seed}/{data_input.name}/{step}".encode()).digest()
        seed = int.from_bytes(digest[:16], "little")
        if dtype.kind == "f":
            return normal_rows(seed, shape, start, stop, dtype, mean=0.0, scale=1.0)
        return integer_rows(seed, shape, start, stop, dtype, high=data_input.high or 2)


class FunctionSource:
    """Total batches from an iterator that a user's function returns."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._batches: Iterator[Mapping[str, Array]] = _call(name)
        self._step = -1
        self._batch: dict[str, Array] = {}

    def total(self, step: int) -> dict[str, Array]:
        """Return the batch of all replicas. Steps must come in order."""
        while self._step < step:
            batch = next(self._batches, None)
            self._step += 1
            if not isinstance(batch, Mapping | None):
                raise BadData(
                    f"{self._name} gives {type(batch).__name__} objects, not batches",
                    at="--data",
                    fix=_FUNCTION,
                )
            if batch is None:
                raise BadData(
                    f"{self._name} ends after {self._step} batches, step {step + 1} was asked for",
                    at="--data",
                    fix="let it go on, or train fewer steps",
                )
            self._batch = {name: np.asarray(array) for name, array in batch.items()}
            check_total_batch(self._plan, self._batch, f"{self._name}, step {self._step + 1}, ")
        return self._batch

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed."""
        return share_of(self._plan, rank, self.total(step))

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say which element of a batch it is."""
        return _place_in_batch(self._name, self._plan, rank, step, data_input, index)


def find_function(name: str) -> Any:  # whatever the user's module has under that name
    """Import what MODULE:FUNC names. Raises BadData."""
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _uncallable(name, error) from error


def _call(name: str) -> Any:  # whatever the user's function returns; checked batch by batch
    function = find_function(name)
    try:
        return iter(function())
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _uncallable(name, error) from error


def _uncallable(name: str, error: Exception) -> BadData:
    return BadData(f"{name} cannot be called: {error}", at="--data", fix=_FUNCTION)


def _place_in_batch(
    name: str, plan: Plan, rank: Rank | None, step: int, data_input: DataInput, index: Index
) -> str:
    in_total = index_in_total(plan, rank, data_input, index)
    return f"{name}, batch of step {step + 1}: {element(data_input.name, in_total)}"


def _refuse_short(data_input: DataInput, samples: int, batch: int | None) -> None:
    """Refuse a file that does not fill one step: some of its samples would count twice in it."""
    if batch is not None and samples < batch:
        raise BadData(
            f"{samples} samples, where a step takes {batch}: some would count twice in it",
            at=f"data input {data_input.name!r}",
            fix=f"supply {batch} samples at least, or compile for a smaller batch or fewer replicas",
        )


def _has_rank(data_input: DataInput, array: Array) -> bool:
    refuse_empty(data_input, array)
    further = 1 if data_input.sample_axis is None else 0
    ranks = (len(data_input.shape), len(data_input.shape) + further)
    if array.ndim in ranks and (array.ndim == 0 or len(array)):
        return True
    raise BadData(
        f"an array has shape {list(array.shape)}, the model reads {list(data_input.shape)}",
        at=f"data input {data_input.name!r}",
        fix=f"supply an array of rank {' or '.join(map(str, sorted(set(ranks))))} that is not empty",
    )


def _known_shape(plan: Plan, data_input: DataInput) -> tuple[int, ...]:
    shape = total_shape(plan, data_input)
    for size in shape:
        if isinstance(size, str):
            raise BadData(
                f"size {size!r} is not known", at=f"data input {data_input.name!r}", fix="supply real data"
            )
    return tuple(int(size) for size in shape)


def _zero(data_input: DataInput) -> Array:
    return np.zeros((), data_input.dtype)
