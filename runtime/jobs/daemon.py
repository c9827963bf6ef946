"""The executor daemon: one process per rank, started by MPI.

    python -m partc.runtime.jobs.daemon JOB_FOLDER

It loads its part of the plan, owns its variables, steps, reports, and writes what it owns.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from partc.runtime.checkpoints.manifest import TrainingPosition
from partc.runtime.checkpoints.not_saved import Unsaved
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.data.batches import samples_fed, samples_of_step
from partc.runtime.data.checkpoint import map_arrays
from partc.runtime.data.feeds import Shares, is_stream, open_source, shards_of
from partc.runtime.data.initial import FirstValues, InitialValues
from partc.runtime.data.not_finite import with_cause
from partc.runtime.data.prefetch import Prefetched
from partc.runtime.data.step_draws import draw_share
from partc.runtime.errors import BadPlan
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor, diverged, is_finite, loss_of, spoils_loss
from partc.runtime.execution.recorder import RankTimes, Recorder
from partc.runtime.execution.variable_watch import VariableWatch
from partc.runtime.jobs.barriers import NOTHING, Barriers
from partc.runtime.jobs.clock_offset import offset_to_first
from partc.runtime.jobs.daemon_variables import VariablesOfRank, complete
from partc.runtime.jobs.job import (
    INITIAL_FILE,
    RankReport,
    Reporter,
    WaitReporter,
    notify,
    outputs_file,
    read_job,
    times_file,
    variables_file,
    write_record,
)
from partc.runtime.jobs.metrics import MetricsLog
from partc.runtime.jobs.saving import Saving
from partc.runtime.jobs.step_outputs import OutputLog
from partc.runtime.log import configure_log
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.plan_folder import PlanFolder, open_plan_folder
from partc.runtime.plan.program import Output, Plan, Rank, instructions_of, place_of
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.pulse import Pulse, failure_of
from partc.runtime.supervision.track import Track
from partc.runtime.transports.mpi import MPITransport
from partc.runtime.transports.nccl import transport_among
from partc.runtime.transports.patience import Patience, spin_s_for

Array = np.ndarray[Any, np.dtype[Any]]

# The first rank that raises ends the job and is named: the one that spoilt the loss must come first.
_LEAVE_TO_SPEAK_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run this process's rank of a job."""
    return play(Daemon, argv)


def play(kind: "type[Daemon]", argv: Sequence[str] | None = None) -> int:
    """Be a daemon of that kind. A failure ends the whole job."""
    (folder_name,) = sys.argv[1:] if argv is None else argv
    world = MPI.COMM_WORLD
    pulse = Pulse.of_process()
    daemon: Daemon | None = None
    try:
        configure_log()
        daemon = kind(Path(folder_name), world)
        pulse.follow(daemon.position)
        daemon.train()
        pulse.end()
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        at = daemon.describe() if daemon else f"rank {world.rank}, while loading"
        pulse.fail(failure_of(error, at))
        world.Abort(1)
    return 0


