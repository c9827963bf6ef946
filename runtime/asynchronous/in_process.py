"""All sessions in one process, interleaved at random: for tests of what no order may change.

Messages are real ones, bytes in queues that keep their order from one peer to another and no other order.
At every turn the seeded rng choose a queue whose first message arrives, or a worker that goes on; some
workers are slower than others.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from partc.runtime.asynchronous.collect import merge_variables
from partc.runtime.asynchronous.messages import Gone, SessionMessage, decode_message, encode_message
from partc.runtime.asynchronous.server import Server, SharedValues, Staleness
from partc.runtime.asynchronous.session import (
    Post,
    own_ranks,
    plan_of_data,
    rank_of_data,
    server_name,
    servers_of,
    worker_name,
)
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
class SessionsResult:
    """What all sessions left behind. `losses`: worker -> its loss by step, for as long as it lived."""

    variables: dict[str, Array]
    losses: dict[int, list[float | None]]
    staleness: dict[int, Staleness]  # by server rank
    turns: int


def train_sessions_in_process(
    folder: PlanFolder,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    staleness: int | None = None,
    initial: Mapping[str, Array] | None = None,
    dies: Mapping[int, int] | None = None,
) -> SessionsResult:
    """Train one step per total batch with every worker. `dies`: worker -> the turn at which it dies."""
    play = _Play(folder, batches, staleness, initial)
    turns = play.run(random.Random(seed), dict(dies or {}))
    servers = play.servers.values()
    return SessionsResult(
        merge_variables(
            folder.plan,
            {server.rank.rank: server.variables() for server in servers},
            [play.workers[worker].variables() for worker in play.living],
        ),
        play.losses,
        {server.rank.rank: server.staleness for server in servers},
        turns,
    )


def _pace_of(choice: tuple[str, str] | int, pace: Mapping[str, int]) -> int:
    """Return how likely a turn is: some workers, and messages to them, are slow."""
    return pace.get(choice[1], 1) if isinstance(choice, tuple) else pace[worker_name(choice)]


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


class _Play:
    """Servers, workers, and what passes between them."""

    def __init__(
        self,
        folder: PlanFolder,
        batches: Sequence[Batch],
        staleness: int | None,
        initial: Mapping[str, Array] | None,
    ) -> None:
        self._plan = folder.plan
        self._batches = batches
        self._network = _Network()
        loaded = LoadedSegments(folder)
        for batch in batches:
            check_total_batch(plan_of_data(folder.plan), batch)
        self.servers = {
            (name := server_name(rank.rank)): Server(
                folder.plan,
                rank,
                loaded,
                SharedValues(folder, initial),
                partial(self._share, rank),
                staleness,
                self._network.post_from(name),
            )
            for rank in servers_of(folder.plan)
        }
        self.living = list(range(len(folder.plan.asynchronous)))
        self.workers = {
            worker: Worker(
                folder.plan,
                worker,
                loaded,
                InitialValues(folder, initial),
                staleness,
                self._network.post_from(worker_name(worker)),
            )
            for worker in self.living
        }
        self._peers: dict[str, Server | Worker] = {
            **self.servers,
            **{worker_name(number): worker for number, worker in self.workers.items()},
        }
        self.losses: dict[int, list[float | None]] = {worker: [] for worker in self.living}

    def run(self, rng: random.Random, dies: dict[int, int]) -> int:
        """Take turns until all who live have trained all steps; return how many turns."""
        training = {worker: self._train(self.workers[worker]) for worker in self.living}
        pace = {worker_name(worker): rng.choice(_PACES) for worker in training}
        turn = idle = 0
        while training or any(self._network.queues.values()):
            turn += 1
            for worker in [worker for worker, last in dies.items() if last <= turn]:
                del dies[worker]
                training.pop(worker, None)
                self._remove_worker(worker)
            ready = [queue for queue, waiting in sorted(self._network.queues.items()) if waiting]
            idle = 0 if ready else idle + 1
            assert idle < _IDLE_AT_MOST, f"deadlock: {sorted(training)} wait, and nothing is on its way"
            choices: list[tuple[str, str] | int] = [*ready, *training]
            (choice,) = rng.choices(choices, [_pace_of(choice, pace) for choice in choices])
            if isinstance(choice, tuple):
                self._arrive(*choice)
            elif next(training[choice], None) is None:
                del training[choice]
        return turn

    def _train(self, worker: Worker) -> Iterator[str]:
        for step in range(1, len(self._batches) + 1):
            feeds = {rank.rank: self._share(rank, worker.number, step) for rank in own_ranks(self._plan)}
            yield from worker.step(step, feeds)
            self.losses[worker.number].append(worker.loss())
        yield from worker.applied(len(self._batches))

    def _share(self, rank: Rank, worker: int, step: int) -> dict[str, Array]:
        plan, seen = plan_of_data(self._plan), rank_of_data(rank, worker)
        share = share_of(plan, seen, self._batches[step - 1])
        return share | draw_share(plan, seen, share, step - 1, 0)

    def _arrive(self, source: str, target: str) -> None:
        header, *frames = self._network.queues[source, target].popleft()
        peer = self._peers[target]
        peer.receive(decode_message(header), [memoryview(frame) for frame in frames])
        if isinstance(peer, Server):
            peer.advance()

    def _remove_worker(self, worker: int) -> None:
        """Tell the servers, behind what is still on its way from the dead."""
        self.living.remove(worker)
        for server in self.servers:
            queue = self._network.queues.setdefault((worker_name(worker), server), deque())
            queue.append([encode_message(Gone(worker))])
