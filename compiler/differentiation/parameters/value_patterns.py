"""What a tensor's values tell of it: masks, tables of positions, progressions. Weights look like none.

    mask          an infinity, or a size that no training starts from     causal masks, padding masks
    positions     each column, along some axis, is a sinusoid or a line   rotary and sinusoidal tables, arange
    progression   equal steps, or equal ratios                            linspace, inverse frequencies
    zero-one      zeros and ones, both                                    identity, one-hot, triangle

A sinusoid obeys x[t+1] + x[t-1] = 2 cos(f) x[t] for every t, and a line does with cos(f) = 1: so one
number per column must explain all rows. Of large tensors the first part is looked at.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo

from partc.compiler.differentiation.tensor_types import element_count

MAX_ELEMENTS = 2**18  # of a tensor that are looked at: its first rows
MAX_ROWS = 64  # along each axis, in which sinusoids are looked for
HUGE = 1e4  # attention masks add -1e4, -1e9 or a float's least number; weights start near 1
MIN_CHECKS = 8  # equations that must hold beyond those that a fit can always satisfy
FIT = 1e-3  # of the largest value: what float32 sines of large angles, and float16, are off
_NO_VALUES = np.zeros(0)


@dataclass(frozen=True)
class TensorValues:
    """The values of a tensor of that shape as far as they are known; `array` is empty where nothing is."""

    array: np.ndarray
    shape: tuple[int, ...]

    @cached_property
    def is_mask(self) -> bool:
        """Tell whether a value is infinite, not a number, or huge."""
        return self.array.size > 0 and not bool((np.abs(self.array) < HUGE).all())

    @cached_property
    def is_even(self) -> bool:
        """Tell whether all values are equal: zero biases and unit scales are, and so are many constants."""
        return self.array.size > 0 and bool((self.array == self.array.flat[0]).all())

    @cached_property
    def is_zero_one(self) -> bool:
        """Tell whether the values are zeros and ones, and not all equal."""
        return self.array.size > 1 and not self.is_even and bool(np.isin(self.array, (0.0, 1.0)).all())

    @cached_property
    def is_progression(self) -> bool:
        """Tell whether the flat values have equal steps or equal ratios."""
        flat = self.array.ravel()
        if flat.size < 4 or self.is_even or self.is_mask:
            return False
        if np.ptp(np.diff(flat)) <= FIT * np.abs(np.diff(flat)).max():
            return True
        return bool(flat.all()) and bool(np.ptp(flat[1:] / flat[:-1]) <= FIT)

    @cached_property
    def is_positions(self) -> bool:
        """Tell whether each column, along some axis, is a sinusoid or a line of its row's number."""
        return any(_follow_positions(columns) for columns in self._columns())

    @cached_property
    def is_sinusoids(self) -> bool:
        """Tell whether each column is a sinusoid, and some are no lines."""
        return any(_follow_positions(columns) and not _are_lines(columns) for columns in self._columns())

    def _columns(self) -> Iterator[np.ndarray]:
        """Yield the values as columns along each axis, where they may follow positions at all."""
        head = self.array[(slice(MAX_ROWS),) * self.array.ndim]
        if head.ndim < 2 or not head.size or not np.ptp(head) < 2 * HUGE:
            return
        for axis, length in enumerate(head.shape):
            yield np.moveaxis(head, axis, 0).reshape(length, -1)

    @property
    def weight_pattern(self) -> str:
        """Name what values look like that no layer's weights start from; empty if like nothing.

        Only what is made by formulas in practice: a matrix of 1, 2, 3, .. is somebody's toy.
        """
        is_vector = sum(size > 1 for size in self.shape) == 1
        if self.is_sinusoids:
            return "a table of positions"
        if self.is_progression and is_vector:
            return "a progression"
        # A vector of both is an LSTM's bias: its forget gates start at 1.
        return "zeros and ones" if self.is_zero_one and not is_vector else ""

    @property
    def pattern(self) -> str:
        """Name what values look like that nothing trained starts from; empty if like nothing."""
        if self.is_positions:
            return "a table of positions"
        if self.is_progression:
            return "a progression"
        return "zeros and ones" if self.is_zero_one else ""

    @cached_property
    def are_distinct(self) -> bool:
        """Tell whether most values occur once, as what was drawn or trained does."""
        return 2 * len(np.unique(self.array)) > self.array.size

    @cached_property
    def has_equal_rows(self) -> bool:
        """Tell whether two rows along the last axis are equal, or may be: nothing is known."""
        if not self.array.size:
            return True
        rows = self.array.reshape(-1, self.array.shape[-1]) if self.array.ndim else self.array.reshape(1, 1)
        return len(np.unique(rows, axis=0)) < len(rows)


