"""Sums of values that are rounded to 16 bits before they are sent.

    every member   rounds its value, and sends each other member the region that is that one's to sum
    each region    is summed in float32, in group order
    all_reduce     each sum is rounded in its turn, and gathered by all

So a value is rounded once, and the sum once more where all have it; every member ends with the same bits.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by it)
import numpy as np

from partc.runtime.transports.communication import Part

Array = np.ndarray[Any, np.dtype[Any]]


def is_rounded(part: Part) -> bool:
    """Tell whether a communication rounds what it sends: alone, a member sends nothing."""
    return bool(part.start.rounds_to) and len(part.members) > 1


def sent_bytes(part: Part, array: Array) -> int:
    """Return how many bytes an array takes on its way."""
    return array.size * np.dtype(part.start.rounds_to).itemsize if is_rounded(part) else array.nbytes


def rounded(part: Part, array: Array) -> Array:
    """Return an array's elements, flat, as they are sent."""
    return array.reshape(-1).astype(part.start.rounds_to)


def regions_of(part: Part, elements: int) -> list[int]:
    """Return how many elements each member sums."""
    if part.start.counts:
        return list(part.start.counts)
    members = len(part.members)
    return [stop - start for start, stop in pairwise(elements * i // members for i in range(members + 1))]


def sum_of(pieces: Sequence[Array]) -> Array:
    """Return float32[n], the sum of what members sent of a region, in group order."""
    total = pieces[0].astype(np.float32)
    for piece in pieces[1:]:
        total += piece.astype(np.float32)
    return total
