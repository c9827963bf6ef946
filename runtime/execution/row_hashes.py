"""A number for every row of a tensor: rows that differ in any bit have another one, but for one pair in 2^64.

    h(row) = sum over j of c[j] x[j]  mod 2^64

x[j] are the row's bytes, taken together by four where they divide so, c[j] odd numbers at random. Two rows
that differ in one x[j] alone never share a number, since c[j] is odd and the difference is below 2^32.

Source: Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair problem",
J. Algorithms 25 (1997) 19-51 (multiplication by odd numbers modulo a power of 2).
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK_BYTES = 1 << 22


def row_hashes(array: Array) -> Array:
    """Return uint64[rows] of a tensor with rows; of one without axes, of its only element."""
    rows = array.reshape(array.shape[0] if array.ndim else 1, -1)
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    row_bytes = rows.shape[1] * rows.itemsize
    word = np.dtype(np.uint32 if row_bytes % 4 == 0 else np.uint8)
    factors = _odd_numbers(row_bytes // word.itemsize)
    block = max(1, _BLOCK_BYTES // row_bytes)
    hashes = np.empty(len(rows), np.uint64)
    for first in range(0, len(rows), block):
        words = np.ascontiguousarray(rows[first : first + block]).view(np.uint8).view(word)
        np.einsum("ij,j->i", words.astype(np.uint64), factors, out=hashes[first : first + block])
    return hashes


def _odd_numbers(count: int) -> Array:
    numbers = np.random.default_rng(0).integers(0, 1 << 63, count, np.uint64)
    odd: Array = numbers * np.uint64(2) + np.uint64(1)
    return odd
