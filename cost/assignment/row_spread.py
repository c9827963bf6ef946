"""How a table's traffic is spread over its rows, and where to cut it so that servers carry given shares.

    traffic   |####
              |#######                    frequent words have low numbers: half the traffic is
              |##############             on the first rows, and a cut in the middle of the rows
              +-------------------- row   leaves the second server little to do

A spread is a tuple of row positions, ascending: below the i-th of n lie (i + 1) / (n + 1) of all touches.
Between two positions touches are taken to be even. An empty one: even over all rows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

PARTS = 64

Spread = tuple[int, ...]


def spread_of(touches: np.ndarray[Any, np.dtype[Any]]) -> Spread:
    """Return the spread of a count per row, int64[rows]; empty if nothing was touched."""
    cumulated = np.cumsum(touches)
    if not len(cumulated) or cumulated[-1] == 0:
        return ()
    quantiles = cumulated[-1] * np.arange(1, PARTS) / PARTS
    return tuple(int(row) + 1 for row in np.searchsorted(cumulated, quantiles))


def share_of_traffic(spread: Spread, rows: int, start: int, stop: int) -> float:
    """Return the share of a table's touches that lies on rows [start, stop)."""
    return _below(spread, rows, stop) - _below(spread, rows, start)


def cut(spread: Spread, rows: int, shares: Sequence[float]) -> list[int]:
    """Return the rows of consecutive pieces that carry `shares` of the traffic, which add up to 1.

    A piece with a share has a row at least; needs as many rows.
    """
    fractions = np.linspace(0.0, 1.0, len(spread) + 2)
    fractions_wanted = np.cumsum(np.asarray(shares, np.float64))
    ends = [round(end) for end in np.interp(fractions_wanted, fractions, (0, *spread, rows))]
    ends[-1] = rows
    pieces: list[int] = []
    parts_left = sum(share > 0 for share in shares)
    for share, end in zip(shares, ends, strict=True):
        assigned = sum(pieces)
        parts_left -= share > 0
        pieces.append(min(max(end - assigned, 1), rows - assigned - parts_left) if share > 0 else 0)
    pieces[max(i for i, share in enumerate(shares) if share > 0)] += rows - sum(pieces)
    return pieces


def _below(spread: Spread, rows: int, row: int) -> float:
    """Return the share of touches below a row."""
    ends = (0, *spread, rows)
    i = min(bisect_right(ends, row) - 1, len(ends) - 2)
    within = (row - ends[i]) / (ends[i + 1] - ends[i]) if ends[i + 1] > ends[i] else 1.0
    return (i + min(1.0, within)) / (len(ends) - 1)
