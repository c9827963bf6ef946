"""Winograd's minimal filtering F(4x4, 3x3): its matrices, and how tiles lie on an image.

A tile of 6x6 pixels d and a kernel g of 3x3 give 4x4 outputs with 36 products instead of 144:

    y = A' [(G g G') * (B' d B)] A

(Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, "Fast Algorithms for Convolutional
Neural Networks", CVPR 2016, section 4.) The matrices are here those of both axes at once: a tile is a vector
of 36 entries, i 6 + j.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

KERNEL = 3
OUTPUTS = 4  # of a tile, along an axis
SPAN = OUTPUTS + KERNEL - 1
ENTRIES = SPAN * SPAN

# Where polynomials are evaluated, besides infinity. Pairs of opposite sign and of reciprocals keep numbers
# small: the error is 1.2e-6 (rms, of the outputs' own), 2.6e-6 with the usual 0, 1, -1, 2, -2, and 2.5e-7
# without tiles.
POINTS = (0.0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)


@cache
def of_source() -> np.ndarray:
    """Return float64[36,36]: a tile's pixels -> its 36 factors."""
    return _both_axes(np.linalg.inv(_powers(SPAN)).T)


@cache
def of_kernel() -> np.ndarray:
    """Return float64[36,9]: a kernel's taps -> its 36 factors."""
    return _both_axes(_powers(KERNEL))


@cache
def of_target() -> np.ndarray:
    """Return float64[16,36]: 36 products -> a tile's outputs."""
    return _both_axes(_powers(OUTPUTS).T)


def _powers(degree: int) -> np.ndarray:
    """Return float64[6, degree]: the powers below `degree` of each point; at infinity, the last alone."""
    last = np.eye(degree)[-1:]
    return np.concatenate([np.vander(POINTS, degree, increasing=True), last])


def _both_axes(matrix: np.ndarray) -> np.ndarray:
    return np.kron(matrix, matrix)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles on an image [rows, columns] that is padded before its first row and column.

    A pixel is counted row by row; `pixels` stands for a pixel of padding, or beyond the last.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    before: tuple[int, int]

    @property
    def count(self) -> int:
        """Tiles of an image."""
        return int(np.prod([-(-size // OUTPUTS) for size in self.target]))

    def reads(self) -> np.ndarray:
        """Return int64[36 tiles]: the pixel of the source that each entry of each tile reads."""
        axes = [np.arange(SPAN)[:, None] + OUTPUTS * self._tiles(axis) - self.before[axis] for axis in (0, 1)]
        return _by_tile(axes, self.source)

    def outputs(self) -> np.ndarray:
        """Return int64[16 tiles]: the pixel of the target that each output of each tile is."""
        axes = [np.arange(OUTPUTS)[:, None] + OUTPUTS * self._tiles(axis) for axis in (0, 1)]
        return _by_tile(axes, self.target)

    def pieces(self) -> np.ndarray:
        """Return int64[pixels of the target]: the output, of those of `outputs`, that each pixel is."""
        outputs = self.outputs()
        inside = outputs < self.target[0] * self.target[1]
        pieces = np.empty(inside.sum(), np.int64)
        pieces[outputs[inside]] = np.flatnonzero(inside)
        return pieces

    def readers(self) -> np.ndarray:
        """Return int64[4, pixels of the source]: the entries, of those of `reads`, that read each pixel.

        Where there are fewer than four, the number of all entries stands for none.
        """
        reads = self.reads()
        pixels = self.source[0] * self.source[1]
        readers = np.full((4, pixels), len(reads), np.int64)
        order = np.argsort(reads, kind="stable")
        order = order[: np.searchsorted(reads[order], pixels)]
        firsts = np.searchsorted(reads[order], np.arange(pixels))
        readers[np.arange(len(order)) - firsts[reads[order]], reads[order]] = order
        return readers

    def _tiles(self, axis: int) -> np.ndarray:
        return np.arange(-(-self.target[axis] // OUTPUTS))


def _by_tile(axes: Sequence[np.ndarray], sizes: tuple[int, int]) -> np.ndarray:
    """Return the pixels at [row entry, column entry, tile row, tile column], as a vector."""
    rows, columns = axes[0][:, None, :, None], axes[1][None, :, None, :]
    inside = (rows >= 0) & (rows < sizes[0]) & (columns >= 0) & (columns < sizes[1])
    return np.where(inside, rows * sizes[1] + columns, sizes[0] * sizes[1]).ravel()