class Daemon:
    """One rank of a job."""

    def __init__(self, folder: Path, world: MPI.Intracomm) -> None:
        self._folder = folder
        self._world = world
        self._job = read_job(folder)
        plan_folder = open_plan_folder(self._job.plan_folder)  # begin_rank.py has checked its files
        self._plan = msgspec.structs.replace(plan_folder.plan, sizes=plan_folder.plan.sizes | self._job.sizes)
        self._rank = _rank_of(self._plan, world)
        self._leads_replica = self._rank in leaders_of(self._plan)
        source = self._open_source()
        self._source = Prefetched(source, self._job.first_batch - self._job.data_from + self._job.steps - 1)
        self._transport = MPITransport(self._plan, world)
        self._track = Track()
        self._between = self._track.place("between steps")
        traced = self._job.traced_steps
        traffic, first_step = self._transport.traffic, self._job.first_step
        self._recorder = Recorder(traced, traffic, first_step, self._waited_s) if traced else None
        self._executor = self._make_executor(plan_folder)
        self._variables = VariablesOfRank(self._plan, self._rank, self._executor.environment, world)
        self._watch = VariableWatch(self._plan, self._rank, self._executor.environment)
        self._barriers = Barriers(world, complete, works=bool(instructions_of(self._plan, self._rank)))
        self._saving = self._make_saving()
        self._unsaved: Unsaved | None = None
        self._neighbours = _ranks_on_machine(world)
        self._patience = Patience(spin_s_for(self._threads_on_machine()), self._job.deadline_s)
        self._feeds: dict[str, Array] = {}  # of the step
        self._samples: int | None = 0  # that all replicas were fed; None: this rank's share does not tell
        self._reporter = Reporter(self._job, self._job.first_step)
        self._wait_reporter = WaitReporter(self._job, f"rank {world.rank}")
        self.step = 0

    def train(self) -> None:
        """Train all steps, or until asked to stop; then write what this rank owns."""
        self._barriers.listen()
        self._variables.barrier()
        self._reporter.begin()
        with ExitStack() as at_the_end, closing(self._source):
            keep = self._open_logs(at_the_end)
            for step in range(1, self._job.steps + 1):
                self.step = step
                self._train_step()
                keep()
                self._wait_reporter.report(self._patience.waited_s)
                if step in self._job.read_after:
                    self._variables.write(variables_file(self._folder, step))
                if self._save_or_stop():
                    break
        trained_s = self._reporter.trained_s()
        if self._saving is not None:
            self._track.enter(self._track.place("saving a checkpoint"))
            self._unsaved = self._saving.finish()
        self._track.enter(self._track.place("writing what it has trained"))
        if self.step not in self._job.read_after:
            self._variables.write(variables_file(self._folder, self.step))
        if self._recorder is not None:
            self._write_times(self._recorder)
        self._write_report(trained_s)
        self._variables.barrier()

    def describe(self) -> str:
        """Say where this rank is, for messages."""
        at = self.position().at
        place = place_of(self._rank.host, self._rank.device)
        return f"rank {self._rank.rank} ({place}), step {self._step_of_training}, {at}"

    def position(self) -> Position:
        """Return where this rank is: asked by another thread."""
        return self._track.position(self._rank.device)

    def _open_source(self) -> Shares:
        first = self._job.first_batch - self._job.data_from
        job = self._job
        return open_source(job.data, self._plan, job.seed, job.is_shuffled, first, job.steps_ahead)

    def _train_step(self) -> None:
        self._track.begin(self._step_of_training, self._track.place("reading data"))
        self._feeds = self._source.share(self._rank, self._batch)
        self._count_samples()
        step = self._step_of_training - 1
        drawn = draw_share(self._plan, self._rank, self._feeds, step, self._job.seed)
        self._patience.through(self._executor.step({**self._feeds, **drawn}), self._rank.rank)
        self._track.enter(self._between)
        if self._job.stop_when_diverged:
            self._check_loss()
            self._watch.check(self._step_of_training, is_last=self.step == self._job.steps)

    def _count_samples(self) -> None:
        fed = samples_fed(self._plan, self._rank, self._feeds)
        if fed is None and not is_stream(self._job.data):
            fed = samples_of_step(self._plan)
        self._samples = None if self._samples is None or fed is None else self._samples + fed

    @property
    def _step_of_training(self) -> int:
        """The step under way, those counted that were trained before this job."""
        return self._job.first_step + self.step

    @property
    def _batch(self) -> int:
        return self.step - 1 + self._job.first_batch - self._job.data_from

    def _save_or_stop(self) -> bool:
        """Save after a step if it is time, and tell whether it is the last."""
        saving = self._saving
        if saving is not None:
            saving.look()
        is_due = saving is not None and saving.is_due_by_time()
        agreed = self._barriers.after(self.step, is_due, self._patience.waited_s)
        if agreed is not NOTHING:
            self._reporter.straggler = agreed.straggler
        step = self._step_of_training
        is_last = agreed.stops or self.step == self._job.steps
        if saving is not None and (agreed.saves or agreed.stops or saving.is_due_after(step, is_last)):
            self._track.enter(self._track.place("saving a checkpoint"))
            saving.begin(self._training_position())
            self._track.enter(self._between)
        return agreed.stops

    def _training_position(self) -> TrainingPosition:
        before = self._job.first_samples
        return TrainingPosition(
            step=self._step_of_training,
            seed=self._job.seed,
            batches=self._job.first_batch + self.step,
            samples=None if before is None or self._samples is None else before + self._samples,
            data=self._job.data_name,
            is_shuffled=self._job.is_shuffled,
            file_samples=self._job.file_samples,
            training=self._job.training,
            shards=self._job.shards or shards_of(self._job.data, self._plan.replicas),
        )

    def _open_logs(self, at_the_end: ExitStack) -> Callable[[], None]:
        """Open what takes each step's outputs, and return what writes them."""
        if not self._leads_replica:
            return lambda: None
        path = self._job.metrics_file if self._rank.replica == 0 else ""
        metrics = MetricsLog(Path(path), self._job.first_step, self._job.training, notify) if path else None
        if metrics is not None:
            at_the_end.enter_context(closing(metrics))
        log = at_the_end.enter_context(OutputLog(outputs_file(self._folder, self._rank.rank)))
        names = {output.name: output.value for output in self._plan.outputs if self._is_kept(output)}
        environment = self._executor.environment

        def keep() -> None:
            if names:
                log.append({name: environment.array(value) for name, value in names.items()})
            if self._rank.replica == 0:
                loss = loss_of(self._plan, environment)
                self._reporter.report(self.step, loss, self._source.waited_s, self._samples)
                if metrics is not None:
                    metrics.append(self._step_of_training, loss)

        return keep

    def _is_kept(self, output: Output) -> bool:
        selection = self._job.outputs
        return selection == "all" or (selection == "loss" and output.name == self._plan.loss)

    def _waited_s(self) -> float:
        """Return how long this rank waited for data and checkpoints so far."""
        return self._source.waited_s + (0.0 if self._saving is None else self._saving.waited_s)

    def _make_saving(self) -> Saving | None:
        if self._job.checkpoints is None:
            return None
        read = self._executor.environment.array
        return Saving(self._job.checkpoints, self._plan, read, self._world, complete, self._folder)

    def _check_loss(self) -> None:
        if is_finite(self._plan, self._rank, self._executor):
            return
        if not spoils_loss(self._executor):
            time.sleep(_LEAVE_TO_SPEAK_S)
        error = diverged(self._plan, self._rank, self._executor, self._step_of_training)
        raise with_cause(error, self._plan, self._feeds, partial(self._source.place, self._rank, self._batch))

    def _make_executor(self, folder: PlanFolder) -> Executor:
        environment = Environment(self._plan, self._rank, device_of(self._rank), self._first_values(folder))
        observe = self._recorder.watch if self._recorder is not None else iter
        enter = self._track.through(instructions_of(self._plan, self._rank))
        transport = transport_among(self._plan, environment.device, self._world, self._transport)
        return Executor(self._plan, self._rank, environment, Sessions(folder), transport, observe, enter)

    def _first_values(self, folder: PlanFolder) -> FirstValues:
        if self._job.resumed_from:
            return StoredValues(Path(self._job.resumed_from))
        initial = map_arrays(self._folder / INITIAL_FILE) if self._job.has_initial else None
        return InitialValues(folder, initial)

    def _write_times(self, recorder: Recorder) -> None:
        offset_s, uncertainty_s = offset_to_first(self._world, self._neighbours, self._variables.barrier)
        threads, cores = self._threads_on_machine(), len(os.sched_getaffinity(0))
        times = RankTimes(offset_s, uncertainty_s, recorder.steps(), threads, cores)
        write_record(times_file(self._folder, self._rank.rank), times)

    def _threads_on_machine(self) -> int:
        return len(self._neighbours) * self._rank.threads

    def _write_report(self, trained_s: float) -> None:
        traffic = self._transport.traffic
        report = RankReport(
            payload_bytes=dict(traffic.payload_bytes),
            ids_bytes=dict(traffic.ids_bytes),
            counts_bytes=dict(traffic.counts_bytes),
            exchanged=traffic.exchanged,
            trained_s=trained_s,
            samples=self._samples,
            disagreeing=self._variables.disagreeing(),
            last_step=self.step,
            waiting_s=self._patience.waited_s,
            data_s=self._source.waited_s,
            saving_s=self._saving.waited_s if self._saving is not None else 0.0,
            unsaved=self._unsaved,
        )
        write_record(self._folder / f"rank-{self._rank.rank}.json", report)


def _rank_of(plan: Plan, world: MPI.Intracomm) -> Rank:
    if world.size != len(plan.ranks):
        raise BadPlan(
            f"{world.size} processes were started, the plan has {len(plan.ranks)} ranks",
            at="mpiexec",
            fix="start it with `partc run`, and let mpiexec and mpi4py come from the same MPI",
        )
    return next(rank for rank in plan.ranks if rank.rank == world.rank)


def _ranks_on_machine(world: MPI.Intracomm) -> list[int]:
    # Several hosts of a plan may be one machine: ask MPI.
    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = neighbours.group.Translate_ranks(None, world.group)
    neighbours.Free()
    return list(ranks)


if __name__ == "__main__":
    sys.exit(main())
