"""Data that is no finite number, looked for where a loss is none: the message says where it lies."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from partc.runtime.errors import Diverged
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]
Index = tuple[int, ...]
DescribePlace = Callable[[DataInput, Index], str]  # where the user finds an element of what a step is fed


def first_not_finite(plan: Plan, fed: Mapping[str, Array]) -> tuple[DataInput, Index] | None:
    """Return the first element of a step's float data that is infinite or NaN."""
    for entry in plan.data_inputs:
        array = fed.get(entry.name)
        if array is None or not (array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16):
            continue
        finite = np.isfinite(array)
        if not finite.all():
            first = np.unravel_index(int(np.argmin(finite)), array.shape)
            return entry, tuple(int(place) for place in first)
    return None


def with_cause(error: Diverged, plan: Plan, fed: Mapping[str, Array], place: DescribePlace) -> Diverged:
    """Return an error of a loss that is not finite, with the data that makes it so if there is any."""
    entry_and_index = first_not_finite(plan, fed)
    if entry_and_index is None:
        return error
    entry, index = entry_and_index
    return Diverged(
        f"{error.what}: the data holds {fed[entry.name][index]}",
        at=f"{error.at}; {place(entry, index)}",
        fix="correct that data, or leave those samples out",
    )


def element(name: str, index: Index) -> str:
    """Name an element of an array, for messages."""
    return f"array {name!r}, element {list(index)}" if index else f"array {name!r}"
