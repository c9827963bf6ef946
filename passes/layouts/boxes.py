"""Which index ranges of a tensor a rank holds: boxes of its factored shape.

    axis of size S, split behind o1 < o2 < ... blocks   ->   factors o1, o2 / o1, ..., S / o_last

A fused query, key and value weight [H, 3 H], split by heads behind 3 blocks, has the factors (H,), (3, H).
"""

from collections.abc import Sequence
from itertools import pairwise

from partc.passes.layouts.layouts import Layout, Mesh
from partc.runtime.plan.program import Box


def factored_shape(layout: Layout, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return a shape with its axes taken apart where the layout splits them."""
    factored: list[tuple[int, ...]] = []
    for axis, size in enumerate(shape):
        places = sorted({split.outer for _, split in layout.splits() if split.axis == axis})
        bounds = [1, *(place for place in places if place > 1), size]
        factored.append(tuple(end // start for start, end in pairwise(bounds)))
    return tuple(factored)


def box_of(mesh: Mesh, layout: Layout, shape: Sequence[int], place: Sequence[int]) -> Box:
    """Return the box of the factored shape that the rank at a place of the mesh holds."""
    factored = factored_shape(layout, shape)
    ranges = [[(0, size) for size in sizes] for sizes in factored]
    places = [sorted({1, *(s.outer for _, s in layout.splits() if s.axis == a)}) for a in range(len(shape))]
    for axis, split in layout.splits():
        factor = places[split.axis].index(split.outer)
        start, stop = ranges[split.axis][factor]
        length = (stop - start) // mesh.size(axis)
        start += place[axis] * length
        ranges[split.axis][factor] = (start, start + length)
    return Box(factored, tuple(tuple(sizes) for sizes in ranges))
