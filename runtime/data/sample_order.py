"""In which order samples are used: one epoch after the other, each shuffled by itself if asked.

A shuffled epoch is a permutation that is computed place by place, in no memory: a Feistel network on the
fewest bits, an even number of them, that count all samples, applied again to what falls behind the last
one ("cycle walking").

Source: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3 and 4.
"""

import hashlib
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]

_ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


class SampleOrder:
    """Sample number k of a training -> which of `count` samples that is. `seed` None: as they lie."""

    def __init__(self, count: int, seed: int | None = None) -> None:
        self.count = count
        self._seed = seed

    def indices(self, first: int, samples: int) -> Indices:
        """Return int64[samples]: which samples a training uses from its `first` on."""
        numbers = np.arange(first, first + samples, dtype=np.int64)
        epochs, places = np.divmod(numbers, self.count)
        if self._seed is None:
            return places
        indices = np.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if samples else ():
            indices[epochs == epoch] = permuted(places[epochs == epoch], self.count, f"{self._seed}/{epoch}")
        return indices


def permuted(places: Indices, count: int, key: str) -> Indices:
    """Return where a permutation of `count` places, which the key chooses, takes these."""
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), np.uint64)[:_ROUNDS]
    moved = _network(places.astype(np.uint64), half, keys)
    while (behind := moved >= count).any():
        moved[behind] = _network(moved[behind], half, keys)
    return moved.astype(np.int64)


def _network(
    values: np.ndarray[Any, np.dtype[np.uint64]], half: np.uint64, keys: np.ndarray[Any, np.dtype[np.uint64]]
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        mixed = (right ^ key) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX[1]
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << half) | right
