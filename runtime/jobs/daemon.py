"""The executor daemon: one process per rank, started by MPI.

    python -m partc.runtime.jobs.daemon JOB_FOLDER

It loads its part of the plan, owns its variables, steps, reports, and writes what it owns.
"""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from partc.runtime.data.checkpoint import map_arrays, write_arrays
from partc.runtime.data.feeds import Shares, open_source
from partc.runtime.data.initial import InitialValues
from partc.runtime.data.not_finite import with_cause
from partc.runtime.data.step_draws import draw_share
from partc.runtime.errors import BadPlan
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor, diverged, is_finite, loss_of, spoils_loss
from partc.runtime.execution.recorder import RankTimes, Recorder
from partc.runtime.execution.variable_watch import VariableWatch
from partc.runtime.jobs.clock_offset import offset_to_first
from partc.runtime.jobs.daemon_variables import VariablesOfRank
from partc.runtime.jobs.job import (
    INITIAL_FILE,
    RankReport,
    Reporter,
    failure_of,
    outputs_file,
    read_job,
    times_file,
    variables_file,
    write_process,
    write_record,
)
from partc.runtime.log import configure_log
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Plan, Rank
from partc.runtime.transports.mpi import MPITransport
from partc.runtime.transports.patience import Patience, spin_s_for

Array = np.ndarray[Any, np.dtype[Any]]

# The first rank that raises ends the job and is named: the one that spoilt the loss must come first.
_LEAVE_TO_SPEAK_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run this process's rank of a job."""
    return play(Daemon, argv)


def play(kind: "type[Daemon]", argv: Sequence[str] | None = None) -> int:
    """Be a daemon of that kind. A failure ends the whole MPI job."""
    (folder_name,) = sys.argv[1:] if argv is None else argv
    folder = Path(folder_name)
    world = MPI.COMM_WORLD
    daemon: Daemon | None = None
    write_process(folder, world.rank)
    try:
        configure_log()
        daemon = kind(folder, world)
        daemon.train()
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        at = daemon.describe() if daemon else f"rank {world.rank}, while loading"
        failure = failure_of(error, world.rank, at)
        write_record(folder / f"error.rank-{world.rank}.json", failure)
        print(f"rank {world.rank}: {failure.what}\n  at:  {failure.at}", file=sys.stderr, flush=True)
        world.Abort(1)
    return 0


class Daemon:
    """One rank of a job."""

    def __init__(self, folder: Path, world: MPI.Intracomm) -> None:
        self._folder = folder
        self._world = world
        self._job = read_job(folder)
        plan_folder = read_plan_folder(self._job.plan_folder, is_checked=True)
        self._plan = msgspec.structs.replace(plan_folder.plan, sizes=plan_folder.plan.sizes | self._job.sizes)
        self._rank = _rank_of(self._plan, world)
        self._leads_replica = self._rank in leaders_of(self._plan)
        self._source = self._open_source()
        self._transport = MPITransport(self._plan, world)
        traced = self._job.traced_steps
        self._recorder = Recorder(traced, self._transport.traffic) if traced else None
        self._executor = self._make_executor(plan_folder)
        self._variables = VariablesOfRank(self._plan, self._rank, self._executor.environment, world)
        self._watch = VariableWatch(self._plan, self._rank, self._executor.environment)
        self._patience = Patience(spin_s_for(_threads_on_machine(self._rank, world)), self._job.deadline_s)
        self._outputs: dict[str, Array] = {}
        self._feeds: dict[str, Array] = {}  # of the step
        self._reporter = Reporter(self._job)
        self.step = 0

    def train(self) -> None:
        """Train all steps, then write what this rank owns."""
        self._variables.barrier()
        self._reporter.begin()
        for step in range(1, self._job.steps + 1):
            self.step = step
            self._train_step()
            self._keep_outputs()
            if step in self._job.read_after:
                self._variables.write(variables_file(self._folder, step))
        steps_per_s = self._reporter.steps_per_s(self._job.steps)
        if self._job.steps not in self._job.read_after:
            self._variables.write(variables_file(self._folder, self._job.steps))
        if self._leads_replica:
            write_arrays(outputs_file(self._folder, self._rank.rank), self._outputs)
        if self._recorder is not None:
            self._write_times(self._recorder)
        self._write_report(steps_per_s)
        self._variables.barrier()

    def describe(self) -> str:
        """Say where this rank is, for messages."""
        return f"rank {self._rank.rank} ({self._rank.host}/{self._rank.device}), step {self.step}"

    def _open_source(self) -> Shares:
        return open_source(self._job.data, self._plan, self._job.seed)

    def _train_step(self) -> None:
        self._feeds = self._source.share(self._rank, self._batch)
        step = self.step - 1 + self._job.first_step
        drawn = draw_share(self._plan, self._rank, self._feeds, step, self._job.seed)
        for awaited in self._executor.step({**self._feeds, **drawn}):
            self._patience.wait(awaited, self._rank.rank)
        if self._job.stop_when_diverged:
            self._check_loss()
            self._watch.check(self.step, is_last=self.step == self._job.steps)

    @property
    def _batch(self) -> int:
        return self.step - 1 + self._job.first_batch

    def _keep_outputs(self) -> None:
        if not self._leads_replica:
            return
        environment = self._executor.environment
        for output in self._plan.outputs:
            if self._job.outputs == "all" or output.name == self._plan.loss:
                self._outputs[f"{self.step}/{output.name}"] = environment.array(output.value).copy()
        if self._rank.replica == 0:
            self._reporter.report(self.step, loss_of(self._plan, environment))

    def _check_loss(self) -> None:
        if is_finite(self._plan, self._rank, self._executor):
            return
        if not spoils_loss(self._executor):
            time.sleep(_LEAVE_TO_SPEAK_S)
        error = diverged(self._plan, self._rank, self._executor, self.step)
        raise with_cause(error, self._plan, self._feeds, partial(self._source.place, self._rank, self._batch))

    def _make_executor(self, folder: PlanFolder) -> Executor:
        given = map_arrays(self._folder / INITIAL_FILE) if self._job.has_initial else None
        environment = Environment(self._plan, self._rank, device_of(self._rank), InitialValues(folder, given))
        observe = self._recorder.watch if self._recorder is not None else iter
        return Executor(self._plan, self._rank, environment, Sessions(folder), self._transport, observe)

    def _write_times(self, recorder: Recorder) -> None:
        offset_s, uncertainty_s = offset_to_first(self._world, self._variables.barrier)
        times = RankTimes(offset_s, uncertainty_s, recorder.steps())
        write_record(times_file(self._folder, self._rank.rank), times)

    def _write_report(self, steps_per_s: float) -> None:
        traffic = self._transport.traffic
        report = RankReport(
            payload_bytes=dict(traffic.payload_bytes),
            ids_bytes=dict(traffic.ids_bytes),
            counts_bytes=dict(traffic.counts_bytes),
            exchanged=traffic.exchanged,
            steps_per_s=steps_per_s,
            disagreeing=self._variables.disagreeing(),
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


def _threads_on_machine(rank: Rank, world: MPI.Intracomm) -> int:
    # Several hosts of a plan may be one machine: ask MPI.
    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    threads = neighbours.size * rank.threads
    neighbours.Free()
    return threads


if __name__ == "__main__":
    sys.exit(main())
