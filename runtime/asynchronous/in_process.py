"""All sessions in one process, interleaved at random: for tests of what no order may change.

Messages are real ones, bytes in queues that keep their order from one peer to another and no other order.
At every turn the seeded rng choose a queue whose first message arrives, or a worker that goes on; some
workers are slower than others. A worker that dies loses what had not left it: of each of its queues any end.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from partc.runtime.asynchronous.collect import merge_variables
from partc.runtime.asynchronous.servers.coordinator import Coordinator, SavePolicy
from partc.runtime.asynchronous.servers.server import Server, SharedValues, Staleness, Surroundings
from partc.runtime.asynchronous.sessions.messages import Lost, SessionMessage, decode_message, encode_message
from partc.runtime.asynchronous.sessions.session import (
    Post,
    own_ranks,
    plan_of_data,
    rank_of_data,
    server_name,
    servers_of,
    session_name,
    worker_of,
)
from partc.runtime.asynchronous.sessions.worker_variables import mean_over_workers
from partc.runtime.asynchronous.worker import Worker
from partc.runtime.data.batches import check_total_batch, share_of
from partc.runtime.data.initial import InitialValues
from partc.runtime.data.step_draws import draw_share
from partc.runtime.execution.device import Sessions as LoadedSegments
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Rank

Array = np.ndarray[Any, np.dtype[Any]]
Batch = Mapping[str, Array]

_PACES = (1, 4, 16)
_IDLE_AT_MOST = 1000  # turns in which only waiting workers were asked


@dataclass(frozen=True, slots=True)
class SavedVariables:
    """A checkpoint: the variables, and how many steps of each worker are in them."""

    steps: tuple[int, ...]
    variables: dict[str, Array]


@dataclass(frozen=True, slots=True)
class SessionsResult:
    """What all sessions left behind.

    `losses`: session -> its loss by step, for as long as it lived. `steps`: worker -> its last step that was
    committed.
    """

    variables: dict[str, Array]
    losses: dict[int, list[float | None]]
    staleness: dict[int, Staleness]  # by server rank
    turns: int
    steps: tuple[int, ...]
    saved: tuple[SavedVariables, ...]


def train_sessions_in_process(
    folder: PlanFolder,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    staleness: int | None = None,
    initial: Mapping[str, Array] | None = None,
    dies: Mapping[int, int] | None = None,
    comes_back: Mapping[int, int] | None = None,
    save_every: int | None = None,
    steps: Sequence[int] | None = None,
) -> SessionsResult:
    """Train one step per total batch with every worker.

    `dies`, `comes_back`: session -> the turn at which it dies, after how many further turns its worker
    begins the next one. `save_every`: so many steps of all workers. `steps`: worker -> how many it has
    trained before.
    """
    play = _Play(folder, batches, staleness, initial, save_every, steps)
    turns = play.run(random.Random(seed), dict(dies or {}), dict(comes_back or {}))
    servers = play.servers.values()
    return SessionsResult(
        play.variables(),
        play.losses,
        {server.rank.rank: server.staleness for server in servers},
        turns,
        tuple(play.chief.steps),
        tuple(play.saved),
    )


def _pace_of(choice: tuple[str, str] | int, pace: Mapping[str, int]) -> int:
    """Return how likely a turn is: some workers, and messages to them, are slow."""
    return pace.get(choice[1], 1) if isinstance(choice, tuple) else pace.get(f"session {choice}", 1)


class _Network:
    """Queues of encoded messages between peers."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], deque[list[bytes]]] = {}

    def post_from(self, source: str) -> Post:
        """Return how a peer sends."""

        def post(target: str, message: SessionMessage, arrays: Sequence[Array]) -> None:
            frames = [encode_message(message), *(array.tobytes() for array in arrays)]
            self.queues.setdefault((source, target), deque()).append(frames)

        return post

    def cut(self, source: str, rng: random.Random) -> None:
        """Lose an end of each queue that begins at a peer."""
        for (sender, _), queue in sorted(self.queues.items()):
            if sender == source:
                for _ in range(rng.randint(0, len(queue))):
                    queue.pop()


