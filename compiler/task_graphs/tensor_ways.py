"""How tensors go from mesh to mesh, as in a plan (passes/layouts/reshard.py).

Within one, terms are summed, or each worker has its part of the sum, and parts are gathered; to an equal one
of others each sends its part; anything else is messages.
"""

from dataclasses import dataclass
from functools import lru_cache

from partc.compiler.task_graphs.mesh_places import Where, at_place
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split
from partc.passes.layouts.same_parts import common_part
from partc.passes.search.operators.group_collectives import CollectiveKind

Sum = tuple[CollectiveKind, tuple[int, ...]]  # along which mesh axes


@lru_cache(maxsize=1 << 16)
def summed_for(here: Where, readers: tuple[Where, ...]) -> tuple[tuple[Sum, ...], Where]:
    """Return the collectives that sum the terms of a tensor for all who read it, and how it is then.

    Along an axis of which all want the same part each worker has its part (scatter_sums.py), and else all.
    """
    spelled = [at_place(where, here.place) for where in readers]
    wanted = [None if where is None else where.layout for where in spelled]
    scattered: list[int] = []
    reduced: list[int] = []
    placements = list(here.placements)
    for axis, placement in enumerate(here.placements):
        if isinstance(placement, Partial):
            part = common_part(wanted, axis)
            placements[axis] = part or Replicate()
            (scattered if part else reduced).append(axis)
    sums: list[Sum] = [("reduce_scatter", (axis,)) for axis in scattered]
    if reduced:
        sums.append(("all_reduce", tuple(reduced)))
    return tuple(sums), Where.of(here.place, Layout("", *placements).placements)


def is_to_stage(source: Where, target: Where) -> bool:
    """Tell whether each worker sends what it has to the one at its place in a mesh of others.

    Such messages travel together where they are ready at the same time (bucket_communications.py).
    """
    is_alike = (source.place.axes, source.placements) == (target.place.axes, target.placements)
    return is_alike and not set(source.place.workers) & set(target.place.workers)


@dataclass(frozen=True, slots=True)
class Gathering:
    """A tensor's way within a mesh: how it is in the end, and the axes along which it is gathered."""

    target: Where
    axes: tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def gathering(source: Where, target: Where) -> Gathering | None:
    """Return the way of a tensor within the mesh where it is, None where it takes messages."""
    here = at_place(target, source.place)
    if here is None:
        return None
    axes = []
    for axis in range(len(source.place.axes)):
        own, wanted = source.layout.along(axis), here.layout.along(axis)
        if isinstance(own, Split) and isinstance(wanted, Split) and own != wanted:
            return None
        if isinstance(own, Split) and own != wanted:
            axes.append(axis)
    return Gathering(here, tuple(axes))
