"""Batches that were handed over and differ in size, in one file that ranks read one behind the other.

staged-batches.safetensors     0/x, 0/labels, 1/x, ...      batch and data input -> array
"""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from partc.runtime.data.batches import Batch
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.plan.program import Plan

Array = np.ndarray[Any, np.dtype[Any]]

_FILE = "staged-batches.safetensors"


def write_batches(plan: Plan, batches: Sequence[Batch], folder: Path) -> str:
    """Write checked total batches into a job's folder, and return how `open_source` finds them."""
    names = [data_input.name for data_input in plan.data_inputs]
    write_arrays(
        folder / _FILE,
        {f"{n}/{name}": np.asarray(batch[name]) for n, batch in enumerate(batches) for name in names},
    )
    return str(folder / _FILE)


def are_staged(data: str) -> bool:
    """Tell whether `write_batches` wrote the data."""
    return Path(data).name == _FILE


def read_batches(plan: Plan, data: str) -> Iterator[dict[str, Array]]:
    """Yield the batches in order; each is read when it is asked for."""
    names = [data_input.name for data_input in plan.data_inputs]
    with safe_open(data, framework="numpy") as tensors:
        stored = set(tensors.keys())
        for n in count():
            if not stored.issuperset(f"{n}/{name}" for name in names):
                return
            yield {name: tensors.get_tensor(f"{n}/{name}") for name in names}