class _Play:
    """Servers, workers, and what passes between them."""

    def __init__(
        self,
        folder: PlanFolder,
        batches: Sequence[Batch],
        staleness: int | None,
        initial: Mapping[str, Array] | None,
        save_every: int | None,
        steps: Sequence[int] | None,
    ) -> None:
        self._plan = folder.plan
        self._count = len(folder.plan.asynchronous)
        self._batches = batches
        self._network = _Network()
        self._loaded = LoadedSegments(folder)
        self._initial = InitialValues(folder, initial)
        self._staleness = staleness
        self._save_every = save_every
        for batch in batches:
            check_total_batch(plan_of_data(folder.plan), batch)
        first = list(steps or [0] * self._count)
        self.saved: list[SavedVariables] = []
        self._copies: dict[int, dict[str, Array]] = {}  # server -> what it copied for a checkpoint
        self._kept: dict[str, Array] = {}  # what the chief copied of workers then
        self.servers: dict[str, Server] = {}
        for rank in servers_of(folder.plan):
            name = server_name(rank.rank)
            around = Surroundings(
                partial(self._share, rank),
                self._network.post_from(name),
                save=partial(self._save, name),
                saves=SavePolicy(self._is_due),
            )
            self.servers[name] = Server(
                folder.plan, rank, self._loaded, SharedValues(self._initial), first, staleness, around
            )
        self.losses: dict[int, list[float | None]] = {}
        self._workers: dict[str, Worker] = {}

    @property
    def chief(self) -> Coordinator:
        """The first server's decisions."""
        (chief,) = filter(None, (server.coordinator for server in self.servers.values()))
        return chief

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        of_servers = {server.rank.rank: server.variables() for server in self.servers.values()}
        return merge_variables(self._plan, of_servers, self._kept_now())

    def run(self, rng: random.Random, dies: dict[int, int], comes_back: dict[int, int]) -> int:
        """Take turns until all who live have trained all steps; return how many turns."""
        training = {session: self._start(session) for session in range(self._count)}
        pace = {f"session {session}": rng.choice(_PACES) for session in training}
        pace |= {session_name(session, self._count): pace[f"session {session}"] for session in training}
        returns: dict[int, int] = {}  # session -> turn
        turn = idle = 0
        while training or returns or any(self._network.queues.values()):
            turn += 1
            for session in [s for s, last in dies.items() if last <= turn and s in training]:
                del dies[session], training[session]
                self._end(session, rng)
                if session in comes_back:
                    returns[session + self._count] = turn + comes_back[session]
            for session in [s for s, at in returns.items() if at <= turn]:
                del returns[session]
                training[session] = self._start(session)
            ready = [queue for queue, waiting in sorted(self._network.queues.items()) if waiting]
            idle = 0 if ready or returns else idle + 1
            assert idle < _IDLE_AT_MOST, f"deadlock: {sorted(training)} wait, and nothing is on its way"
            choices: list[tuple[str, str] | int] = [*ready, *training]
            if not choices:
                continue
            (choice,) = rng.choices(choices, [_pace_of(choice, pace) for choice in choices])
            if isinstance(choice, tuple):
                self._arrive(*choice)
            elif next(training[choice], None) is None:
                del training[choice]
        return turn

    def _start(self, session: int) -> Iterator[str]:
        name = session_name(session, self._count)
        self._workers[name] = Worker(
            self._plan, session, self._loaded, self._initial, self._staleness, self._network.post_from(name)
        )
        self.losses[session] = []
        return self._train(session, self._workers[name])

    def _train(self, session: int, worker: Worker) -> Iterator[str]:
        yield from worker.join()
        for step in range(worker.trained + 1, len(self._batches) + 1):
            yield from worker.may_begin(step)
            feeds = {rank.rank: self._share(rank, session, step) for rank in own_ranks(self._plan)}
            yield from worker.step(step, feeds)
            self.losses[session].append(worker.loss())
        yield from worker.applied(len(self._batches))

    def _share(self, rank: Rank, session: int, step: int) -> dict[str, Array]:
        plan, session_rank = plan_of_data(self._plan), rank_of_data(rank, worker_of(session, self._count))
        share = share_of(plan, session_rank, self._batches[step - 1])
        return share | draw_share(plan, session_rank, share, step - 1, 0)

    def _arrive(self, source: str, target: str) -> None:
        header, *frames = self._network.queues[source, target].popleft()
        peer = self.servers.get(target) or self._workers.get(target)
        if peer is None:
            return
        peer.receive(decode_message(header), [memoryview(frame) for frame in frames])
        if isinstance(peer, Server):
            peer.advance()

    def _end(self, session: int, rng: random.Random) -> None:
        """Let a session's worker die, and the launcher tell the chief."""
        name = session_name(session, self._count)
        self._network.cut(name, rng)
        del self._workers[name]
        self._network.post_from("launcher")(next(iter(self.servers)), Lost(session), ())

    def _is_due(self, step: int) -> bool:
        last = sum(self.saved[-1].steps) // self._count if self.saved else 0
        return self._save_every is not None and step - last >= self._save_every

    def _save(self, name: str, steps: tuple[int, ...]) -> None:
        server = self.servers[name]
        self._copies[server.rank.rank] = {n: value.copy() for n, value in server.variables().items()}
        if server.coordinator is not None:
            self._kept = self._kept_now()
        if len(self._copies) == len(self.servers):
            self.saved.append(SavedVariables(steps, merge_variables(self._plan, self._copies, self._kept)))
            self._copies = {}
        server.written("")

    def _kept_now(self) -> dict[str, Array]:
        return mean_over_workers(
            [self.chief.local_values[worker] for worker in sorted(self.chief.local_values)]
        )
