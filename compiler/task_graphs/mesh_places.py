"""Where tensors are: meshes of workers, how one is there, and how the same parts are spelled elsewhere."""

from dataclasses import dataclass
from functools import cache, lru_cache

from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh
from partc.passes.layouts.same_parts import same_parts
from partc.passes.search.operators.group_layouts import Placements

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class MeshPlace:
    """A mesh's axes, and the workers at its places. Equal ones are one object."""

    axes: Axes
    workers: tuple[int, ...]

    def lines(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the workers who meet along axes, one or several, where they are more than one."""
        return _lines(self, axes)

    @staticmethod
    @cache
    def of(axes: Axes, workers: tuple[int, ...]) -> "MeshPlace":
        """Return the one object."""
        return MeshPlace(axes, workers)


@lru_cache(maxsize=1 << 14)
def _lines(place: MeshPlace, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    lines = Mesh("own", place.axes).lines(axes)
    if len(lines[0]) == 1:
        return ()
    return tuple(tuple(place.workers[position] for position in line) for line in lines)


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """How a tensor is on a mesh. Equal ones are one object. `share`: of how many parts one has one."""

    place: MeshPlace
    placements: Placements
    share: int

    @property
    def layout(self) -> Layout:
        """Return the placements as a layout of a mesh without a name of its own."""
        return Layout("own", *self.placements)

    @staticmethod
    @cache
    def of(place: MeshPlace, placements: Placements) -> "Where":
        """Return the one object."""
        return Where(place, placements, Mesh("own", place.axes).share(Layout("own", *placements)))


@lru_cache(maxsize=1 << 16)
def at_place(where: Where, place: MeshPlace) -> Where | None:
    """Return how a tensor is spelled on another mesh of the same workers that each has the same part of."""
    if where.place is place:
        return where
    meshes = (Mesh("own", each.axes, each.workers) for each in (where.place, place))
    same = same_parts(next(meshes), where.layout, next(meshes))
    return None if same is None else Where.of(place, same.placements)
