"""Random tensors addressed by (seed, row): any rows can be drawn without the others.

Rows are drawn in blocks of about 2^16 elements. Block b of seed s is the start of the stream of NumPy's
Philox generator with key s (128 bits) and counter b * 2^128, and draws fill a block in order, so that a
part of the rows equals the same rows of the whole tensor bit for bit.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_BLOCK_ELEMENTS = 1 << 16

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Callable[[np.random.Generator, int], Array]  # (generator, count) -> count elements


def normal_rows(
    seed: int,
    shape: tuple[int, ...],
    start: int,
    stop: int,
    dtype: np.dtype[Any],
    *,
    mean: float,
    scale: float,
) -> Array:
    """Draw rows [start, stop) of a normal tensor of `shape`."""
    drawn = _drawn_dtype(dtype)

    def draw(generator: np.random.Generator, count: int) -> Array:
        values: Array = generator.standard_normal(count, drawn)
        return values * drawn(scale) + drawn(mean)

    return _rows(seed, shape, start, stop, dtype, draw)


def uniform_rows(
    seed: int, shape: tuple[int, ...], start: int, stop: int, dtype: np.dtype[Any], *, low: float, high: float
) -> Array:
    """Draw rows [start, stop) of a tensor of `shape`, uniform on [low, high)."""
    drawn = _drawn_dtype(dtype)

    def draw(generator: np.random.Generator, count: int) -> Array:
        values: Array = generator.random(count, drawn)
        return values * drawn(high - low) + drawn(low)

    return _rows(seed, shape, start, stop, dtype, draw)


def integer_rows(
    seed: int, shape: tuple[int, ...], start: int, stop: int, dtype: np.dtype[Any], *, high: int
) -> Array:
    """Draw rows [start, stop) of an integer tensor of `shape`, uniform on [0, high)."""

    def draw(generator: np.random.Generator, count: int) -> Array:
        # By multiplication: rejection would consume a varying number of draws.
        return np.minimum((generator.random(count) * high).astype(np.int64), high - 1)

    return _rows(seed, shape, start, stop, dtype, draw)


def _rows(
    seed: int, shape: tuple[int, ...], start: int, stop: int, dtype: np.dtype[Any], draw: Draw
) -> Array:
    row_elements = int(np.prod(shape[1:], dtype=np.int64))
    result = np.empty((stop - start, row_elements), dtype)
    if not result.size:
        return result.reshape((stop - start, *shape[1:]))
    block_rows = max(1, _BLOCK_ELEMENTS // row_elements)
    for block, first, last in _blocks(block_rows, start, stop):
        generator = np.random.Generator(np.random.Philox(key=seed % (1 << 128), counter=block << 128))
        drawn = draw(generator, (last - block * block_rows) * row_elements)
        result[first - start : last - start] = drawn.reshape(-1, row_elements)[first - block * block_rows :]
    return result.reshape((stop - start, *shape[1:]))


def _blocks(block_rows: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block, first row, end row) for every block that rows [start, stop) touch."""
    for block in range(start // block_rows, -(-stop // block_rows)):
        yield block, max(start, block * block_rows), min(stop, (block + 1) * block_rows)


def _drawn_dtype(dtype: np.dtype[Any]) -> type[np.float32] | type[np.float64]:
    return np.float64 if dtype == np.float64 else np.float32
