"""A communication as messages: what each member sends to which other, and what all of it makes.

kind             to whom              what
reduce           the root             the value
broadcast        all who receive      the root's value
all_reduce       all who receive      the value: each sums for itself, in group order
reduce_scatter   each who receives    its region of the value
all_gather       all who receive      the member's own region
gather_rows      the root             all rows
scatter_rows     each who receives    its rows of the root's
all_gather_rows  all who receive      all rows
all_to_all_rows  each who receives    its rows
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partc.runtime.plan.members import lands_at, sends_at
from partc.runtime.plan.program import Plan, Rank, Run, Start, Store, instructions_of, members_of
from partc.runtime.transports.communication import ROW_KINDS, Dense, Part

Array = np.ndarray[Any, np.dtype[Any]]

_REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """One communication of one group; members are named by their position."""

    start: Start
    members: tuple[int, ...]  # ranks
    senders: frozenset[int]
    receivers: frozenset[int]

    def carries(self, source: int, target: int) -> bool:
        """Tell whether one member sends another a message."""
        if source == target or source not in self.senders or target not in self.receivers:
            return False
        match self.start.kind:
            case "all_gather":
                return self.start.counts[source] > 0
            case "reduce_scatter":
                return self.start.counts[target] > 0
        return True


def routes_of(plan: Plan, rank: Rank) -> dict[int, GroupRoute]:
    """Return who sends and who receives in every communication that a rank takes part in, by tag.

    Who reads nothing of what an all_gather brings is sent nothing: a pull is for the session's worker
    alone, though all servers supply their part of it.
    """
    ranks = {other.rank: other for other in plan.ranks}
    read = {other.rank: _values_read(plan, other) for other in plan.ranks}
    places = _places_in(plan)
    routes: dict[int, GroupRoute] = {}
    for start in plan.instructions:
        if not isinstance(start, Start) or start.group not in rank.groups:
            continue
        brought = {value for name in start.writes for value in (name, *places.get(name, ()))}
        members = members_of(plan, start.group, rank)
        group = [ranks[member] for member in members]
        routes[start.tag_id] = GroupRoute(
            start,
            members,
            frozenset(
                position for position, member in enumerate(group) if sends_at(start, member, members[0])
            ),
            frozenset(
                position
                for position, member in enumerate(group)
                if lands_at(start, member, members[0])
                and (start.kind != "all_gather" or brought & read[member.rank])
            ),
        )
    return routes


def _values_read(plan: Plan, rank: Rank) -> set[str]:
    """Return what a rank computes with, stores, or sends to others; gathering in place is no reading."""
    read: set[str] = set()
    for instruction in instructions_of(plan, rank):
        match instruction:
            case Run(reads=reads):
                read.update(value for _, value in reads)
            case Store(source=source):
                read.add(source)
            case Start(kind=kind, group=group, reads=reads) if kind != "all_gather":
                read.update(reads if len(members_of(plan, group, rank)) > 1 else ())
    return read | {output.value for output in plan.outputs}


def _places_in(plan: Plan) -> dict[str, list[str]]:
    """Map each buffer to the values that lie in it."""
    places: dict[str, list[str]] = {}
    for piece in plan.slices:
        places.setdefault(piece.buffer, []).append(piece.value)
    return places


def piece_for(part: Part, target: int) -> tuple[Array, ...]:
    """Return what a member supplies to the one at position `target`, itself perhaps: an array per value."""
    start = part.start
    if start.kind in ROW_KINDS:
        if not part.counts:
            return part.rows
        first = sum(part.counts[:target])
        return tuple(array[first : first + part.counts[target]] for array in part.rows)
    if start.kind == "reduce_scatter":
        return tuple(_region(start, dense.source, target) for dense in part.dense)
    return tuple(dense.source for dense in part.dense)


def expected_sizes(part: Part, source: int) -> list[int]:
    """Return the bytes of every value that a dense communication brings from a member."""
    if part.start.kind == "all_gather":
        return [part.start.counts[source] * dense.target.itemsize for dense in part.dense]
    return [dense.target.nbytes for dense in part.dense]


def land_dense(part: Part, pieces: Mapping[int, Sequence[Array]]) -> None:
    """Put what members supplied (by position, flat, this one's own included) where results belong."""
    for index, dense in enumerate(part.dense):
        _land(part, dense, {source: arrays[index] for source, arrays in sorted(pieces.items())})


def _land(part: Part, dense: Dense, flat: Mapping[int, Array]) -> None:
    if not flat:
        return
    match part.start.kind:
        case "broadcast":
            result = flat[0]
        case "all_gather":
            result = _gathered(part.start, dense, flat)
        case _:
            result = functools.reduce(_REDUCTIONS[part.start.reduction], flat.values())
    dense.target[...] = result.reshape(dense.target.shape)


def _gathered(start: Start, dense: Dense, flat: Mapping[int, Array]) -> Array:
    nothing = np.empty(0, dense.target.dtype)
    return np.concatenate([flat.get(member, nothing).reshape(-1) for member in range(len(start.counts))])


def land_rows(part: Part, pieces: Mapping[int, Sequence[Array]]) -> tuple[Array, ...]:
    """Return one array per value, the members' rows one behind the other, then how many are whose."""
    wholes = [
        np.concatenate([np.empty((0, *row.shape), row.dtype), *(pieces[s][i] for s in sorted(pieces))])
        for i, row in enumerate(part.start.rows)
    ]
    if part.start.kind == "scatter_rows":
        return tuple(wholes)
    counts = [len(pieces[member][0]) if member in pieces else 0 for member in range(len(part.members))]
    return (*wholes, np.array(counts, np.int64))


def _region(start: Start, whole: Array, member: int) -> Array:
    first = sum(start.counts[:member])
    return whole.reshape(-1)[first : first + start.counts[member]]
