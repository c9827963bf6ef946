"""A server of asynchronous training: events in, messages out; sockets and clocks are others' business.

It owns variables that all sessions share, and plays its rank of every session: one executor each. Whatever
has come is carried out before anything else is heard, and an executor is left only where it waits. So a
segment, and all segments between two waits of a session, are atomic: no other session sees them half done.

What it owns is one memory that the environments of all sessions share.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partc.runtime.asynchronous.clock import Clock, Grants
from partc.runtime.asynchronous.messages import (
    Applied,
    Ask,
    Begin,
    Finish,
    Gone,
    Grant,
    Piece,
    SessionMessage,
)
from partc.runtime.asynchronous.session import (
    Post,
    peer_of,
    plan_of_data,
    server_name,
    servers_of,
    worker_name,
)
from partc.runtime.asynchronous.session_transport import SessionTransport
from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor
from partc.runtime.plan.members import shard_values
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan, Rank, Start
from partc.runtime.plan.variables import Box

Array = np.ndarray[Any, np.dtype[Any]]


class SharedValues(InitialValues):
    """Initial values that are made once: every later asker gets the same memory, as it is by then.

    An environment on a CPU keeps a variable where the initial value lies, so all of them see every update.
    """

    def __init__(self, folder: PlanFolder, given: Mapping[str, Array] | None = None) -> None:
        super().__init__(folder, given)
        self._shared: dict[tuple[str, Box | None], Array] = {}

    def part(self, name: str, box: Box | None = None) -> Array:
        """Return a part of variable `name`: the memory itself."""
        key = (name, box)
        if key not in self._shared:
            self._shared[key] = np.require(super().part(name, box), requirements=["C", "W"])
        return self._shared[key]


Feeds = Callable[[int, int], Mapping[str, Array]]  # (session, step from 1) -> what this rank is fed
AfterStep = Callable[[int], None]  # told a step (from 1) of any session when its pushes are applied


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


class Server:
    """One server. `staleness` None: workers never wait for each other."""

    def __init__(
        self,
        plan: Plan,
        rank: Rank,
        loaded: Sessions,
        values: SharedValues,
        feeds: Feeds,
        staleness: int | None,
        post: Post,
        after_step: AfterStep = lambda step: None,
    ) -> None:
        self.rank = rank
        self.staleness = Staleness()
        self.is_finished = False
        self._plan = plan
        self._servers = [server.rank for server in servers_of(plan)]
        self._values = values
        self._post = post
        self._feeds = feeds
        self._after_step = after_step
        workers = range(len(plan.asynchronous))
        keeps_clock = staleness is not None and rank.rank == self._servers[0]
        self._clock = Clock(len(workers), len(self._servers), staleness or 0) if keeps_clock else None
        self._is_bounded = staleness is not None
        self._sessions = {worker: self._open(worker, loaded) for worker in workers}

    def receive(self, message: SessionMessage, frames: Sequence[memoryview] = ()) -> None:
        """Take in a message."""
        match message:
            case Begin(session=session, step=step) if session in self._sessions:
                self._sessions[session].begun = step
            case Piece(session=session) if session in self._sessions:
                self._sessions[session].transport.deliver(message, frames)
            case Ask(session=session, step=step) if self._clock is not None:
                self._grant(self._clock.ask(session, step))
            case Applied(session=session, step=step, server=server) if self._clock is not None:
                self._grant(self._clock.applied(session, self._servers.index(server), step))
            case Gone(session=session):
                self._forget(session)
            case Finish():
                self.is_finished = True

    def advance(self) -> None:
        """Carry out what has become possible, session by session."""
        for session in tuple(self._sessions.values()):
            while self._advance(session):
                pass

    def _advance(self, session: "_Session") -> bool:
        """Go on until the session waits; tell whether it ended a step, and may go on with the next."""
        if session.running is None and session.transport.step < session.begun:
            self._begin(session)
        if session.running is None or next(session.running, None) is not None:
            return False
        self._end_step(session)
        return True

    def variables(self) -> dict[str, Array]:
        """Return what this server owns: value name -> the memory itself."""
        return {h.value: self._values.part(h.variable, h.box) for h in self.rank.held}

    def payload_bytes(self) -> dict[str, int]:
        """Return the bytes of values that it sent so far, by kind of communication."""
        counted: Counter[str] = Counter()
        for session in self._sessions.values():
            counted += session.transport.traffic.payload_bytes
        return dict(counted)

    def _open(self, worker: int, loaded: Sessions) -> "_Session":
        plan = self._plan

        def send(piece: Piece, arrays: Sequence[Array]) -> None:
            self._post(peer_of(plan, worker, piece.target), piece, arrays)

        transport = SessionTransport(plan, self.rank, worker, send)
        environment = Environment(plan, self.rank, device_of(self.rank), self._values)
        environment.feed(shard_values(plan_of_data(plan), self.rank))
        return _Session(worker, transport, Executor(plan, self.rank, environment, loaded, transport))

    def _begin(self, session: "_Session") -> None:
        step = session.transport.step = session.transport.step + 1
        slowest = min(other.applied for other in self._sessions.values())
        self.staleness.widest_lag = max(self.staleness.widest_lag, step - 1 - slowest)
        session.pushes_before = self.staleness.pushes
        session.running = session.executor.step(self._feeds(session.worker, step))

    def _end_step(self, session: "_Session") -> None:
        session.running = None
        session.applied = session.transport.step
        self.staleness.missed[self.staleness.pushes - session.pushes_before] += 1
        self.staleness.pushes += 1
        self._after_step(session.applied)
        done = Applied(session.worker, session.applied, self.rank.rank)
        self._post(worker_name(session.worker), done, ())
        if self._clock is not None:
            self.receive(done)
        elif self._is_bounded:
            self._post(server_name(self._servers[0]), done, ())

    def _forget(self, session: int) -> None:
        self._sessions.pop(session, None)
        if self._clock is not None:
            self._grant(self._clock.gone(session))

    def _grant(self, grants: Grants) -> None:
        for worker, step in grants:
            self._post(worker_name(worker), Grant(step), ())


@dataclass(slots=True)
class _Session:
    """A server's part in one worker's session."""

    worker: int
    transport: SessionTransport
    executor: Executor
    begun: int = 0  # the last step that the worker began
    running: Iterator[Start] | None = None  # the step under way
    applied: int = 0  # the last step carried out to its end
    pushes_before: int = 0  # of all sessions, when the step began
