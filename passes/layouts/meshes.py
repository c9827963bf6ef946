"""Grids of ranks with named axes, and what layouts mean on them: how many parts, which divide, which nest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations
from math import prod

import numpy as np

from partc.passes.layouts.layouts import (
    EVERYWHERE,
    MICROBATCHES,
    REPLICAS,
    WORKER,
    Layout,
    Overlapping,
    Placement,
    Split,
    Widened,
)
from partc.runtime.plan.program import Site


@dataclass(frozen=True, slots=True)
class Mesh:
    """An ordered grid of ranks with named axes: the last axis is the one whose neighbours are adjacent.

    Along an axis of micro-batches each rank takes every place in turn: what is split there is computed part
    by part, and a sum over it is made by each rank alone.

    `workers`: which of the cluster's workers are at its places, row by row; left out, the first ones.
    """

    name: Site
    axes: tuple[tuple[str, int], ...]
    workers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.workers:
            object.__setattr__(self, "workers", tuple(range(prod(size for _, size in self.grid))))

    @property
    def microbatch_axis(self) -> int | None:
        """Return the axis of micro-batches, None if there is none."""
        return len(self.axes) - 1 if self.axes[-1][0] == MICROBATCHES else None

    @property
    def microbatches(self) -> int:
        """Return how many micro-batches a step has."""
        return 1 if self.microbatch_axis is None else self.axes[-1][1]

    @property
    def grid(self) -> tuple[tuple[str, int], ...]:
        """Return the axes that tell ranks apart."""
        return self.axes[: self.microbatch_axis]

    def size(self, axis: int) -> int:
        """Return the number of parts along an axis."""
        return self.axes[axis][1]

    def coordinates(self, position: int) -> tuple[int, ...]:
        """Return the place along every axis of the rank at a position."""
        return tuple(int(place) for place in np.unravel_index(position, [size for _, size in self.grid]))

    def lines(self, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the positions of the ranks that differ along some axes alone, which are in mesh order."""
        sizes = [size for _, size in self.grid]
        grid = np.moveaxis(np.arange(prod(sizes)).reshape(sizes), axes, range(-len(axes), 0))
        lines = grid.reshape(-1, prod(sizes[axis] for axis in axes))
        return tuple(tuple(int(position) for position in line) for line in lines)

    def group(self, axes: Sequence[int]) -> str:
        """Return the name of the groups of its ranks that differ along some axes alone."""
        is_plain = len(self.axes) == 1 and self.name == WORKER
        return f"{self.name}s" if is_plain else f"{self.name}.{'*'.join(self.axes[axis][0] for axis in axes)}"

    def share(self, layout: Layout) -> int:
        """Return into how many parts a layout divides a tensor."""
        return prod(self.size(axis) for axis, _ in layout.splits())

    def parts(self, layout: Layout, tensor_axis: int) -> int:
        """Return into how many parts a layout divides an axis of a tensor."""
        return prod(self.size(axis) for axis, split in layout.splits() if split.axis == tensor_axis)

    def divides(self, layout: Layout, shape: Sequence[int]) -> bool:
        """Tell whether all parts of a tensor are of equal size but those that are said to be uneven.

        An UNKNOWN size (0) is taken to divide. What is widened on an axis, or overlaps there, is cut there
        along one mesh axis alone, whose ranks are neighbours.
        """
        return layout.is_whole or _cuts(self.axes, layout.placements, tuple(shape))

    def _cuts(self, layout: Layout, shape: Sequence[int]) -> bool:
        splits = layout.splits()
        cut = [p.axis for p in layout.placements if isinstance(p, Split | Widened | Overlapping)]
        if any(cut.count(overlapping.axis) > 1 for _, overlapping in layout.overlapping()):
            return False
        for axis, widened in layout.widened():
            if cut.count(widened.axis) > 1 or shape[widened.axis] % self.size(axis):
                return False
        ends: dict[int, int] = {}
        places = {(split.axis, split.outer) for _, split in splits}
        for place in sorted(places, key=lambda place: (place[0], -place[1])):
            tensor_axis, outer = place
            here = [axis for axis, split in splits if (split.axis, split.outer) == place]
            parts = prod(map(self.size, here))
            placements = [
                placement if axis in here else EVERYWHERE for axis, placement in enumerate(layout.placements)
            ]
            entries = max(split.uneven for axis, split in splits if axis in here)
            if entries and (
                entries < parts or self.nest(placements, [entries] * len(placements)) != tuple(placements)
            ):
                return False
            if ends.get(tensor_axis, shape[tensor_axis]) % (outer * (entries or parts)):
                return False
            ends[tensor_axis] = outer
        return True

    def cut(self, axis: int, tensor_axis: int, outer: int, factor: int) -> Split:
        """Return the split of a factor along a mesh axis, uneven where its size does not divide."""
        return Split(tensor_axis, outer, factor if factor % self.size(axis) else 0)

    def nest(self, placements: Sequence[Placement], factors: Sequence[int]) -> tuple[Placement, ...]:
        """Return placements along the axes, those that split one factor each dividing what others left.

        `factors`: by axis, the size of the factor that is split there; of 0 splits stay as they are.
        """
        parts: dict[tuple[int, int], int] = {}
        nested: list[Placement] = []
        for axis, (placement, size) in enumerate(zip(placements, factors, strict=True)):
            if isinstance(placement, Split):
                place = placement.axis, placement.outer
                parts[place] = parts.get(place, 1) * self.size(axis)
                if size:
                    placement = replace(placement, uneven=size if size % parts[place] else 0)
            nested.append(placement)
        return tuple(nested)

    def nest_splits(self, layout: Layout, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor whose axes are factored where they are split, and nowhere else."""
        places = {(split.axis, split.outer) for _, split in layout.splits()}

        def factor(split: Split) -> int:
            ends = [outer for axis, outer in places if axis == split.axis and outer > split.outer]
            return min(ends, default=shape[split.axis]) // split.outer

        factors = [factor(p) if isinstance(p, Split) else 0 for p in layout.placements]
        return Layout(layout.site, *self.nest(layout.placements, factors))


@lru_cache(maxsize=1 << 16)
def _cuts(
    axes: tuple[tuple[str, int], ...], placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> bool:
    """Remember what `Mesh.divides` asks for alike tensors."""
    return Mesh(WORKER, axes)._cuts(Layout(WORKER, *placements), shape)


_SERVERS = Mesh("server", (("rows", 1),))


@dataclass(frozen=True)
class Meshes:
    """The meshes among which operators are divided: their axes have the same names, in the same order.

    Ranks may be in several of them. Along an axis of one place nothing is divided. All have the same
    micro-batches.
    """

    each: tuple[Mesh, ...]

    def of(self, site: Site) -> Mesh:
        """Return the mesh of a site. How servers divide rows is not known yet: theirs has one place."""
        return self._by_name.get(site, _SERVERS)

    @cached_property
    def _by_name(self) -> dict[Site, Mesh]:
        return {mesh.name: mesh for mesh in self.each}

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Return the names of the meshes."""
        return tuple(mesh.name for mesh in self.each)

    @cached_property
    def axes(self) -> int:
        """Return the number of axes."""
        return len(self.each[0].axes)

    @cached_property
    def microbatch_axis(self) -> int | None:
        """Return the axis of micro-batches, None if there is none."""
        return self.each[0].microbatch_axis

    @property
    def microbatches(self) -> int:
        """Return how many micro-batches a step has."""
        return self.each[0].microbatches

    @property
    def replicas(self) -> int:
        """Return how many replicas, or parts of a global batch, data is fed to."""
        return self.each[0].size(REPLICAS)

    @cached_property
    def are_replicas(self) -> bool:
        """Tell whether all workers are replicas and nothing else: servers may be beside them."""
        return self.axes == 1 and self.sites == (WORKER,)

    @cached_property
    def are_apart(self) -> bool:
        """Tell whether no worker is in two meshes."""
        workers = [worker for mesh in self.each for worker in mesh.workers]
        return len(workers) == len(set(workers))

    @cached_property
    def _replicas_fed(self) -> dict[int, int]:
        """Return worker -> the replica whose data it is fed: of its place in the first mesh of so many."""
        fed: dict[int, int] = {}
        for mesh in self.each:
            if mesh.size(REPLICAS) == self.replicas:
                for position, worker in enumerate(mesh.workers):
                    fed.setdefault(worker, mesh.coordinates(position)[REPLICAS])
        return fed

    def replica_of(self, worker: int) -> int:
        """Return which replica's data a worker is fed."""
        return self._replicas_fed.get(worker, 0)

    @cached_property
    def _fed(self) -> frozenset[Site]:
        return frozenset(
            mesh.name
            for mesh in self.each
            if mesh.size(REPLICAS) == self.replicas
            and all(self.replica_of(w) == mesh.coordinates(n)[REPLICAS] for n, w in enumerate(mesh.workers))
        )

    def is_fed(self, site: Site) -> bool:
        """Tell whether the ranks of a mesh are fed the data of their places in it."""
        return self.of(site).name in self._fed

    def have_same_samples(self, layout: Layout, other: Layout) -> bool:
        """Tell whether a micro-batch is the same part of a tensor in two layouts, of meshes of any shape."""
        axis = self.microbatch_axis
        assert axis is not None, "there are micro-batches"
        micro = layout.along(axis)
        if not isinstance(micro, Split) or other.along(axis) != micro:
            return layout.along(axis) == other.along(axis)
        own, others = (
            [
                (self.size(each.site, a), split)
                for a, split in each.splits()
                if split.axis == micro.axis and a != axis
            ]
            for each in (layout, other)
        )
        return own == others

    def are_paired(self, site: Site, other: Site) -> bool:
        """Tell whether each rank of a mesh has one at its place in another, who is somebody else."""
        return self.of(site).axes == self.of(other).axes and self.are_strangers(site, other)

    def are_strangers(self, site: Site, other: Site) -> bool:
        """Tell whether two sites are meshes of which no worker is in both."""
        return (site, other) in self._strangers

    @cached_property
    def _strangers(self) -> frozenset[tuple[Site, Site]]:
        workers = {mesh.name: frozenset(mesh.workers) for mesh in self.each}
        return frozenset(
            pair for pair in permutations(workers, 2) if workers[pair[0]].isdisjoint(workers[pair[1]])
        )

    def size(self, site: Site, axis: int) -> int:
        """Return the number of parts along an axis of a mesh."""
        return self.of(site).size(axis)

    def parts(self, layout: Layout, tensor_axis: int) -> int:
        """Return into how many parts a layout divides an axis of a tensor."""
        return self.of(layout.site).parts(layout, tensor_axis)

    def divides(self, layout: Layout, shape: Sequence[int]) -> bool:
        """Tell whether all parts of a tensor are of equal size; one of UNKNOWN size (0) is taken to be."""
        return self.of(layout.site).divides(layout, shape)
