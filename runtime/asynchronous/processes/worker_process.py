"""The process of one worker, in one of its lives."""

import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.asynchronous.processes.job import (
    WorkerReport,
    pieces_file,
    read_session_job,
    report_file,
    session_outputs_file,
)
from partc.runtime.asynchronous.processes.session_process import POLL_S, SessionProcess
from partc.runtime.asynchronous.sessions.session import describe_worker, own_ranks, rank_of_data, session_name
from partc.runtime.asynchronous.worker import Worker
from partc.runtime.data.batches import inputs_of, samples_fed
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.data.not_finite import with_cause
from partc.runtime.data.prefetch import Prefetched
from partc.runtime.data.step_draws import draw_share
from partc.runtime.errors import Diverged, RankFailed
from partc.runtime.execution.device import Sessions
from partc.runtime.jobs.job import Reporter, WaitReporter, notify, write_record
from partc.runtime.jobs.metrics import MetricsLog
from partc.runtime.jobs.step_outputs import OutputLog
from partc.runtime.plan.program import Rank
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.stop_signals import STOPPING
from partc.runtime.supervision.track import Track

Array = np.ndarray[Any, np.dtype[Any]]


class WorkerProcess(SessionProcess):
    """One worker, from the start of its process to the end: a session."""

    def __init__(self, folder: Path, session: int) -> None:
        super().__init__(folder, session_name(session, len(read_session_job(folder).steps)))
        loaded, first_values = Sessions(self.plan_folder), self.first_values()
        staleness, post = self.sessions.staleness, self.mesh.post
        self._track = Track()
        note = self._track.through
        self._worker = Worker(self.plan, session, loaded, first_values, staleness, post, note)
        self._last = self.job.first_step + self.job.steps
        self._sources = {
            rank.rank: Prefetched(self.open_source(), self.batch_of(self._last))
            for rank in own_ranks(self.plan)
            if inputs_of(self.plan, rank)
        }
        self._awaited = ""
        self._waited_s = 0.0
        self._samples: int | None = 0  # of all workers, by this one's pace
        self._is_asked_to_stop = False
        self.step = 0

    def describe(self) -> str:
        """Say where this process is, for messages."""
        return f"{describe_worker(self.plan, self._worker.number)}, step {self.step}"

    def position(self) -> Position:
        """Return where this worker is: asked by another thread."""
        return self._track.position(self.plan.asynchronous[self._worker.number].device)

    def run(self) -> None:
        """Train all steps, or until asked to stop; see that the servers have applied them, and report."""
        for number in STOPPING:
            signal.signal(number, self._hear)
        self._listen_through(self._worker.join())
        trained = self.step = self._worker.trained
        between = self._track.place("between steps")
        self._track.begin(trained, between)
        reporter = Reporter(self.job, trained)
        reporter.begin()
        waits = WaitReporter(self.job, self.name)
        with ExitStack() as at_the_end:
            log = at_the_end.enter_context(OutputLog(session_outputs_file(self.folder, self.name)))
            metrics = self._open_metrics(at_the_end)
            while self.step < self._last and self._may_begin():
                self._train_step(log)
                self._track.enter(between)
                loss = self._worker.loss()
                reporter.report(self.step - trained, loss, self._data_s, self._samples)
                waits.report(self._waited_s)
                if metrics is not None:
                    metrics.append(self.step, loss)
        self._listen_through(self._worker.applied(self.step))
        report = WorkerReport(
            self._worker.payload_bytes(),
            self.step - trained,
            reporter.trained_s(),
            self._data_s,
        )
        write_record(report_file(self.folder, self.name), report)

    @property
    def _data_s(self) -> float:
        """For how long this worker has waited for data."""
        return max((source.waited_s for source in self._sources.values()), default=0.0)

    def close(self) -> None:
        """Close the sockets, and end what reads ahead."""
        super().close()
        for source in self._sources.values():
            source.close()

    def _may_begin(self) -> bool:
        """Wait until the next step may begin; tell whether it is to."""
        for _ in self._listening(self._worker.may_begin(self.step + 1)):
            if self._is_asked_to_stop:
                return False
        return not self._is_asked_to_stop

    def _train_step(self, log: OutputLog) -> None:
        self.step += 1
        self._track.begin(self.step, self._track.place("reading data"))
        feeds = self._feeds()
        self._count_samples(feeds)
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

    def _open_metrics(self, at_the_end: ExitStack) -> MetricsLog | None:
        """Open the file of every step's metrics, which are the first worker's."""
        if self._worker.number != 0 or not self.job.metrics_file:
            return None
        path, job = Path(self.job.metrics_file), self.job
        return at_the_end.enter_context(closing(MetricsLog(path, self._worker.trained, job.training, notify)))

    def _feeds(self) -> dict[int, Mapping[str, Array]]:
        return {rank.rank: self._feeds_of(self._seen(rank)) for rank in own_ranks(self.plan)}

    def _feeds_of(self, rank: Rank) -> Mapping[str, Array]:
        if rank.rank in self._sources:
            return self.share_and_draws(self._sources[rank.rank], rank, self.step)
        return draw_share(self.plan_of_data, rank, {}, self.step - 1, self.job.seed)

    def _count_samples(self, feeds: Mapping[int, Mapping[str, Array]]) -> None:
        shares = [(self._seen(rank), feeds[rank.rank]) for rank in own_ranks(self.plan)]
        of_ranks = [samples_fed(self.plan_of_data, rank, share) for rank, share in shares]
        samples = next((samples for samples in of_ranks if samples is not None), None)
        self._samples = None if self._samples is None or samples is None else self._samples + samples

    def _seen(self, rank: Rank) -> Rank:
        return rank_of_data(rank, self._worker.number)

    def _listen_through(self, waits: Iterable[str]) -> None:
        """Hear messages as long as something is waited for."""
        for _ in self._listening(waits):
            pass

    def _listening(self, waits: Iterable[str]) -> Iterable[None]:
        """Hear messages while something is waited for, but not for ever for the same; yield each time."""
        self._awaited, since_s = "", time.monotonic()
        for waiting in waits:
            if waiting != self._awaited:
                self._awaited, since_s = waiting, time.monotonic()
                self._track.enter(self._track.place(waiting, awaits=True))
            begun_s = time.monotonic()
            for message, frames in self.mesh.receive(POLL_S):
                self._worker.receive(message, frames)
            self._waited_s += time.monotonic() - begun_s
            if time.monotonic() - since_s > self.job.deadline_s:
                raise RankFailed(
                    f"nothing came for {self.job.deadline_s:.0f} s",
                    at=f"{self.describe()}, waiting for {self._awaited}",
                    fix="look for a process that hangs; raise the timeout if steps are this long",
                )
            yield None
        self._awaited = ""

    def _hear(self, number: int, frame: object) -> None:
        self._is_asked_to_stop = True  # by a batch system, and by the keeper then

    def _diverged(self, loss: float, feeds: Mapping[int, Mapping[str, Array]]) -> Diverged:
        error = Diverged(
            f"the loss is {loss} in step {self.step}",
            at=describe_worker(self.plan, self._worker.number),
            fix="lower the learning rate or check the data; `--on-nan continue` goes on regardless",
        )
        for rank in own_ranks(self.plan):
            if rank.rank in self._sources:
                place = partial(self._sources[rank.rank].place, self._seen(rank), self.batch_of(self.step))
                caused = with_cause(error, self.plan, feeds[rank.rank], place)
                if caused is not error:
                    return caused
        return error
