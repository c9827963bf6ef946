"""A worker of asynchronous training: its own ranks of its own session, events in, messages out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from partc.runtime.asynchronous.sessions.messages import (
    Applied,
    Ask,
    Begin,
    Grant,
    Join,
    Kept,
    Piece,
    SessionMessage,
    Welcome,
)
from partc.runtime.asynchronous.sessions.session import (
    Post,
    own_ranks,
    peer_of,
    plan_of_data,
    rank_of_data,
    server_name,
    servers_of,
    session_name,
    worker_of,
)
from partc.runtime.asynchronous.sessions.session_transport import SessionTransport
from partc.runtime.asynchronous.sessions.worker_variables import worker_arrays, worker_variables
from partc.runtime.data.initial import FirstValues
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor, NoteProgram, loss_of, nowhere
from partc.runtime.plan.members import shard_values
from partc.runtime.plan.program import Plan, Rank, instructions_of
from partc.runtime.transports.host_staging import transport_from

Array = np.ndarray[Any, np.dtype[Any]]


class Worker:
    """Trains one replica against the servers. `staleness` None: it never waits for other workers.

    `trained`: the step that it goes on behind, known once it has joined.
    """

    def __init__(
        self,
        plan: Plan,
        session: int,
        loaded: Sessions,
        initial: FirstValues,
        staleness: int | None,
        post: Post,
        note: NoteProgram = lambda program: nowhere,
    ) -> None:
        worker = worker_of(session, len(plan.asynchronous))
        self.number = worker
        self.trained = 0
        self._session = session
        self._name = session_name(session, len(plan.asynchronous))
        self._chief = server_name(servers_of(plan)[0].rank)
        self._is_welcome = False
        self._worker_variables = worker_variables(plan)
        self._plan = plan
        self._post = post
        self._is_bounded = staleness is not None
        self._granted = 0
        self._told_itself = False  # one of its ranks another, which may go on then
        self._applied = {server.rank: 0 for server in servers_of(plan)}
        self._transports: dict[int, SessionTransport] = {}
        self._executors: dict[int, Executor] = {}
        for rank in own_ranks(plan):
            rank_here = _rank_on_device(plan, rank, worker)
            transport = SessionTransport(plan, rank_here, session, self._send)
            environment = Environment(plan, rank_here, device_of(rank_here), initial)
            environment.feed(shard_values(plan_of_data(plan), rank_of_data(rank_here, worker)))
            self._transports[rank.rank] = transport
            enter = note(instructions_of(plan, rank_here))
            self._executors[rank.rank] = Executor(
                plan,
                rank_here,
                environment,
                loaded,
                transport_from(environment.device, transport),
                enter=enter,
            )

    def receive(self, message: SessionMessage, frames: Sequence[memoryview] = ()) -> None:
        """Take in a message."""
        match message:
            case Welcome(step=step):
                self._go_on_behind(step, frames)
            case Grant(step=step):
                self._granted = step
            case Applied(server=server, step=step) if server in self._applied:
                self._applied[server] = step
            case Piece(target=target) if target in self._transports:
                self._transports[target].deliver(message, frames)

    def join(self) -> Iterator[str]:
        """Begin its session; yield whom it waits for."""
        self._post(self._chief, Join(self._session), ())
        while not self._is_welcome:
            yield self._chief

    def may_begin(self, step: int) -> Iterator[str]:
        """Yield whom it waits for until it may begin a step (from 1)."""
        yield from self.applied(step - 2)
        if self._is_bounded:
            self._post(self._chief, Ask(self._session, step), ())
            while self._granted < step:
                yield "slower workers"

    def step(self, step: int, feeds: Mapping[int, Mapping[str, Array]]) -> Iterator[str]:
        """Carry out one step that it may begin; yield what it waits for. `feeds`: rank -> what it is fed."""
        for server in self._applied:
            self._post(server_name(server), Begin(self._session, step), ())
        running = {}
        for rank, executor in self._executors.items():
            self._transports[rank].step = step
            running[rank] = executor.step(feeds[rank])
        while running:
            self._told_itself = False
            waiting = {rank: next(instructions, None) for rank, instructions in running.items()}
            running = {rank: running[rank] for rank, start in waiting.items() if start is not None}
            awaited = next(filter(None, waiting.values()), None)
            if awaited is not None and not self._told_itself:
                yield f"communication {awaited.label or awaited.kind} ({awaited.tag_id})"
        if self._worker_variables:
            values = self.variables()
            arrays = [values[variable.name] for variable in self._worker_variables]
            self._post(self._chief, Kept(self._session, step), arrays)

    def applied(self, step: int) -> Iterator[str]:
        """Yield whom it waits for until every server has applied a step's pushes."""
        while min(self._applied.values()) < step:
            yield server_name(min(self._applied, key=self._applied.__getitem__))

    @property
    def environment(self) -> Environment:
        """What the rank that computes holds."""
        (rank,) = (rank for rank in own_ranks(self._plan) if rank.replica is not None)
        return self._executors[rank.rank].environment

    def loss(self) -> float | None:
        """Return the last step's loss, None if the plan has none."""
        return loss_of(self._plan, self.environment)

    def outputs(self) -> dict[str, Array]:
        """Return the last step's outputs."""
        return {output.name: self.environment.array(output.value).copy() for output in self._plan.outputs}

    def variables(self) -> dict[str, Array]:
        """Return the whole variables that this worker keeps for itself: variable -> value."""
        return {
            piece.variable: self._executors[rank.rank].environment.array(piece.value)
            for rank in own_ranks(self._plan)
            for piece in rank.pieces
            if piece.box is None
        }

    def payload_bytes(self) -> dict[str, int]:
        """Return the bytes of values that it sent so far, by kind of communication."""
        counted: Counter[str] = Counter()
        for transport in self._transports.values():
            counted += transport.traffic.payload_bytes
        return dict(counted)

    def _go_on_behind(self, step: int, frames: Sequence[memoryview]) -> None:
        self._is_welcome = True
        self.trained = step
        self._applied = dict.fromkeys(self._applied, step)
        local_values = worker_arrays(self._worker_variables, frames, self._chief) if frames else {}
        for rank in own_ranks(self._plan):
            for piece in rank.pieces:
                if piece.variable in local_values:
                    self._executors[rank.rank].environment.put(piece.value, local_values[piece.variable])

    def _send(self, piece: Piece, arrays: Sequence[Array]) -> None:
        peer = peer_of(self._plan, self._session, piece.target)
        if peer == self._name:
            frames = [memoryview(array.tobytes()) for array in arrays]
            self._transports[piece.target].deliver(piece, frames)
            self._told_itself = True
        else:
            self._post(peer, piece, arrays)


def _rank_on_device(plan: Plan, rank: Rank, worker: int) -> Rank:
    """Return a rank on this worker's own device instead of the plan's."""
    place = plan.asynchronous[worker]
    if rank.replica is None:
        return rank
    return msgspec.structs.replace(
        rank, kind=place.kind, device_index=place.device_index, threads=place.threads
    )
