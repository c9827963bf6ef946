"""A server of asynchronous training: events in, messages out; sockets and clocks are others' business.

It owns variables that all sessions share, and plays its rank of every session: one executor each. Whatever
has come is carried out before anything else is heard, and an executor is left only where it waits. So a
segment, and all segments between two waits of a session, are atomic: no other session sees them half done.

Before its commit point (commit_point.py) a step writes nothing; it goes on from there when the chief says
that all servers have all of its push. The first of the servers is the chief (coordinator.py).

What it owns is one memory that the environments of all sessions share.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partc.runtime.asynchronous.servers.commit_point import commit_point
from partc.runtime.asynchronous.servers.coordinator import Coordinator, SavePolicy
from partc.runtime.asynchronous.sessions.messages import (
    Applied,
    Begin,
    Commit,
    Finish,
    Gone,
    Open,
    Opened,
    Piece,
    ReadyToCommit,
    Save,
    SessionMessage,
    ShardWritten,
    ToChief,
    ToServers,
)
from partc.runtime.asynchronous.sessions.session import (
    Post,
    peer_of,
    plan_of_data,
    server_name,
    servers_of,
    session_name,
)
from partc.runtime.asynchronous.sessions.session_transport import SessionTransport
from partc.runtime.asynchronous.sessions.worker_variables import worker_variables
from partc.runtime.data.initial import FirstValues
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor, NoteProgram, nowhere
from partc.runtime.plan.members import shard_values
from partc.runtime.plan.program import Plan, Rank, Start, instructions_of
from partc.runtime.plan.variables import Box

Array = np.ndarray[Any, np.dtype[Any]]


class SharedValues:
    """First values that are made once: every later asker gets the same memory, as it is by then.

    An environment on a CPU keeps a variable where the first value lies, so all of them see every update.
    """

    def __init__(self, first: FirstValues) -> None:
        self._first = first
        self._shared: dict[tuple[str, Box | None], Array] = {}

    def part(self, name: str, box: Box | None = None) -> Array:
        """Return a part of variable `name`: the memory itself."""
        key = (name, box)
        if key not in self._shared:
            self._shared[key] = np.require(self._first.part(name, box), requirements=["C", "W"])
        return self._shared[key]


Feeds = Callable[[int, int], Mapping[str, Array]]  # (session, step from 1) -> what this rank is fed


@dataclass(slots=True)
class Staleness:
    """How old the values were that workers computed with, as one server saw it.

    `pushes`: steps applied, of all sessions. `missed`: of how many steps other sessions' pushes came
    between a step's beginning and its own push -> how many such steps. `widest_lag`: the most steps that
    the slowest live worker was behind one that began a step.
    """

    pushes: int = 0
    missed: Counter[int] = field(default_factory=Counter)
    widest_lag: int = 0


@dataclass(slots=True)
class Surroundings:
    """What a server asks of its process.

    `save`: copy what the server owns, now; it is told how many steps of each worker are in it.
    `after_step`: told a step (from 1) of any session when its push is applied. `saves`: of the chief.
    `note`: takes note of where it is in a program.
    """

    feeds: Feeds
    post: Post
    save: Callable[[tuple[int, ...]], None] = lambda steps: None
    after_step: Callable[[int], None] = lambda step: None
    saves: SavePolicy = field(default_factory=SavePolicy)
    note: NoteProgram = lambda program: nowhere


class Server:
    """One server. `steps`: how many each worker has trained before. `staleness` None: workers never wait."""

    def __init__(
        self,
        plan: Plan,
        rank: Rank,
        loaded: Sessions,
        values: SharedValues,
        steps: Sequence[int],
        staleness: int | None,
        around: Surroundings,
    ) -> None:
        self.rank = rank
        self.staleness = Staleness()
        self.is_finished = False
        self._plan = plan
        self._loaded = loaded
        self._values = values
        self._around = around
        self._sessions: dict[int, _Session] = {}
        self._sent: Counter[str] = Counter()  # by sessions that have ended
        self._is_stirred = False  # something has come that a session may go on with
        servers = [server.rank for server in servers_of(plan)]
        self._chief = server_name(servers[0])
        self.coordinator = (
            Coordinator(
                steps,
                servers,
                staleness,
                worker_variables(plan),
                self._tell_server,
                self._answer,
                around.saves,
            )
            if rank.rank == servers[0]
            else None
        )
        for piece in rank.pieces:
            values.part(piece.variable, piece.box)

    def receive(self, message: SessionMessage, frames: Sequence[memoryview] = ()) -> None:
        """Take in a message."""
        self._is_stirred = True
        match message:
            case Begin(session=session, step=step) if session in self._sessions:
                self._sessions[session].begun = step
                self._see_whether_ready(self._sessions[session])
            case Piece(session=session) if session in self._sessions:
                self._sessions[session].transport.deliver(message, frames)
                self._see_whether_ready(self._sessions[session])
            case Commit(session=session, step=step) if session in self._sessions:
                self._sessions[session].committed = step
            case Open(session=session, step=step):
                self._open(session, step)
            case Gone(session=session) if session in self._sessions:
                self._sessions[session].is_gone = True
            case Save(steps=steps):
                self._around.save(steps)
            case Finish():
                self.is_finished = True
            case Begin() | Piece() | Commit() | Gone():
                pass  # of a session that has ended
            case _ if self.coordinator is not None and isinstance(message, ToChief):
                self.coordinator.receive(message, frames)

    def advance(self) -> None:
        """Carry out what has become possible, session by session."""
        while self._is_stirred:
            self._is_stirred = False
            for session in tuple(self._sessions.values()):
                while self._advance(session):
                    pass

    def _advance(self, session: "_Session") -> bool:
        """Go on until the session waits; tell whether it ended a step, and may go on with the next."""
        step = session.transport.step
        if session.is_gone and session.applied >= session.committed:
            self._close(session)
            return False
        if session.running is None and step < session.begun:
            step = self._begin(session)
        if session.running is None or next(session.running, None) is not None:
            return False
        if not session.is_applying:
            if session.committed < step:
                return False
            session.is_applying = True
            session.running = session.executor.step_from(session.commit_point)
            return True
        self._end_step(session)
        return True

    def variables(self) -> dict[str, Array]:
        """Return what this server owns: value name -> the memory itself."""
        return {h.value: self._values.part(h.variable, h.box) for h in self.rank.pieces}

    def payload_bytes(self) -> dict[str, int]:
        """Return the bytes of values that it sent so far, by kind of communication."""
        counted = Counter(self._sent)
        for session in self._sessions.values():
            counted += session.transport.traffic.payload_bytes
        return dict(counted)

    def written(self, fault: str) -> None:
        """Tell the chief that this server's part of a checkpoint is written, or what was wrong."""
        self._tell_chief(ShardWritten(self.rank.rank, fault))

    def _open(self, session: int, step: int) -> None:
        plan = self._plan

        def send(piece: Piece, arrays: Sequence[Array]) -> None:
            self._around.post(peer_of(plan, session, piece.target), piece, arrays)

        transport = SessionTransport(plan, self.rank, session, send)
        transport.step = step
        environment = Environment(plan, self.rank, device_of(self.rank), self._values)
        environment.feed(shard_values(plan_of_data(plan), self.rank))
        enter = self._around.note(instructions_of(plan, self.rank))
        executor = Executor(plan, self.rank, environment, self._loaded, transport, enter=enter)
        begun = {other.number: other.begun + 1 for other in self._sessions.values()}
        at = commit_point(executor.program, self.rank)
        self._sessions[session] = _Session(session, transport, executor, at, step, step, step, step, begun)
        self._tell_chief(Opened(session, self.rank.rank))

    def _close(self, session: "_Session") -> None:
        self._sent += session.transport.traffic.payload_bytes
        del self._sessions[session.number]

    def _see_whether_ready(self, session: "_Session") -> None:
        """Tell the chief when all has come that the session's worker sends in its next step."""
        step = session.ready + 1
        if session.begun >= step and session.transport.has_push(step):
            session.ready = step
            session.transport.forget_push(step)
            self._tell_chief(ReadyToCommit(session.number, step, self.rank.rank))

    def _begin(self, session: "_Session") -> int:
        step = session.transport.step = session.transport.step + 1
        others = self._sessions.values()
        slowest = min(other.applied for other in others if step > other.came_behind.get(session.number, 0))
        self.staleness.widest_lag = max(self.staleness.widest_lag, step - 1 - slowest)
        session.pushes_before = self.staleness.pushes
        session.is_applying = False
        feeds = self._around.feeds(session.number, step)
        session.running = session.executor.step_until(feeds, session.commit_point)
        return step

    def _end_step(self, session: "_Session") -> None:
        session.running = None
        session.applied = session.transport.step
        self.staleness.missed[self.staleness.pushes - session.pushes_before] += 1
        self.staleness.pushes += 1
        self._around.after_step(session.applied)
        done = Applied(session.number, session.applied, self.rank.rank)
        self._answer(session.number, done, ())
        self._tell_chief(done)

    def _tell_chief(self, message: ToChief) -> None:
        if self.coordinator is not None:
            self.receive(message)
        else:
            self._around.post(self._chief, message, ())

    def _tell_server(self, server: int, message: ToServers) -> None:
        if server == self.rank.rank:
            self.receive(message)
        else:
            self._around.post(server_name(server), message, ())

    def _answer(self, session: int, message: SessionMessage, arrays: Sequence[Array]) -> None:
        self._around.post(session_name(session, len(self._plan.asynchronous)), message, arrays)


@dataclass(slots=True)
class _Session:
    """A server's part in one worker's session.

    `came_behind`: session -> its last step that it may have begun before it had to wait for this one.
    """

    number: int
    transport: SessionTransport
    executor: Executor
    commit_point: int
    begun: int  # the last step that the worker began
    ready: int  # the last step of which all has come
    committed: int  # the last step that every server has all of
    applied: int  # the last step carried out to its end
    came_behind: dict[int, int]
    running: Iterator[Start] | None = None  # the part of a step under way
    is_applying: bool = False  # that part is the one behind the commit point
    is_gone: bool = False
    pushes_before: int = 0  # of all sessions, when the step began
