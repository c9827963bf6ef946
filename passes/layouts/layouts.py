"""Where a tensor's pieces are: a site, and how its ranks divide the tensor among themselves.

Replicate        every rank has the whole
Split            rank r of N has the r-th N-th of one factor of one axis; a server, some rows of axis 0
Partial          every rank has a term; the tensor is their sum (or maximum, or minimum)
Widened          rank r of N has the r-th N-th of an axis, and entries of its neighbours' around it
Overlapping      every rank has entries of an axis of its own, of which others may have some too
OwnRows          every rank has all rows, those right whose ids fall in the rows of a table that it keeps
PerReplica       every rank has a tensor of its own: replicas on different data, not pieces
RequestedRows    servers: each has the rows that workers' ids request of it, on their way to these
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from partc.passes.rules.sharding_rule import Fill
from partc.runtime.plan.program import Site

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the site has the whole tensor."""


@dataclass(frozen=True, slots=True)
class Split:
    """Rank r of N has the r-th N-th of a factor of `axis`.

    The axis, of size outer x factor x inner, is cut along its middle: [T, B, H] reshaped to
    [T * B, H] and split on B is Split(axis=0, outer=T). `uneven`: the size of a factor that is not divided
    equally, of which earlier ranks have one entry more (runtime/plan/boxes.py); 0: all parts are equal.
    Of mesh axes that cut a factor together each divides what those before it left: the size is the whole
    factor's, and said by those along which, with those before, parts differ (`Mesh.nest`).
    `rows_of`: servers divide axis 0 as this parameter's rows: each has as many as its placement gives it, or,
    of slices, those whose ids fall in its rows. Placement is chosen after layouts, and ids are data.
    """

    axis: int
    outer: int = 1
    uneven: int = 0
    rows_of: str = ""


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
class OwnRows:
    """Every rank has a row for each of `ids`, right where it keeps that one of a table's `rows`."""

    ids: str
    rows: int


@dataclass(frozen=True, slots=True)
class PerReplica:
    """Every replica has its own tensor, computed from its own data."""


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


Placement = Replicate | Split | Partial | Widened | Overlapping | OwnRows | PerReplica | RequestedRows


EVERYWHERE = Replicate()
REPLICAS = 0  # the axis of a mesh that tells replicas apart, or a parameter's servers
WORKER: Site = "worker"
MICROBATCHES = "microbatch"  # the axis, always the last, whose places are moments of the same ranks


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
        return self.placements[axis] if axis < len(self.placements) else EVERYWHERE

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
        served = [split.axis for _, split in self.splits() if split.rows_of]
        return [factor.axis for factor in self.uneven()] + [p.axis for _, p in self.overlapping()] + served

    @property
    def rows_of(self) -> str:
        """Return the parameter as whose rows servers divide the tensor; empty where they do not."""
        split = self.along(REPLICAS)
        return split.rows_of if isinstance(split, Split) else ""

    @property
    def is_whole(self) -> bool:
        """Tell whether every rank of the mesh has the whole tensor."""
        return not self.placements


def served_rows(parameter: str) -> Layout:
    """Return how servers keep a parameter, and what goes with its rows."""
    return Layout("server", Split(0, rows_of=parameter))
