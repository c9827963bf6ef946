"""A process of asynchronous training: a server or a worker, its sockets and its clock.

    python -m partc.runtime.asynchronous.process JOB_FOLDER server RANK | worker NUMBER

When it dies, only the launcher notices; when the launcher dies, it ends.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.asynchronous.job import (
    ServerReport,
    WorkerReport,
    pieces_file,
    read_session_job,
    report_file,
    session_outputs_file,
)
from partc.runtime.asynchronous.mesh import Mesh
from partc.runtime.asynchronous.server import Server, SharedValues
from partc.runtime.asynchronous.session import (
    describe_worker,
    own_ranks,
    plan_of_data,
    rank_of_data,
    server_name,
    servers_of,
    with_workers,
    worker_name,
)
from partc.runtime.asynchronous.worker import Worker
from partc.runtime.data.batches import inputs_of
from partc.runtime.data.checkpoint import map_arrays, write_arrays
from partc.runtime.data.feeds import Source, open_source
from partc.runtime.data.initial import InitialValues
from partc.runtime.data.not_finite import with_cause
from partc.runtime.data.step_draws import draw_share, draws_of
from partc.runtime.errors import Diverged, RankFailed
from partc.runtime.execution.device import Sessions
from partc.runtime.jobs.job import INITIAL_FILE, Reporter, read_job, write_record
from partc.runtime.jobs.step_outputs import OutputLog
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Rank
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.pulse import Pulse, failure_of

Array = np.ndarray[Any, np.dtype[Any]]

_POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Play one server or worker of a job."""
    folder_name, part, number = sys.argv[1:] if argv is None else argv
    folder = Path(folder_name)
    name = server_name(int(number)) if part == "server" else worker_name(int(number))
    process: ServerProcess | WorkerProcess | None = None
    pulse = Pulse.of_process()
    try:
        process = (
            ServerProcess(folder, int(number)) if part == "server" else WorkerProcess(folder, int(number))
        )
        pulse.follow(process.position)
        process.run()
        pulse.end()
    except BaseException as error:  # whatever it is, the launcher must learn of it
        pulse.fail(failure_of(error, process.describe() if process else f"{name}, while loading"))
        return 1
    finally:
        if process is not None:
            process.mesh.close()
    return 0


class _Process:
    """What both kinds have: the job, the plan, sockets, and a launcher to outlive by no means."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder
        self.job = read_job(folder)
        self.sessions = read_session_job(folder)
        folder_read = read_plan_folder(self.job.plan_folder, is_checked=True)
        self.plan = with_workers(folder_read.plan, self.sessions.workers)
        self.plan_folder = PlanFolder(self.plan, folder_read.path)
        self.given = map_arrays(folder / INITIAL_FILE) if self.job.has_initial else None
        self.mesh = Mesh(name, self.sessions, folder, self.job.deadline_s)

    def open_source(self) -> Source:
        """Open the data, as all workers together see it."""
        return open_source(
            self.job.data, plan_of_data(self.plan, self.job.sizes), self.job.seed, self.job.is_shuffled
        )

    def share_and_draws(self, source: Source, rank: Rank, step: int) -> dict[str, Array]:
        """Return what a rank is fed in a step (from 1), and what it draws."""
        plan = plan_of_data(self.plan, self.job.sizes)
        share = source.share(rank, step - 1)
        return share | draw_share(plan, rank, share, step - 1, self.job.seed)


class ServerProcess(_Process):
    """One server."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, server_name(rank))
        self._rank = next(server for server in servers_of(self.plan) if server.rank == rank)
        self._sources: dict[int, Source] = {}
        self._is_waiting = True
        self._server = Server(
            self.plan,
            self._rank,
            Sessions(self.plan_folder),
            SharedValues(self.plan_folder, self.given),
            self._feeds,
            self.sessions.staleness,
            self.mesh.post,
            self._keep,
        )

    def describe(self) -> str:
        """Say where this process is, for messages."""
        return f"{self.name} ({self._rank.host})"

    def position(self) -> Position:
        """Return how far this server is, in steps of all workers: asked by another thread."""
        is_waiting = self._is_waiting
        return Position(self._server.staleness.pushes, "waiting" if is_waiting else "serving", is_waiting)

    def run(self) -> None:
        """Serve until the launcher says that no worker is left, then write what this server owns."""
        while not self._server.is_finished:
            self._is_waiting = True
            for message, frames in self.mesh.receive(_POLL_S):
                self._is_waiting = False
                self._server.receive(message, frames)
                self._server.advance()
        write_arrays(pieces_file(self.folder, self.name), self._server.variables())
        seen = self._server.staleness
        report = ServerReport(self._server.payload_bytes(), seen.pushes, dict(seen.missed), seen.widest_lag)
        write_record(report_file(self.folder, self.name), report)

    def _keep(self, step: int) -> None:
        if step in self.job.read_after:
            write_arrays(pieces_file(self.folder, self.name, step), self._server.variables())

    def _feeds(self, session: int, step: int) -> Mapping[str, Array]:
        if not (inputs_of(self.plan, self._rank) or draws_of(self.plan, self._rank)):
            return {}
        if session not in self._sources:  # one each: a function gives its batches in order, and once
            self._sources[session] = self.open_source()
        return self.share_and_draws(self._sources[session], self._rank, step)


