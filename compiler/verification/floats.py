"""What verification asks of arrays of any float dtype; numpy alone does not know bfloat16."""

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def is_float(array: Array) -> bool:
    """Tell whether the elements are floats."""
    return np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16


def eps_of(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next number."""
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def least_of(dtype: np.dtype[Any]) -> float:
    """Return the smallest number of full precision; below it there are fewer bits."""
    return float(ml_dtypes.finfo(dtype).tiny)  # type: ignore[no-untyped-call]


def wide(array: Array) -> Array:
    """Return float32 as it is, for tables are large, and all else as float64."""
    return array if array.dtype == np.float32 else array.astype(np.float64)


def sizes(array: Array) -> Array:
    """Return |array|, float32 or float64."""
    absolute: Array = np.abs(wide(array))
    return absolute


def max_abs(array: Array) -> float:
    """Return max|array|, 0 of no elements."""
    return float(np.max(sizes(array), initial=0.0))
