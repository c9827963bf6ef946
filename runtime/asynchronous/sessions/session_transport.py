"""One rank's side of one session: communications as messages between peers.

Pieces may arrive before the rank comes to the communication that they belong to; they wait in an inbox.
Nothing is believed: sender, number, sizes and row types are held to the plan before an array is made.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from partc.runtime.asynchronous.sessions.messages import Piece, refused
from partc.runtime.asynchronous.sessions.routes import (
    GroupRoute,
    expected_sizes,
    land_dense,
    land_rows,
    piece_for,
    routes_of,
)
from partc.runtime.asynchronous.sessions.session import own_ranks
from partc.runtime.errors import BadPlan
from partc.runtime.plan.program import Plan, Rank, Start
from partc.runtime.transports.communication import ROW_KINDS, Part
from partc.runtime.transports.transport import Traffic

Array = np.ndarray[Any, np.dtype[Any]]
Frames = Sequence[memoryview]

# A worker begins a step when its servers have applied the one before the last.
_WAITING_AT_MOST = 2


class SessionTransport:
    """Carries a rank's communications of one session. `send` hands a piece and its arrays to a peer."""

    def __init__(
        self, plan: Plan, rank: Rank, session: int, send: Callable[[Piece, Sequence[Array]], None]
    ) -> None:
        self.traffic = Traffic()
        self.step = 0
        self._rank = rank.rank
        self._session = session
        self._send = send
        self._routes = routes_of(plan, rank)
        self._inbox: dict[tuple[int, int], deque[tuple[Piece, Frames]]] = {}
        self._pushers = {own.rank for own in own_ranks(plan)} - {rank.rank}
        self._push_pieces = sum(self._pieces_of_push(route) for route in self._routes.values())
        self._pushed: Counter[int] = Counter()  # step -> pieces of the worker that have come
        for route in self._routes.values():
            _check_row_shapes(route.start)

    def start(self, part: Part) -> "SessionHandle":
        """Begin a communication: send what this rank supplies."""
        self.traffic.count(part)
        route = self._routes[part.start.tag_id]
        for target, member in enumerate(part.members):
            if route.carries(part.position, target):
                arrays = piece_for(part, target)
                rows = len(arrays[0]) if part.start.kind in ROW_KINDS else 0
                tag_id = part.start.tag_id
                piece = Piece(self._session, self.step, tag_id, self._rank, member, rows)
                self._send(piece, arrays)
        return SessionHandle(self, part, route)

    def progress(self) -> None:
        """Do nothing: peers are heard by whoever drives the executor."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: messages move without the caller."""
        return nullcontext()

    def deliver(self, piece: Piece, frames: Frames) -> None:
        """Take in what another member sent. Raises RankFailed if the plan does not foresee it."""
        at = f"session {self._session}, from rank {piece.sender}"
        route = self._routes.get(piece.tag_id)
        if route is None or piece.sender not in route.members:
            raise refused(f"communication {piece.tag_id} is not between these ranks", at)
        source = route.members.index(piece.sender)
        if not route.carries(source, route.members.index(self._rank)):
            raise refused(f"nothing was expected in communication {piece.tag_id}", at)
        _check_frames(route.start, piece, frames, at)
        waiting = self._inbox.setdefault((piece.tag_id, source), deque())
        if len(waiting) >= _WAITING_AT_MOST:
            raise refused(f"communication {piece.tag_id} of {len(waiting) + 1} steps at once", at)
        waiting.append((piece, frames))
        if piece.sender in self._pushers:
            self._pushed[piece.step] += 1

    def has_push(self, step: int) -> bool:
        """Tell whether all has come that the session's worker sends in a step."""
        return self._pushed[step] == self._push_pieces

    def forget_push(self, step: int) -> None:
        """Count the pieces of a step no more."""
        self._pushed.pop(step, None)

    def _pieces_of_push(self, route: GroupRoute) -> int:
        own = route.members.index(self._rank)
        return sum(
            member in self._pushers and route.carries(source, own)
            for source, member in enumerate(route.members)
        )

    def has_all(self, tag_id: int, sources: Sequence[int]) -> bool:
        """Tell whether something has come from each of these members."""
        return all(self._inbox.get((tag_id, source)) for source in sources)

    def take(self, tag_id: int, source: int) -> tuple[Piece, Frames]:
        """Return what came first from a member."""
        piece, frames = self._inbox[tag_id, source].popleft()
        if piece.step != self.step:
            what = f"communication {tag_id} of step {piece.step} in step {self.step}"
            raise refused(what, f"session {self._session}, from rank {piece.sender}")
        return piece, frames


class SessionHandle:
    """A communication under way."""

    def __init__(self, transport: SessionTransport, part: Part, route: GroupRoute) -> None:
        self._transport = transport
        self._part = part
        self._sources = [s for s in range(len(part.members)) if route.carries(s, part.position)]
        self._keeps_own = part.position in route.senders & route.receivers
        self._results: tuple[Array, ...] = ()
        self._complete = False

    def done(self) -> bool:
        """Tell whether all pieces have come; land them when they have."""
        if not self._complete and self._transport.has_all(self._part.start.tag_id, self._sources):
            self._complete = True
            self._land()
            self._transport.traffic.count_complete(self._part, self._results)
        return self._complete

    def rows(self) -> tuple[Array, ...]:
        """Return one array per write of a row kind."""
        assert self._complete, "asked for before it was done"
        return self._results

    def _land(self) -> None:
        part = self._part
        pieces = {source: self._read(source) for source in self._sources}
        if self._keeps_own:
            pieces[part.position] = list(piece_for(part, part.position))
        if part.start.kind in ROW_KINDS:
            self._results = land_rows(part, pieces) if part.lands else ()
        elif part.lands:
            land_dense(part, pieces)

    def _read(self, source: int) -> list[Array]:
        piece, frames = self._transport.take(self._part.start.tag_id, source)
        if self._part.start.kind in ROW_KINDS:
            return [
                np.frombuffer(frame, row.dtype).reshape(piece.rows, *row.shape)
                for frame, row in zip(frames, self._part.start.rows, strict=True)
            ]
        planned_sizes, sizes = expected_sizes(self._part, source), [len(frame) for frame in frames]
        if sizes != planned_sizes:
            raise refused(
                f"values of {sizes} bytes where {planned_sizes} were planned", f"rank {piece.sender}"
            )
        return [
            np.frombuffer(frame, dense.target.dtype)
            for frame, dense in zip(frames, self._part.dense, strict=True)
        ]


def _check_row_shapes(start: Start) -> None:
    if start.kind in ROW_KINDS and not start.rows:
        raise BadPlan(
            "the plan does not say what the rows look like that travel",
            at=f"communication {start.tag_id} ({start.label or start.kind})",
            fix="give what travels by rows a fixed size behind its first axis, or train synchronously",
        )


def _check_frames(start: Start, piece: Piece, frames: Frames, at: str) -> None:
    sizes = [len(frame) for frame in frames]
    if start.kind not in ROW_KINDS:
        if len(sizes) != len(start.reads):
            raise refused(f"{len(sizes)} values where {len(start.reads)} were planned", at)
        return
    bytes_of_rows = [piece.rows * np.dtype(row.dtype).itemsize * math.prod(row.shape) for row in start.rows]
    if piece.rows < 0 or sizes != bytes_of_rows:
        raise refused(f"values of {sizes} bytes where {piece.rows} rows take {bytes_of_rows}", at)