def _follow_positions(columns: np.ndarray) -> bool:
    """`columns` float[t, k]: whether x[t+1] + x[t-1] is one number times x[t], column by column.

    Most must vary: a row that is repeated follows no position.
    """
    length, count = columns.shape
    if length < 4 or (length - 3) * count < MIN_CHECKS:
        return False
    if np.count_nonzero(np.ptp(columns, axis=0)) * 2 <= count:
        return False
    middle, around = columns[1:-1], columns[2:] + columns[:-2]
    squares = (middle * middle).sum(axis=0)
    factor = np.divide((middle * around).sum(axis=0), squares, out=np.zeros(count), where=squares > 0)
    error = np.abs(around - factor * middle)
    return bool((np.abs(factor) <= 2 + FIT).all() and error.max() <= FIT * np.abs(columns).max())


def _are_lines(columns: np.ndarray) -> bool:
    return bool(np.abs(np.diff(columns, 2, axis=0)).max() <= FIT * np.abs(columns).max())


def values_of(tensor: TensorProto, folder: Path | None) -> TensorValues:
    """Return the values of a tensor, or of its first rows where it is large, in float64.

    External data is read from `folder` alone; nothing is known of what is not there.
    """
    width = max(1, element_count(tensor.dims[1:]))
    whole = tuple(tensor.dims)
    rows = min(tensor.dims[0], max(8, MAX_ELEMENTS // width)) if tensor.dims else 1
    shape = (rows, *tensor.dims[1:]) if tensor.dims else ()
    if tensor.data_location == TensorProto.EXTERNAL:
        return TensorValues(_external(tensor, shape, folder), whole)
    if tensor.HasField("raw_data") and math.prod(shape) < element_count(tensor.dims):
        return TensorValues(_head(tensor, shape, tensor.raw_data), whole)
    return TensorValues(_widen(numpy_helper.to_array(tensor)), whole)


def bits_of(tensor: TensorProto, folder: Path | None) -> np.ndarray | None:
    """Return all values of a float tensor as integers of its bits; None where they are not in `folder`.

    External data is mapped, not read: a table may be larger than what is left of the memory.
    """
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    bits = np.dtype(f"u{dtype.itemsize}")
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor).view(bits)
    path, info = _external_path(tensor, folder), ExternalDataInfo(tensor)
    size_bytes = element_count(tensor.dims) * bits.itemsize
    if path is None or not size_bytes or path.stat().st_size < (info.offset or 0) + size_bytes:
        return None
    return np.memmap(path, bits, "r", info.offset or 0, tuple(tensor.dims))


def _external_path(tensor: TensorProto, folder: Path | None) -> Path | None:
    """Return the file with a tensor's data, None where it is not within `folder`."""
    if folder is None:
        return None
    path = (folder / ExternalDataInfo(tensor).location).resolve()
    return path if path.is_relative_to(folder.resolve()) and path.is_file() else None


def _external(tensor: TensorProto, shape: tuple[int, ...], folder: Path | None) -> np.ndarray:
    path = _external_path(tensor, folder)
    if path is None:
        return _NO_VALUES
    with path.open("rb") as file:
        file.seek(ExternalDataInfo(tensor).offset or 0)
        return _head(tensor, shape, file.read(math.prod(shape) * 8))


def _head(tensor: TensorProto, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    """Read the first rows of a tensor from the bytes at its start."""
    head = TensorProto(data_type=tensor.data_type, dims=shape)
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    size_bytes = math.prod(shape) * itemsize
    if len(data) < size_bytes:
        return _NO_VALUES
    head.raw_data = data[:size_bytes]
    return _widen(numpy_helper.to_array(head))


def _widen(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
