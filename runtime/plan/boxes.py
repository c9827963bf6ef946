"""Boxes: the parts of a tensor that ranks keep.

Every axis of a tensor is an ordered product of factors, outermost first. A box has a range of every factor;
its local tensor has the axes of the whole, the ranges of one axis multiplied.

    w [4, 6], factored ((4,), (3, 2))    ranges (((0, 4),), ((0, 3), (0, 1)))    w[:, [0, 2, 4]], [4, 3]

A box of None is the whole tensor. Boxes may be uneven, and empty. Equal index sets may be written with
different factors: `normalised` tells whether two boxes are the same part.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise, product
from math import prod
from typing import Any

import numpy as np

from partc.runtime.plan.record import Range
from partc.runtime.plan.variables import Box

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]


def rows_box(shape: Shape, start: int, stop: int) -> Box:
    """Return rows [start, stop) of a tensor that has rows."""
    ranges = (((start, stop),), *(((0, size),) for size in shape[1:]))
    return Box(tuple((size,) for size in shape), ranges)


def part_range(size: int, parts: int, number: int) -> Range:
    """Return the entries [start, stop) of a part: where they do not divide, earlier parts have one more."""
    length, longer = divmod(size, parts)
    start = number * length + min(number, longer)
    return start, start + length + (number < longer)


def local_shape(shape: Shape, box: Box | None) -> Shape:
    """Return the shape of a box's local tensor."""
    if box is None:
        return shape
    return tuple(prod(stop - start for start, stop in ranges) for ranges in box.ranges)


def is_whole(box: Box | None) -> bool:
    """Tell whether a box leaves nothing out."""
    return box is None or all(
        (start, stop) == (0, size)
        for sizes, ranges in zip(box.factored, box.ranges, strict=True)
        for size, (start, stop) in zip(sizes, ranges, strict=True)
    )


def first_index(box: Box | None) -> Shape:
    """Return the place of a part's first element: an index for every axis, nothing for the whole."""
    if box is None:
        return ()
    return tuple(
        sum(start * prod(sizes[place + 1 :]) for place, (start, _) in enumerate(ranges))
        for sizes, ranges in zip(box.factored, box.ranges, strict=True)
    )


def is_empty(box: Box | None) -> bool:
    """Tell whether a box holds no index of an axis that has some."""
    return box is not None and any(
        start == stop and size > 0
        for sizes, ranges in zip(box.factored, box.ranges, strict=True)
        for size, (start, stop) in zip(sizes, ranges, strict=True)
    )


def contiguous_rows(box: Box | None) -> Range | None:
    """Return the rows that a part holds whole, one behind the other; None if it is of another kind."""
    normal = None if box is None else normalised(box)
    if normal is None or any(len(ranges) > 1 for ranges in normal.ranges) or _leaves_out_columns(normal):
        return None
    return normal.ranges[0][0]


def _leaves_out_columns(normal: Box) -> bool:
    columns = zip(normal.factored[1:], normal.ranges[1:], strict=True)
    return any(ranges != tuple((0, size) for size in sizes) for sizes, ranges in columns)


@lru_cache(maxsize=1 << 14)
def normalised(box: Box) -> Box | None:
    """Return the same part with the fewest factors, None for the whole: equal parts give equal boxes.

    Two neighbours are one factor where the inner one is whole, or the outer one a single index.
    """
    if is_whole(box):
        return None
    axes = [_merge_factors(*axis) for axis in zip(box.factored, box.ranges, strict=True)]
    return Box(
        tuple(tuple(size for size, _ in axis) for axis in axes),
        tuple(tuple(range_ for _, range_ in axis) for axis in axes),
    )


def _merge_factors(sizes: tuple[int, ...], ranges: tuple[Range, ...]) -> list[tuple[int, Range]]:
    merged: list[tuple[int, Range]] = []
    for size, (start, stop) in zip(sizes, ranges, strict=True):
        if merged and (start, stop) == (0, size):
            outer, (first, last) = merged.pop()
            merged.append((outer * size, (first * size, last * size)))
        elif merged and merged[-1][1][1] - merged[-1][1][0] == 1:
            outer, (first, _) = merged.pop()
            merged.append((outer * size, (first * size + start, first * size + stop)))
        else:
            merged.append((size, (start, stop)))
    return merged


