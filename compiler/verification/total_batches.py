"""The total batch of every step, read by verify itself: not by the code that ranks read their shares with.

FILE.npz       sample i of step s is sample (s B + i) mod M of the file, B the total batch; an array that
               all replicas share is read whole, or its entry s mod n where it has a leading axis more
synthetic      normal numbers, or integers on [0, high), drawn for (seed, input, step)
MODULE:FUNC    the function's batches, or one of every shard, joined along the sample axis
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.callers_code import CallersBatches
from partc.runtime.data.batches import Batch, check_total_batch, copied, total_shape
from partc.runtime.data.draws import integer_rows, normal_rows
from partc.runtime.data.feeds import SYNTHETIC_SCALAR, open_source
from partc.runtime.errors import BadData
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]
Data = str | Path | Sequence[Batch]


def total_batches(plan: Plan, data: Data, steps: int, seed: int) -> Iterator[dict[str, Array]]:
    """Yield the total batches of `steps` steps. Raises BadData."""
    if isinstance(data, str | Path):
        source = open_source(str(data), plan, seed)  # refuses what ranks would refuse
        if str(data).endswith(".npz"):
            return islice(_of_file(plan, Path(data)), steps)
        if data == "synthetic":
            return islice(_synthetic(plan, seed), steps)
        return (source.total(step) for step in range(steps))
    batches: list[dict[str, Array]] = []
    for batch in islice(CallersBatches(data), steps):
        check_total_batch(plan, batch)
        batches.append(copied(batch))
    if len(batches) < steps:
        raise BadData(
            f"{len(batches)} batches for {steps} steps", at="data", fix="give one total batch per step"
        )
    return iter(batches)


def _of_file(plan: Plan, path: Path) -> Iterator[dict[str, Array]]:
    with np.load(path, allow_pickle=False) as arrays:
        file_arrays = {entry.name: arrays[entry.name] for entry in plan.data_inputs}
    for step in count():
        yield {entry.name: _entries(plan, entry, file_arrays[entry.name], step) for entry in plan.data_inputs}


def _entries(plan: Plan, entry: DataInput, array: Array, step: int) -> Array:
    axis = entry.sample_axis
    if axis is None:
        # An entry without axes would be a scalar of NumPy's, which ONNX Runtime does not take.
        return array if array.ndim == len(entry.shape) else np.asarray(array[step % len(array)])
    samples = total_shape(plan, entry)[axis]
    expected = samples if isinstance(samples, int) else array.shape[axis]
    places = [(step * expected + sample) % array.shape[axis] for sample in range(expected)]
    return np.ascontiguousarray(np.moveaxis(np.moveaxis(array, axis, 0)[places], 0, axis))


def _synthetic(plan: Plan, seed: int) -> Iterator[dict[str, Array]]:
    for step in count():
        yield {entry.name: _draw_entry(plan, entry, seed, step) for entry in plan.data_inputs}


def _draw_entry(plan: Plan, entry: DataInput, seed: int, step: int) -> Array:
    shape = tuple(int(size) for size in total_shape(plan, entry))
    dtype = np.dtype(entry.dtype)
    if not shape:
        return np.array(SYNTHETIC_SCALAR if dtype.kind == "f" else 0, dtype)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{entry.name}/{step}".encode()).digest()[:16], "little")
    if dtype.kind == "f":
        return normal_rows(key, shape, 0, shape[0], dtype, mean=0.0, scale=1.0)
    return integer_rows(key, shape, 0, shape[0], dtype, high=entry.high or 2)
