"""Where a tensor's pieces are: a site, and how its ranks divide the tensor among themselves.

Replicate        every rank has the whole
Split            rank r of N has the r-th N-th of one factor of one axis
Partial          every rank has a term; the tensor is their sum (or maximum, or minimum)
Widened          rank r of N has the r-th N-th of an axis, and entries of its neighbours' around it
Overlapping      every rank has entries of an axis of its own, of which others may have some too
PerReplica       every rank has a tensor of its own: replicas on different data, not pieces
Owned            servers: each has some rows of axis 0 (or the slices whose ids fall in its rows)
Gathered         workers: everyone has all that servers own, one server's behind the other's
RequestedRows    servers: each has the rows that workers' ids request of it, on their way to these
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations
from math import prod
from typing import Literal

import numpy as np

from partc.passes.rules.sharding_rule import Fill
from partc.runtime.plan.program import Site

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the site has the whole tensor."""


_WHOLE = Replicate()


@dataclass(frozen=True, slots=True)
class Split:
    """Rank r of N has the r-th N-th of a factor of `axis`.

    The axis, of size outer x factor x inner, is cut along its middle: [T, B, H] reshaped to
    [T * B, H] and split on B is Split(axis=0, outer=T). `uneven`: the size of a factor that is not divided
    equally, of which earlier ranks have one entry more (runtime/plan/boxes.py); 0: all parts are equal.
    Of mesh axes that cut a factor together each divides what those before it left: the size is the whole
    factor's, and said by those along which, with those before, parts differ (`Mesh.nest`).
    """

    axis: int
    outer: int = 1
    uneven: int = 0


@dataclass(frozen=True, slots=True)
class UnevenFactor:
    """A factor of an axis, behind `outer` blocks, whose entries mesh axes divide into parts that differ."""

    axis: int
    outer: int
    entries: int
    mesh_axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has a term of the tensor."""

    reduction: Reduction = "sum"


@dataclass(frozen=True, slots=True)
class Widened:
    """Rank r of N has the r-th N-th of `axis`, `before` entries in front of it and `after` behind.

    Only what an operand must be, never what a node makes. Beyond the tensor's ends, entries are zeros, or
    the lowest numbers: what is read as padding.
    """

    axis: int
    before: int
    after: int
    fill: Fill = "zero"


@dataclass(frozen=True)
class Overlapping:
    """Rank r has the entries [start, stop) of `axis`, of `size` entries, that ranges[r] tells.

    Only what an operand must be. Beyond the tensor's ends, below 0 and from `size` on, is what is read as
    padding.
    """

    axis: int
    size: int
    ranges: tuple[tuple[int, int], ...]
    fill: Fill = "zero"

    @property
    def own(self) -> Split:
        """Return the parts of the axis that nobody shares."""
        return Split(self.axis, 1, self.size if self.size % len(self.ranges) else 0)

    @cached_property
    def within(self) -> "Overlapping":
        """Return what ranks have of the tensor itself, one entry at least."""
        return replace(self, ranges=tuple(_clamp(entries, self.size) for entries in self.ranges), fill="zero")

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """Return what has to be added before and behind the entries of the tensor itself, by rank."""
        return tuple(
            (first - start, stop - last)
            for (start, stop), (first, last) in zip(self.ranges, self.within.ranges, strict=True)
        )


def _clamp(entries: tuple[int, int], size: int) -> tuple[int, int]:
    first = min(max(entries[0], 0), size - 1)
    return first, max(min(entries[1], size), first + 1)


@dataclass(frozen=True, slots=True)
class PerReplica:
    """Every replica has its own tensor, computed from its own data."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Every server has the part of axis 0 that belongs to its rows of `parameter`."""

    parameter: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """Every worker has what all servers own of `parameter`, and each server's part can be told."""

    parameter: str


@dataclass(frozen=True, slots=True)
class RequestedRows:
    """Every server has, on axis 0, the rows of `parameter` that one Gather's ids request of it.

    The ids' axes, `ids_rank` of them, are one here. `returned`: where the tensor's pieces are once
    the rows are back on the workers.
    """

    parameter: str
    gather: str
    ids_rank: int
    returned: "Replicate | Split | PerReplica"


Placement = (
    Replicate | Split | Partial | Widened | Overlapping | PerReplica | Owned | Gathered | RequestedRows
)