def describe_box(box: Box | None) -> str:
    """Return a box as slices of its axes' factors, as [0:4, 0:3 x 1:2]."""
    if box is None:
        return "whole"
    axes = (" x ".join(f"{start}:{stop}" for start, stop in ranges) for ranges in box.ranges)
    return f"[{', '.join(axes)}]"


# ---------------------------------------------------------------- elements


def view(whole: Array, box: Box | None) -> Array:
    """Return a box of a whole tensor without copying: an axis for every factor."""
    if box is None:
        return whole
    factored = whole.reshape(tuple(chain.from_iterable(box.factored)))
    return factored[tuple(slice(start, stop) for start, stop in chain.from_iterable(box.ranges))]


def take(whole: Array, box: Box | None) -> Array:
    """Return a fresh local tensor of a box, in C order."""
    return np.array(view(whole, box), order="C").reshape(local_shape(whole.shape, box))


def place(whole: Array, box: Box | None, local: Array) -> None:
    """Write a box's local tensor into the whole, which must be contiguous."""
    assert whole.flags.c_contiguous, "a copy would be written"
    target = view(whole, box)
    target[...] = local.reshape(target.shape)


def assemble(shape: Shape, dtype: np.dtype[Any], pieces: Iterable[tuple[Box | None, Array]]) -> Array:
    """Return a fresh whole tensor of boxes that cover it and their local tensors."""
    whole = np.empty(shape, dtype)
    for box, local in pieces:
        place(whole, box, local)
    return whole


def columns_of(box: Box | None) -> Box | None:
    """Return what a box holds of each of its rows: a box of one row."""
    return None if box is None else Box(box.factored[1:], box.ranges[1:])


def with_rows(count: int, columns: Box | None) -> Box | None:
    """Return the box of `count` rows of which each has these columns."""
    if columns is None:
        return None
    return Box(((count,), *columns.factored), (((0, count),), *columns.ranges))


def find_rows(box: Box | None, rows: Array) -> tuple[Array, Array]:
    """Return which of the rows int64[k] a box holds: places among `rows`, and its own rows, int64[held]."""
    if box is None:
        return np.arange(len(rows)), rows
    lengths = tuple(stop - start for start, stop in box.ranges[0])
    if not prod(lengths) or not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    digits = np.stack(np.unravel_index(rows, box.factored[0]))
    starts, stops = (np.array(ends)[:, None] for ends in zip(*box.ranges[0], strict=True))
    (places,) = np.nonzero(((digits >= starts) & (digits < stops)).all(axis=0))
    return places, np.ravel_multi_index(tuple((digits - starts)[:, places]), lengths)


# ---------------------------------------------------------------- what fits


def fault_of(shape: Shape, box: Box | None) -> str | None:
    """Return why a box is none of a tensor of this shape; None if it is one."""
    if box is None:
        return None
    if len(box.factored) != len(shape) or [len(r) for r in box.ranges] != [len(s) for s in box.factored]:
        return f"{len(box.ranges)} axes of factors {_text(box.factored)}, shaped {list(shape)}"
    for axis, (size, sizes, ranges) in enumerate(zip(shape, box.factored, box.ranges, strict=True)):
        if prod(sizes) != size or not sizes or min(sizes) < 0:
            return f"factors {list(sizes)} of axis {axis}, shaped {list(shape)}"
        for factor, (start, stop) in zip(sizes, ranges, strict=True):
            if not 0 <= start <= stop <= factor:
                return f"[{start}, {stop}) of {factor} on axis {axis}, shaped {list(shape)}"
    return None


