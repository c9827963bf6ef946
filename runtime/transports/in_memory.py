"""Communication among ranks of one process: the last member to arrive does the work.

The reference for every other transport: the arithmetic is NumPy's, in group order.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from partc.runtime.errors import BadPlan
from partc.runtime.transports.communication import ROW_KINDS, SHIFTS, Dense, Part
from partc.runtime.transports.rounded_sums import is_rounded, rounded, sum_of
from partc.runtime.transports.transport import Traffic

Array = np.ndarray[Any, np.dtype[Any]]

_REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Board:
    """Where the ranks of one process meet."""

    def __init__(self) -> None:
        self._arrived: dict[tuple[tuple[int, ...], int], list[InMemoryHandle]] = {}

    def post(self, handle: "InMemoryHandle") -> None:
        """Add a member; carry the communication out once all have come."""
        key = (handle.part.members, handle.part.start.tag_id)
        waiting = self._arrived.setdefault(key, [])
        waiting.append(handle)
        if len(waiting) == len(handle.part.members):
            del self._arrived[key]
            _carry_out(sorted(waiting, key=lambda member: member.part.position))


class InMemoryHandle:
    """One member's communication on a board."""

    def __init__(self, part: Part, traffic: Traffic) -> None:
        self.part = part
        self._traffic = traffic
        self._outcome: tuple[Array, ...] | None = None

    def complete(self, outcome: tuple[Array, ...]) -> None:
        """Take what the communication brought."""
        self._outcome = outcome
        self._traffic.count_complete(self.part, outcome)

    def done(self) -> bool:
        """Tell whether every member has arrived."""
        return self._outcome is not None

    def rows(self) -> tuple[Array, ...]:
        """Return one array per write of a row kind."""
        assert self._outcome is not None, "asked for before it was done"
        return self._outcome


class InMemoryTransport:
    """One rank's side of a board."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.traffic = Traffic()

    def start(self, part: Part) -> InMemoryHandle:
        """Begin a communication."""
        self.traffic.count(part)
        handle = InMemoryHandle(part, self.traffic)
        self._board.post(handle)
        return handle

    def progress(self) -> None:
        """Do nothing: members move each other on."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: messages move without the caller."""
        return nullcontext()


def _carry_out(handles: list[InMemoryHandle]) -> None:
    parts = [handle.part for handle in handles]
    if parts[0].start.kind in ROW_KINDS:
        for handle, outcome in zip(handles, _move_rows(parts), strict=True):
            handle.complete(outcome)
        return
    for index in range(len(parts[0].dense)):
        _combine(parts, index)
    for handle in handles:
        handle.complete(())


def _combine(parts: list[Part], index: int) -> None:
    start = parts[0].start
    members = [part.dense[index] for part in parts]
    if len(members) == 1 and members[0].source is members[0].target:
        return
    if start.kind == "broadcast":
        for member in members[1:]:
            _land(member.target, members[0].source)
        return
    if start.kind == "exchange":
        _move(parts, members)
        return
    if start.kind in SHIFTS:
        for part, member in zip(parts, members, strict=True):
            came = part.shifts_from
            _land(member.target, np.zeros_like(member.target) if came is None else members[came].source)
        return
    sources = [member.source.reshape(-1) for member in members]
    if start.kind == "all_gather":
        whole = np.concatenate(sources)
        for member in members:
            _land(member.target, whole)
        return
    if parts[0].hosts:
        positions = [[parts[0].members.index(member) for member in here] for here in parts[0].hosts]
        sources = [_total([sources[position] for position in here], parts[0]) for here in positions]
    if is_rounded(parts[0]):
        total = sum_of([rounded(parts[0], source) for source in sources])
        total = total if start.kind == "reduce_scatter" else rounded(parts[0], total)
    else:
        total = _total(sources, parts[0])
    if start.kind == "reduce":
        _land(members[0].target, total)
        return
    cuts = np.cumsum(start.counts)[:-1]
    pieces = np.split(total, cuts) if start.kind == "reduce_scatter" else [total] * len(members)
    for member, piece in zip(members, pieces, strict=True):
        _land(member.target, piece)


def _total(sources: list[Array], part: Part) -> Array:
    return functools.reduce(_REDUCTIONS[part.start.reduction], sources)


def _move(parts: list[Part], members: list[Dense]) -> None:
    """Carry an exchange out: each mover's piece lies where the one who wants it has its place."""
    for part, member in zip(parts, members, strict=True):
        for source, target, out, _ in part.moves():
            if out is not None:
                into = next(i for s, t, _, i in parts[target].moves() if (s, t) == (source, target))
                members[target].target[into] = member.source[out]


def _land(target: Array, result: Array) -> None:
    target[...] = result.reshape(target.shape)


def _move_rows(parts: list[Part]) -> list[tuple[Array, ...]]:
    match parts[0].start.kind:
        case "scatter_rows":
            return [tuple(pieces) for pieces in _pieces_to(parts[:1], len(parts))]
        case "all_to_all_rows":
            senders = [part for part in parts if part.sends]
            counts = np.array([part.counts or (0,) * len(parts) for part in parts], np.int64)
            pieces = _pieces_to(senders, len(parts))
            return [(*arrays, counts[:, to].copy()) for to, arrays in enumerate(pieces)]
        case _:
            senders = [part for part in parts if part.sends]
            lengths = np.array([part.rows[0].shape[0] if part.sends else 0 for part in parts], np.int64)
            wholes = _stack([part.rows for part in senders])
            return [tuple(array.copy() for array in (*wholes, lengths)) for _ in parts[1:]] + [
                (*wholes, lengths)
            ]


def _pieces_to(senders: list[Part], size: int) -> list[list[Array]]:
    """Return for every member what the senders cut for it, stacked in group order."""
    cut = [[np.split(array, np.cumsum(sender.counts)[:-1]) for array in sender.rows] for sender in senders]
    return [_stack([tuple(value[to] for value in sender) for sender in cut]) for to in range(size)]


def _stack(contributions: list[tuple[Array, ...]]) -> list[Array]:
    signatures = {tuple((array.dtype, array.shape[1:]) for array in arrays) for arrays in contributions}
    if len(signatures) != 1:
        raise BadPlan(
            f"members send rows of different kinds: {sorted(map(str, signatures))}",
            at="rows",
            fix="compile the model again",
        )
    return [np.concatenate(arrays) for arrays in zip(*contributions, strict=True)]
