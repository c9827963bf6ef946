"""The layout on another mesh of the same workers that gives each of them the part that it has.

data = 4, tensor = 1    Split(0), Replicate     ──┐
data = 1, tensor = 4    Replicate, Split(0)     ──┴── worker w has the w-th fourth of axis 0

Operators with devices of their own are each on a mesh of their own. What goes between two of the same
workers may go as within one of them: by a collective, where it would be messages among all.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from partc.passes.layouts.layouts import Layout, Replicate, Split
from partc.passes.layouts.meshes import Mesh

Coordinates = NDArray[np.int64]
SplitPlace = tuple[int, int]  # a tensor's axis, and the blocks behind which it is split


@lru_cache(maxsize=1 << 16)
def same_parts(mesh: Mesh, layout: Layout, other: Mesh) -> Layout | None:
    """Return how a layout of a mesh is spelled on another of the same workers; None where it cannot be.

    Only of equal parts, and of steps that are not divided into micro-batches.
    """
    is_plain = all(isinstance(p, Split | Replicate) for p in layout.placements)
    if not is_plain or layout.varying() or mesh.microbatches * other.microbatches > 1:
        return None
    if sorted(mesh.workers) != sorted(other.workers):
        return None
    ours, theirs = _by_worker(mesh), _by_worker(other)
    placements: dict[int, Split] = {}
    for place in dict.fromkeys((split.axis, split.outer) for _, split in layout.splits()):
        parts = _part_numbers(mesh, ours, [axis for axis, split in layout.splits() if _of(split) == place])
        axes = [axis for axis in range(theirs.shape[1]) if _follows(theirs[:, axis], parts)]
        if not np.array_equal(_part_numbers(other, theirs, axes), parts):
            return None
        placements.update((axis, Split(*place)) for axis in axes)
    return Layout(other.name, *(placements.get(axis, Replicate()) for axis in range(theirs.shape[1])))


def common_part(layouts: Iterable[Layout | None], axis: int) -> Split | None:
    """Return the part along a mesh axis that all want, if there is one. None is what is not spelled here."""
    parts = {None if layout is None else layout.along(axis) for layout in layouts}
    (part,) = parts if len(parts) == 1 else (None,)
    return part if isinstance(part, Split) else None


def _of(split: Split) -> SplitPlace:
    return split.axis, split.outer


def _by_worker(mesh: Mesh) -> Coordinates:
    """Return the place of each worker along the axes of the grid, int64[workers, axes], in their order."""
    places = [mesh.coordinates(position) for position in range(len(mesh.workers))]
    return np.array(places, np.int64)[np.argsort(mesh.workers)]


def _part_numbers(mesh: Mesh, coordinates: Coordinates, axes: Sequence[int]) -> Coordinates:
    """Return which part each worker has of what mesh axes cut together, int64[workers]."""
    parts = np.zeros(len(coordinates), np.int64)
    for axis in axes:
        parts = parts * mesh.size(axis) + coordinates[:, axis]
    return parts


def _follows(places: Coordinates, parts: Coordinates) -> bool:
    """Tell whether workers with the same part are at the same place of an axis, and it has several."""
    firsts = np.zeros(int(parts.max()) + 1, np.int64)
    firsts[parts] = places
    return bool(places.max() > 0) and np.array_equal(firsts[parts], places)