REPLICAS = 0  # the axis of a mesh that tells replicas apart, or a parameter's servers
WORKER: Site = "worker"
MICROBATCHES = "microbatch"  # the axis, always the last, whose places are moments of the same ranks


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

    def lines(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Return the positions of the ranks that differ along an axis alone."""
        sizes = [size for _, size in self.grid]
        grid = np.moveaxis(np.arange(prod(sizes)).reshape(sizes), axis, -1).reshape(-1, sizes[axis])
        return tuple(tuple(int(position) for position in line) for line in grid)

    def group(self, axis: int) -> str:
        """Return the name of the groups of its ranks that differ along an axis alone."""
        is_plain = len(self.axes) == 1 and self.name == WORKER
        return f"{self.name}s" if is_plain else f"{self.name}.{self.axes[axis][0]}"

    def share(self, layout: "Layout") -> int:
        """Return into how many parts a layout divides a tensor."""
        return prod(self.size(axis) for axis, _ in layout.splits())

    def parts(self, layout: "Layout", tensor_axis: int) -> int:
        """Return into how many parts a layout divides an axis of a tensor."""
        return prod(self.size(axis) for axis, split in layout.splits() if split.axis == tensor_axis)

    def divides(self, layout: "Layout", shape: Sequence[int]) -> bool:
        """Tell whether all parts of a tensor are of equal size but those that are said to be uneven.

        An UNKNOWN size (0) is taken to divide. What is widened on an axis, or overlaps there, is cut there
        along one mesh axis alone, whose ranks are neighbours.
        """
        return layout.is_whole or _cuts(self.axes, layout.placements, tuple(shape))

    def _cuts(self, layout: "Layout", shape: Sequence[int]) -> bool:
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
            said = [placement if axis in here else _WHOLE for axis, placement in enumerate(layout.placements)]
            entries = max(split.uneven for axis, split in splits if axis in here)
            if entries and (entries < parts or self.nest(said, [entries] * len(said)) != tuple(said)):
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

    def nest_splits(self, layout: "Layout", shape: Sequence[int]) -> "Layout":
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


@dataclass(frozen=True)
class Meshes:
    """The meshes among which operators are divided: their axes have the same names, in the same order.

    Ranks may be in several of them. Along an axis of one place nothing is divided. All have the same
    micro-batches.
    """

    each: tuple[Mesh, ...]

    def of(self, site: Site) -> Mesh:
        """Return the mesh of a site; of servers, which divide nothing so, the first of the workers'."""
        return self._by_name.get(site, self.each[0])

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

    def have_same_samples(self, layout: "Layout", other: "Layout") -> bool:
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

    def parts(self, layout: "Layout", tensor_axis: int) -> int:
        """Return into how many parts a layout divides an axis of a tensor."""
        return self.of(layout.site).parts(layout, tensor_axis)

    def divides(self, layout: "Layout", shape: Sequence[int]) -> bool:
        """Tell whether all parts of a tensor are of equal size; one of UNKNOWN size (0) is taken to be."""
        return self.of(layout.site).divides(layout, shape)


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Where a tensor's pieces are: a mesh, and a placement along each of its axes.

    Along axes behind the last placement the tensor is whole: `Layout("worker")` is whole on any mesh.
    Axes that split one tensor axis at one place apply in mesh order: each divides what those before it left.
    """

    site: Site
    placements: tuple[Placement, ...]

    def __init__(self, site: Site, *placements: Placement) -> None:
        while placements and isinstance(placements[-1], Replicate):
            placements = placements[:-1]
        object.__setattr__(self, "site", site)
        object.__setattr__(self, "placements", placements)

    def along(self, axis: int) -> Placement:
        """Return the placement along a mesh axis."""
        return self.placements[axis] if axis < len(self.placements) else _WHOLE

    def with_along(self, axis: int, placement: Placement) -> "Layout":
        """Return the layout that differs along one mesh axis."""
        count = max(len(self.placements), axis + 1)
        return Layout(self.site, *(placement if a == axis else self.along(a) for a in range(count)))

    def splits(self) -> list[tuple[int, Split]]:
        """Return the mesh axes that split the tensor, and where."""
        return [(axis, split) for axis, split in enumerate(self.placements) if isinstance(split, Split)]

    def uneven(self) -> list[UnevenFactor]:
        """Return the factors of which ranks have parts of different sizes."""
        sizes = {(split.axis, split.outer): split.uneven for _, split in self.splits() if split.uneven}
        return [
            UnevenFactor(*place, size, tuple(a for a, s in self.splits() if (s.axis, s.outer) == place))
            for place, size in sorted(sizes.items())
        ]

    def widened(self) -> list[tuple[int, Widened]]:
        """Return the mesh axes along which ranks have parts and entries of their neighbours, and which."""
        return [(axis, p) for axis, p in enumerate(self.placements) if isinstance(p, Widened)]

    def overlapping(self) -> list[tuple[int, Overlapping]]:
        """Return the mesh axes along which ranks have entries that others have too, and which."""
        return [(axis, p) for axis, p in enumerate(self.placements) if isinstance(p, Overlapping)]

    def varying(self) -> list[int]:
        """Return the tensor's axes whose sizes may differ between ranks."""
        return [factor.axis for factor in self.uneven()] + [p.axis for _, p in self.overlapping()]

    @property
    def is_whole(self) -> bool:
        """Tell whether every rank of the mesh has the whole tensor."""
        return not self.placements
