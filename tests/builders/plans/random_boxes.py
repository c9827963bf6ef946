"""Boxes at random, and what NumPy says of them: which indices of each axis they hold."""

from math import prod

import numpy as np

from partc.runtime.plan.variables import Box

FACTORS = ((1,), (2,), (5,), (6,), (3, 2), (2, 3), (1, 4), (2, 1, 3), (2, 3, 2), (0,))


def random_shape(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return a shape of one to three axes, and their factors."""
    factored = tuple(FACTORS[rng.integers(len(FACTORS))] for _ in range(rng.integers(1, 4)))
    return tuple(prod(sizes) for sizes in factored), factored


def random_box(rng: np.random.Generator, factored: tuple[tuple[int, ...], ...]) -> Box:
    """Return some box, often whole along a factor, sometimes empty."""

    def ends(size: int) -> tuple[int, int]:
        first, last = sorted(rng.integers(0, size + 1, 2).tolist())
        return (0, size) if rng.random() < 0.4 else (first, last)

    return Box(factored, tuple(tuple(ends(size) for size in sizes) for sizes in factored))


def indices(box: Box) -> list[np.ndarray]:
    """Return the indices of each axis that a box holds."""
    return [
        np.arange(prod(sizes)).reshape(sizes)[tuple(slice(*ends) for ends in ranges)].ravel()
        for sizes, ranges in zip(box.factored, box.ranges, strict=True)
    ]


def held(shape: tuple[int, ...], box: Box | None) -> np.ndarray:
    """Return bool[shape]: what a box holds."""
    mask = np.zeros(shape, bool)
    mask[np.ix_(*indices(box)) if box is not None else ...] = True
    return mask


def cut(rng: np.random.Generator, box: Box, parts: int) -> list[Box]:
    """Cut a box into uneven parts, some empty, factor after factor."""
    boxes = [box]
    while len(boxes) < parts:
        whole = boxes.pop(rng.integers(len(boxes)))
        axis = rng.integers(len(whole.ranges))
        factor = rng.integers(len(whole.ranges[axis]))
        start, stop = whole.ranges[axis][factor]
        at = int(rng.integers(start, stop + 1))
        boxes += [_with(whole, axis, factor, ends) for ends in ((start, at), (at, stop))]
    return boxes


def _with(box: Box, axis: int, factor: int, ends: tuple[int, int]) -> Box:
    ranges = [list(of_axis) for of_axis in box.ranges]
    ranges[axis][factor] = ends
    return Box(box.factored, tuple(tuple(of_axis) for of_axis in ranges))
