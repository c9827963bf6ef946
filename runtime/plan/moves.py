"""Which parts of a tensor go from whom to whom: from the regions that ranks have to those that they want.

A region has, for every axis, ascending index ranges: the second and third of three blocks' first halves are
((6, 9), (12, 15)). Ranks that have parts of the same region have all of it; of equal regions one is sent.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise, product
from math import prod
from typing import Any

import numpy as np

from partc.runtime.plan.program import Move, Region
from partc.runtime.plan.record import Range
from partc.runtime.plan.variables import Box

Array = np.ndarray[Any, np.dtype[Any]]
Index = tuple[slice | Array, ...]


def region_of(box: Box) -> Region:
    """Return the plain index ranges of a box, neighbours joined."""
    return tuple(_joined(_runs(*axis)) for axis in zip(box.factored, box.ranges, strict=True))


@lru_cache(maxsize=1 << 14)
def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of the local tensor."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in region)


def find_moves(
    has: Sequence[Region | None], wants: Sequence[Region | None], hosts: Sequence[str]
) -> tuple[Move, ...]:
    """Return the moves after which every rank has what it wants.

    `has`, `wants`, `hosts`: by the ranks' positions. Of a rank's own region nothing is sent; of what several
    have, one on the same host sends, else the one that has sent least.
    """
    holders: dict[Region, list[int]] = {}
    for position, region in enumerate(has):
        if region is not None:
            holders.setdefault(region, []).append(position)
    sent = [0] * len(has)
    moves: list[Move] = []
    for target, want in enumerate(wants):
        for region, positions in holders.items() if want is not None else ():
            common = intersect(region, want)
            if common is None:
                continue
            near = [position for position in positions if hosts[position] == hosts[target]]
            source = target if target in positions else min(near or positions, key=lambda p: (sent[p], p))
            sent[source] += 0 if source == target else prod(shape_of(common))
            moves.append(Move(source, target, common))
    return tuple(moves)


@lru_cache(maxsize=1 << 14)
def intersect(one: Region, other: Region) -> Region | None:
    """Return what two regions have in common, None where that is nothing."""
    axes = tuple(_common(*pair) for pair in zip(one, other, strict=True))
    return axes if all(axes) else None


@lru_cache(maxsize=1 << 12)
def place_in(region: Region, part: Region) -> Index:
    """Return where a part lies in the local tensor of a region that has it."""
    axes = [_positions(*pair) for pair in zip(region, part, strict=True)]
    if all(isinstance(axis, slice) for axis in axes):
        return tuple(axes)
    numbers = [np.arange(axis.start, axis.stop) if isinstance(axis, slice) else axis for axis in axes]
    return np.ix_(*numbers)


def _positions(ranges: tuple[Range, ...], part: tuple[Range, ...]) -> slice | Array:
    indices = list(_local(ranges, part))
    first, last = (indices[0][0], indices[-1][1]) if indices else (0, 0)
    if sum(stop - start for start, stop in indices) == last - first:
        return slice(first, last)
    return np.concatenate([np.arange(start, stop) for start, stop in indices])


def _local(ranges: tuple[Range, ...], part: tuple[Range, ...]) -> list[Range]:
    """Return the local ranges of global ones, all of which lie within those held."""
    result: list[Range] = []
    for start, stop in part:
        before = 0
        for first, last in ranges:
            if first <= start and stop <= last:
                result.append((before + start - first, before + stop - first))
                break
            before += last - first
        else:
            raise AssertionError(f"[{start}, {stop}) is not within {ranges}")
    return result


def _common(one: tuple[Range, ...], other: tuple[Range, ...]) -> tuple[Range, ...]:
    ranges: list[Range] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            ranges.append((start, stop))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(ranges)


def _runs(sizes: tuple[int, ...], ranges: tuple[Range, ...]) -> list[Range]:
    """Return the index ranges of the plain axis."""
    *outer, (start, stop) = ranges
    strides = [prod(sizes[place + 1 :]) for place in range(len(outer))]
    firsts = (
        sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in product(*(range(*range_) for range_ in outer))
    )
    return [(first + start, first + stop) for first in firsts]


def _joined(runs: Sequence[Range]) -> tuple[Range, ...]:
    """Join ranges that touch."""
    if not runs:
        return ()
    breaks = [n for n, (before, after) in enumerate(pairwise(runs), start=1) if before[1] < after[0]]
    cuts = chain((0,), breaks), chain(breaks, (len(runs),))
    return tuple((runs[start][0], runs[stop - 1][1]) for start, stop in zip(*cuts, strict=True))
