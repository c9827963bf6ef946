"""Where training data comes from: files of samples, a seed, or a Python function.

FILES          arrays that hold all samples: FILE.npz, FILE.parquet, or a folder (sample_files.py)
synthetic      random values addressed by (seed, input, step): normal, or integers on [0, high)
MODULE:FUNC    a function that returns an iterator of total batches (input name -> array), or one of
               (num_shards, shard_id) that returns one replica's batches: every rank reads its own. It is
               given what else its parameters ask for: `start`, the batches to leave out; `seed`
"""

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from partc.runtime import callers_code
from partc.runtime.callers_code import CallersBatches
from partc.runtime.data.array_source import ArraySource
from partc.runtime.data.batches import (
    check_input,
    check_total_batch,
    copied,
    inputs_of,
    place_in_batch,
    share_of,
    share_of_input,
    total_shape,
    unmasked,
)
from partc.runtime.data.draws import integer_rows, normal_rows
from partc.runtime.data.not_finite import Index
from partc.runtime.data.sample_files import is_of_samples, open_samples
from partc.runtime.data.sharded import ShardedSource, is_read_by_shard
from partc.runtime.data.staged_batches import are_staged, read_batches
from partc.runtime.errors import BadData, BadUsage, PartcError, naming
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import Plan, Rank
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]

# What synthetic data feeds a scalar that all samples share: a learning rate, a temperature.
SYNTHETIC_SCALAR = 0.01
SYNTHETIC = "synthetic"
STAGED_FILE = "staged-batches.npz"  # of batches that were handed over, in a job's folder


_DATA = "give FILE.npz, FILE.parquet, a folder of such files, synthetic or MODULE:FUNC"
_FUNCTION = (
    "name a module on the Python path, and in it a function without arguments, or of (num_shards, shard_id), "
    "that returns an iterator of batches, each a dict of input name -> array"
)
# Files of frames between a user's function and who imports or reads it.
_BETWEEN = ("<", importlib.__file__, callers_code.__file__)


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


def open_source(
    data: str,
    plan: Plan,
    seed: int = 0,
    is_shuffled: bool = False,
    first: int = 0,
    steps_ahead: int = 0,
) -> Source:
    """Open what the `--data` option names. Raises BadData.

    `is_shuffled`: samples of files, in every epoch anew. `first`: no batch before this one will be asked for.
    `steps_ahead`: by how much the training's steps are ahead of its batches, of inputs with an entry a step.
    """
    if is_of_samples(data):
        path = Path(data)
        axes = {data_input.name: data_input.sample_axis for data_input in plan.data_inputs}
        with naming(path, BadData):
            columns = open_samples(path, axes)
            name = "" if path.name == STAGED_FILE else str(path)
            return ArraySource(plan, columns, name, seed if is_shuffled else None, steps_ahead)
    if is_shuffled:
        raise BadUsage(
            "data that cannot be shuffled",
            at="--shuffle",
            fix="give files of samples with --data, or let a function that takes `seed` shuffle its own",
        )
    if data == SYNTHETIC:
        return SyntheticSource(plan, seed)
    if are_staged(data):
        return FunctionSource(plan, "data", partial(read_batches, plan, data))
    if _is_function(data):
        function = find_function(data)
        arguments, first = choose_arguments(function, first, seed)
        if is_read_by_shard(function):
            return ShardedSource(plan, partial(_call_for_shard, data, function, arguments), data, first)
        return FunctionSource(plan, data, partial(function, **arguments), first)
    raise BadData(
        f"data {data!r} is of no known form",
        at="--data",
        fix=_DATA,
    )


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
        return place_in_batch("synthetic data", self._plan, rank, step, data_input, index)

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
    """Total batches from an iterator that a user's function returns; its first is that of step `first`.

    The function may fill the same arrays for every batch: what is handed on is copied.
    """

    def __init__(self, plan: Plan, name: str, function: Callable[[], Any], first: int = 0) -> None:
        self._plan = plan
        self._name = name
        self._batches: Iterator[Mapping[str, Array]] = _call(name, function)
        self._step = first - 1
        self._batch: dict[str, Array] = {}

    def total(self, step: int) -> dict[str, Array]:
        """Return the batch of all replicas. Steps must come in order."""
        return copied(self._read(step))

    def _read(self, step: int) -> dict[str, Array]:
        """Return a batch in the user's own arrays, until the next is read."""
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
            place = f"{self._name}, step {self._step + 1}, "
            self._batch = {
                name: np.asarray(unmasked(array, f"{place}data input {name!r}"))
                for name, array in batch.items()
            }
            check_total_batch(self._plan, self._batch, place)
        return self._batch

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed."""
        return copied(share_of(self._plan, rank, self._read(step)))

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say which element of a batch it is."""
        return place_in_batch(self._name, self._plan, rank, step, data_input, index)


def is_stream(data: str) -> bool:
    """Tell whether data are batches one behind the other, of whatever size: handed over, or a function's."""
    return not data or are_staged(data) or _is_function(data)


def _is_function(data: str) -> bool:
    return ":" in data and not are_staged(data) and not is_of_samples(data)


def shards_of(data: str, replicas: int) -> int:
    """Return of how many shards a step reads a batch each; 0: it reads a total batch. Raises BadData."""
    return replicas if _is_function(data) and is_read_by_shard(find_function(data)) else 0


def find_function(name: str) -> Any:  # whatever the user's module has under that name
    """Import what MODULE:FUNC names. Raises BadData."""
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _naming_function(f"{name} cannot be loaded"):
        function = getattr(importlib.import_module(module_name), function_name)
    if not callable(function):
        raise BadData(f"{name} is no function but {function!r:.60}", at="--data", fix=_FUNCTION)
    return function


def choose_arguments(function: Any, start: int, seed: int) -> tuple[dict[str, int], int]:
    """Return what a function is given besides shards, and with which batch it begins then."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return {}, 0
    arguments = {name: value for name, value in (("start", start), ("seed", seed)) if name in parameters}
    return arguments, arguments.get("start", 0)


def _call_for_shard(
    name: str, function: Callable[..., Any], arguments: Mapping[str, int], num_shards: int, shard_id: int
) -> Iterator[Any]:
    return _call(name, partial(function, num_shards, shard_id, **arguments))


def _call(name: str, function: Callable[[], Any]) -> Iterator[Any]:  # whatever it yields; checked one by one
    with _naming_function(f"{name} cannot be called"):
        batches = iter(function())
    return _begin(name, CallersBatches(batches, name))


def _begin(name: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches. A function that yields them itself runs as the first is asked for.

    What fails behind that one may be the machine's fault, and go well another time.
    """
    with _naming_function(f"{name} gives no batch"):
        first = list(islice(batches, 1))
    yield from first
    yield from batches


@contextmanager
def _naming_function(what: str) -> Iterator[None]:
    """Let whatever the user's module or function raises be refused as data, with the line that raised it."""
    try:
        yield
    except PartcError:
        raise
    except Exception as error:
        behind = traceback.extract_tb(error.__traceback__)[2:]  # this frame, and the one that called
        frames = [f for f in behind if not f.filename.startswith(_BETWEEN)]
        at, fix = "--data", _FUNCTION
        if frames:
            at, fix = f"--data, {frames[0].filename}:{frames[0].lineno}", "mend what the named line does"
        raise BadData(f"{what}: {type(error).__name__}: {error}", at=at, fix=fix) from error


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