class WorkerProcess(_Process):
    """One worker."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder, worker_name(number))
        initial = InitialValues(self.plan_folder, self.given)
        loaded = Sessions(self.plan_folder)
        staleness, post = self.sessions.staleness, self.mesh.post
        self._worker = Worker(self.plan, number, loaded, initial, staleness, post)
        self._source = self.open_source()
        self._reporter = Reporter(self.job)
        self._awaited = ""
        self.step = 0

    def describe(self) -> str:
        """Say where this process is, for messages."""
        return f"{describe_worker(self.plan, self._worker.number)}, step {self.step}"

    def position(self) -> Position:
        """Return where this worker is: asked by another thread."""
        awaited = self._awaited
        device = self.plan.asynchronous[self._worker.number].device
        return Position(self.step, awaited or "computing", bool(awaited), device)

    def run(self) -> None:
        """Train all steps, see that the servers have applied them, then write what this worker holds."""
        self._reporter.begin()
        with OutputLog(session_outputs_file(self.folder, self.name)) as log:
            while self.step < self.job.steps:
                self._train_step(log)
        self._listen_through(self._worker.applied(self.job.steps))
        write_arrays(pieces_file(self.folder, self.name), self._worker.variables())
        report = WorkerReport(self._worker.payload_bytes(), self._reporter.steps_per_s(self.job.steps))
        write_record(report_file(self.folder, self.name), report)

    def _train_step(self, log: OutputLog) -> None:
        self.step += 1
        feeds = self._feeds()
        self._listen_through(self._worker.step(self.step, feeds))
        log.append(
            {
                name: value
                for name, value in self._worker.outputs().items()
                if self.job.outputs == "all" or (self.job.outputs == "loss" and name == self.plan.loss)
            }
        )
        if self.step in self.job.read_after:
            write_arrays(pieces_file(self.folder, self.name, self.step), self._worker.variables())
        loss = self._worker.loss()
        if self.job.stop_when_diverged and loss is not None and not np.isfinite(loss):
            raise self._diverged(loss, feeds)
        self._reporter.report(self.step, loss)

    def _feeds(self) -> dict[int, Mapping[str, Array]]:
        return {
            rank.rank: self.share_and_draws(self._source, self._seen(rank), self.step)
            for rank in own_ranks(self.plan)
        }

    def _seen(self, rank: Rank) -> Rank:
        return rank_of_data(rank, self._worker.number)

    def _listen_through(self, waits: Iterable[str]) -> None:
        """Hear messages as long as something is waited for, but not for ever for the same."""
        self._awaited, since_s = "", time.monotonic()
        for waiting in waits:
            if waiting != self._awaited:
                self._awaited, since_s = waiting, time.monotonic()
            for message, frames in self.mesh.receive(_POLL_S):
                self._worker.receive(message, frames)
            if time.monotonic() - since_s > self.job.deadline_s:
                raise RankFailed(
                    f"nothing came for {self.job.deadline_s:.0f} s",
                    at=f"{self.describe()}, waiting for {self._awaited}",
                    fix="look for a process that hangs; raise the timeout if steps are this long",
                )
        self._awaited = ""

    def _diverged(self, loss: float, feeds: Mapping[int, Mapping[str, Array]]) -> Diverged:
        error = Diverged(
            f"the loss is {loss} in step {self.step}",
            at=describe_worker(self.plan, self._worker.number),
            fix="lower the learning rate or check the data; `--on-nan continue` goes on regardless",
        )
        for rank in own_ranks(self.plan):
            place = partial(self._source.place, self._seen(rank), self.step - 1)
            caused = with_cause(error, self.plan, feeds[rank.rank], place)
            if caused is not error:
                return caused
        return error


if __name__ == "__main__":
    sys.exit(main())
