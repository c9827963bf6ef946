"""A number for every row of a tensor: rows that differ in any bit have another one, but for one pair in 2^64.

    h(row) = sum over j of c[j] x[j]  mod 2^64

x[j] are the row's bytes, taken together as elements are, by four at most, c[j] odd numbers at random. Two
rows that differ in one x[j] alone never share a number, since c[j] is odd and the difference is below 2^32.
The sum may be made in parts: the numbers of boxes that have some of the columns each add up to the row's.

Source: Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair problem",
J. Algorithms 25 (1997) 19-51 (multiplication by odd numbers modulo a power of 2).
"""

from math import prod
from typing import Any

import numpy as np

from partc.runtime.plan.boxes import take
from partc.runtime.plan.variables import Box

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK_BYTES = 1 << 22


def row_hashes(array: Array, columns: Box | None = None) -> Array:
    """Return uint64[rows] of a tensor with rows; of one without axes, of its only element.

    `columns`: which ones of its rows the array has, None: all.
    """
    count = array.shape[0] if array.ndim else 1
    if not array.size:
        return np.zeros(count, np.uint64)
    rows = array.reshape(count, -1)
    row_bytes = rows.shape[1] * rows.itemsize
    word = np.dtype(f"u{min(4, rows.itemsize)}")
    factors = _odd_numbers(rows.shape[1], rows.itemsize // word.itemsize, columns)
    block = max(1, _BLOCK_BYTES // row_bytes)
    hashes = np.empty(len(rows), np.uint64)
    for first in range(0, len(rows), block):
        words = np.ascontiguousarray(rows[first : first + block]).view(np.uint8).view(word)
        np.einsum("ij,j->i", words.astype(np.uint64), factors, out=hashes[first : first + block])
    return hashes


def _odd_numbers(elements: int, words: int, columns: Box | None) -> Array:
    """Return uint64[elements * words]: those of the elements' places in a whole row."""
    row_shape = (elements,) if columns is None else tuple(prod(sizes) for sizes in columns.factored)
    numbers = np.random.default_rng(0).integers(0, 1 << 63, prod(row_shape) * words, np.uint64)
    odd: Array = numbers * np.uint64(2) + np.uint64(1)
    if columns is None:
        return odd
    every_word = Box((*columns.factored, (words,)), (*columns.ranges, ((0, words),)))
    return take(odd.reshape(*row_shape, words), every_word).reshape(-1)