def cover_fault(shape: Shape, owners: Mapping[Box | None, str]) -> str | None:
    """Return what boxes leave out, or hold twice without being copies; None if nothing.

    `owners`: a box that fits the shape -> who holds it, for the message.
    """
    distinct: dict[Box | None, tuple[str, Box | None]] = {}
    for box, owner in owners.items():
        if not is_empty(box):
            distinct.setdefault(None if box is None else normalised(box), (owner, box))
    if not distinct:
        return "nobody holds it"
    if not prod(shape):
        return None
    if None in distinct:
        others = [owner for part, (owner, _) in distinct.items() if part is not None]
        return f"{distinct[None][0]} holds it whole, {others[0]} a part of it" if others else None
    factored, flat = _common_ranges(shape, [(owner, box) for owner, box in distinct.values() if box])
    return _sweep(tuple((axis, size) for axis, sizes in enumerate(factored) for size in sizes), flat)


OwnedRanges = tuple[str, tuple[Range, ...]]  # an owner, and its ranges of all factors


def _common_ranges(
    shape: Shape, boxes: Sequence[tuple[str, Box]]
) -> tuple[tuple[tuple[int, ...], ...], list[OwnedRanges]]:
    """Write boxes with the same factors: those that all have, else plain axes and a box for every run."""
    if len({box.factored for _, box in boxes}) == 1:
        flat = [(owner, tuple(chain.from_iterable(box.ranges))) for owner, box in boxes]
        return boxes[0][1].factored, flat
    runs = [(owner, tuple(runs)) for owner, box in boxes for runs in _plain_boxes(box)]
    return tuple((size,) for size in shape), runs


def _plain_boxes(box: Box) -> Iterator[tuple[Range, ...]]:
    """Yield boxes of plain axes that hold the same together."""
    fewest = normalised(box)
    assert fewest is not None, "the whole is not cut"
    return product(*(_runs(*axis) for axis in zip(fewest.factored, fewest.ranges, strict=True)))


def _runs(sizes: tuple[int, ...], ranges: tuple[Range, ...]) -> Iterator[Range]:
    """Yield the index ranges of the plain axis."""
    *outer, (start, stop) = ranges
    strides = [prod(sizes[place + 1 :]) for place in range(len(outer))]
    for indices in product(*(range(*range_) for range_ in outer)):
        first = sum(index * stride for index, stride in zip(indices, strides, strict=True))
        yield first + start, first + stop


def _sweep(factors: tuple[tuple[int, int], ...], boxes: Sequence[OwnedRanges], depth: int = 0) -> str | None:
    """Go through the first factor that is left, and at each place through what is held there.

    `factors`: (axis, size) of every factor.
    """
    if depth == len(factors):
        owners = [owner for owner, _ in boxes]
        return f"{owners[0]} and {owners[1]} hold the same part of it" if len(owners) > 1 else None
    _, size = factors[depth]
    begin: dict[int, list[int]] = {}
    end: dict[int, list[int]] = {}
    for number, (_, ranges) in enumerate(boxes):
        begin.setdefault(ranges[depth][0], []).append(number)
        end.setdefault(ranges[depth][1], []).append(number)
    active: dict[int, None] = {}
    cuts = sorted({0, size, *begin, *end})
    for start, stop in pairwise(cuts):
        for number in end.get(start, ()):
            del active[number]
        active.update(dict.fromkeys(begin.get(start, ())))
        if not active:
            return f"nobody holds {_describe(factors, depth, start, stop)}"
        if fault := _sweep(factors, [boxes[number] for number in active], depth + 1):
            return fault
    return None


def _describe(factors: tuple[tuple[int, int], ...], depth: int, start: int, stop: int) -> str:
    axis, _ = factors[depth]
    among = [place for place, (other, _) in enumerate(factors) if other == axis]
    if len(among) > 1:
        return f"axis {axis}: [{start}, {stop}) of factor {among.index(depth) + 1}"
    return f"rows [{start}, {stop})" if axis == 0 else f"axis {axis}: [{start}, {stop})"


def _text(factored: tuple[tuple[int, ...], ...]) -> str:
    return str([list(sizes) for sizes in factored])
