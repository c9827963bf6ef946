"""Which index ranges of a tensor a rank holds: boxes of its factored shape.

    axis of size S, split behind o1 < o2 < ... blocks   ->   factors o1, o2 / o1, ..., S / o_last

A fused query, key and value weight [H, 3 H], split by heads behind 3 blocks, has the factors (H,), (3, H).
"""

from collections.abc import Sequence
from itertools import pairwise

from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.variables import Box


def factored_shape(layout: Layout, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return a shape with its axes taken apart where the layout splits them."""
    factored: list[tuple[int, ...]] = []
    for axis, size in enumerate(shape):
        bounds = [1, *_places(layout, axis, size), size]
        factored.append(tuple(end // start for start, end in pairwise(bounds)))
    return tuple(factored)


def _places(layout: Layout, axis: int, size: int) -> list[int]:
    """Return the numbers of blocks behind which an axis is taken apart, 1 left out."""
    splits = [split for _, split in layout.splits() if split.axis == axis]
    behind = {split.outer * split.uneven for split in splits if split.uneven} - {size}
    return sorted(({split.outer for split in splits} | behind) - {1})


def box_of(mesh: Mesh, layout: Layout, shape: Sequence[int], place: Sequence[int]) -> Box:
    """Return the box of the factored shape that the rank at a place of the mesh holds.

    What overlaps is within the tensor.
    """
    factored = factored_shape(layout, shape)
    ranges = [[(0, size) for size in sizes] for sizes in factored]
    places = [[1, *_places(layout, axis, size)] for axis, size in enumerate(shape)]
    for axis, split in layout.splits():
        factor = places[split.axis].index(split.outer)
        start, stop = ranges[split.axis][factor]
        first, last = part_range(stop - start, mesh.size(axis), place[axis])
        ranges[split.axis][factor] = (start + first, start + last)
    for axis, overlapping in layout.overlapping():
        ranges[overlapping.axis] = [overlapping.ranges[place[axis]]]
    return Box(factored, tuple(tuple(sizes) for sizes in ranges))
