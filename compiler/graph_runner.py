"""What get_runner returns: a running job, stepped by the user's script, or an asynchronous one."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from partc.compiler.traces.write_traces import write_run_trace
from partc.passes.replicas.average_replicas import own_output
from partc.runtime.asynchronous.sessions.session import plan_of_data
from partc.runtime.check_arguments import public
from partc.runtime.checkpoints.manifest import newest_checkpoint
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.data.batches import Batch
from partc.runtime.data.sharded import BatchStream, ShardedData
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.execution.recorder import TracedSteps
from partc.runtime.interactive.share_feeds import ReplicaFeeds
from partc.runtime.interactive.stepper import Stepper
from partc.runtime.jobs.job import Checkpoints
from partc.runtime.jobs.job_folder import locked_folder
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder

Array = np.ndarray[Any, np.dtype[Any]]
SAVED_PREFIX = "partc-trained-"
FetchedValues = list[Array] | list[list[Array]]


class Training(Protocol):
    """A job that trains."""

    @property
    def steps(self) -> int:
        """How many steps were trained, with those of the checkpoint that this one goes on from."""

    def run(self, fetches: str | Sequence[str], feeds: ReplicaFeeds | None) -> FetchedValues:
        """Train one step, and return what is fetched."""

    def train(self, steps: int) -> None:
        """Train so many steps on the data that the job was given."""

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""

    def save(self) -> Path:
        """Write the variables to a file that stays, trained.safetensors, and return its path."""

    def close(self) -> None:
        """End the job."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a job trains, beside its plan and data.

    `checkpoints`: where there is one, the training goes on from it. `trace`: the file that shows
    `traced_steps`, of the ranks of `traced_replica` or of all. `redirect`: a folder that takes what ranks
    print. `is_plan_temporary`: the plan's folder goes with this process.
    """

    timeout_s: float = 600.0
    seed: int | None = None
    stop_when_diverged: bool = True
    checkpoints: Checkpoints | None = None
    traced_steps: TracedSteps = 0
    trace: Path | None = None
    traced_replica: int | None = None
    redirect: Path | None = None
    is_plan_temporary: bool = False

    def check(self, replicas: int) -> None:
        """Refuse what cannot be written, before anything runs. Raises BadUsage."""
        if self.traced_replica is not None and not 0 <= self.traced_replica < replicas:
            raise BadUsage(
                f"no worker {self.traced_replica} of {replicas}",
                at="config.profile.profile_worker",
                fix=f"give a number from 0 to {replicas - 1}",
            )
        for folder, name in (
            (None if self.trace is None else self.trace.parent, "profile.profile_dir"),
            (self.redirect, "redirect_path"),
        ):
            try:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fix = "name a folder that can be written"
                raise BadUsage(f"{folder}: {error.strerror}", at=f"config.{name}", fix=fix) from error


class SavedFile:
    """The file that a training saves, at a place where it stays."""

    def __init__(self, options: TrainingOptions) -> None:
        self._has_own_folder = options.is_plan_temporary
        self._folder: Path | None = None

    def keep(self, written: Path) -> Path:
        """Return where a file stays that was written into the plan's folder: there, or as a copy."""
        if not self._has_own_folder:
            return written
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix=SAVED_PREFIX))
        part_file = shutil.copyfile(written, self._folder / f"{written.name}.part")
        return part_file.replace(self._folder / written.name)


class GraphRunner(NamedTuple):
    """What trains a graph on a cluster, and the script's place in it.

    One process runs the script and feeds every replica: it is the one worker, in Parallax's sense of the
    word, and has all replicas.
    """

    training: Training
    num_workers: int
    worker_id: int
    num_replicas_per_worker: int

    @public
    def run(self, fetches: str | Sequence[str] = (), feeds: ReplicaFeeds | None = None) -> FetchedValues:
        """Train one step; return for every fetch a list of each replica's value.

        `feeds`: data input -> a list of one array for each replica; nothing where `data` was given.
        """
        return self.training.run(fetches, feeds)

    @public
    def train(self, steps: int) -> None:
        """Train so many steps on the data that was given to get_runner. Raises BadUsage."""
        if steps < 1:
            raise BadUsage(f"{steps} steps", at="train", fix="train at least one step")
        self.training.train(steps)

    @property
    def steps(self) -> int:
        """How many steps were trained, with those of the checkpoint that this training goes on from."""
        return self.training.steps

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        return self.training.variables()

    def save(self) -> Path:
        """Write the variables to trained.safetensors, and return its path.

        It is in config.out; without that in a folder of its own, where the system has temporary files.
        """
        return self.training.save()

    def close(self) -> None:
        """End the job. What was not saved is lost."""
        self.training.close()

    def __enter__(self) -> "GraphRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SteppedTraining:
    """Replicas that step together, when they are asked to."""

    def __init__(
        self,
        plan: PlanFolder,
        data: ShardedData | None,
        options: TrainingOptions = TrainingOptions(),
    ) -> None:
        options.check(plan.plan.replicas)
        read_by_ranks = data.name if data is not None and data.name is not None else ""
        self._folder, self._plan, self._options = plan, plan.plan, options
        self._saved = SavedFile(options)
        self._outputs = {output.name for output in self._plan.outputs}
        with ExitStack() as begun:
            begun.enter_context(locked_folder(plan.path))
            self._stepper = Stepper(
                plan,
                data=read_by_ranks,
                timeout_s=options.timeout_s,
                seed=options.seed,
                stop_when_diverged=options.stop_when_diverged,
                checkpoints=options.checkpoints,
                traced_steps=options.traced_steps,
                redirect=options.redirect,
            )
            self._at_the_end = begun.pop_all()
        self._rows: Iterator[tuple[Batch, ...]] | None = None
        if data is not None and not read_by_ranks:
            rows = zip(*data.streams(plan.plan.replicas), strict=False)
            self._rows = islice(rows, self._stepper.begun.batches, None)

    @property
    def steps(self) -> int:
        """How many steps were trained, with those of the checkpoint that this one goes on from."""
        return self._stepper.steps

    def run(self, fetches: str | Sequence[str], feeds: ReplicaFeeds | None) -> FetchedValues:
        """Train one step on the feeds, or on the next batches of the data.

        Of an output that is a mean over replicas, each replica's own value is fetched.
        """
        names = [fetches] if isinstance(fetches, str) else fetches
        if isinstance(names, Sequence):
            self._stepper.check_fetches([name for name in names if isinstance(name, str)])
        if isinstance(fetches, str):
            fetches = self._own(fetches)
        elif isinstance(fetches, Sequence):
            fetches = [self._own(name) for name in fetches]
        if self._rows is None:
            return self._stepper.run(fetches, feeds)
        if feeds:
            raise BadUsage("feeds beside data", at="feeds", fix="leave feeds out, or give get_runner no data")
        return self._stepper.run(fetches, self._next_feeds(self._rows))

    def train(self, steps: int) -> None:
        """Train so many steps."""
        for _ in range(steps):
            self.run((), None)

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        return self._stepper.variables()

    def save(self) -> Path:
        """Write the variables."""
        return self._saved.keep(self._stepper.save())

    def close(self) -> None:
        """End the daemons, and write the trace that was asked for."""
        with self._at_the_end:
            self._stepper.close()
        times, replica = self._stepper.times, self._options.traced_replica
        if self._options.trace is not None and times:
            own = {rank.rank for rank in self._plan.ranks if replica in (None, rank.replica)}
            write_run_trace(self._options.trace, self._folder, {r: times[r] for r in times if r in own})

    def _own(self, name: str) -> str:
        own = own_output(name)
        return own if own in self._outputs else name

    def _next_feeds(self, rows: Iterator[tuple[Batch, ...]]) -> ReplicaFeeds:
        batches = next(rows, None)
        if batches is None:
            raise BadData(
                f"the data ends after {self._stepper.steps} steps of {self._plan.replicas} replicas",
                at="data",
                fix="let it go on, or train fewer steps",
            )
        return {name: [np.asarray(batch[name]) for batch in batches] for name in batches[0]}


class AsynchronousTraining:
    """Replicas that train without waiting for each other: a number of steps each, and none in common."""

    def __init__(
        self,
        plan: PlanFolder,
        data: ShardedData | None,
        options: TrainingOptions = TrainingOptions(),
    ) -> None:
        options.check(len(plan.plan.asynchronous))
        self._plan, self._options = plan, options
        self._data: str | BatchStream | None = None
        if data is not None:
            self._data = data.name or BatchStream(data, plan_of_data(plan.plan))
        self._saved = SavedFile(options)
        self._trained: dict[str, Array] | None = None
        begun = options.checkpoints and newest_checkpoint(Path(options.checkpoints.folder))[0]
        self.steps = StoredValues(begun).manifest.position.step if begun else 0

    def run(self, fetches: str | Sequence[str], feeds: ReplicaFeeds | None) -> FetchedValues:
        """Refuse: there is no step of all replicas. Raises BadUsage."""
        raise BadUsage(
            "a step of all replicas, which do not wait for each other",
            at="run, with sync=False",
            fix="give get_runner data and call train(steps), or leave sync as it is",
        )

    def train(self, steps: int) -> None:
        """Train so many steps on every replica, on the batches behind those of the steps before."""
        if self._data is None:
            raise BadUsage("no data", at="get_runner", fix="give it data=partc.shard(...)")
        options = self._options
        saves = options.checkpoints is not None
        result = Runner(self._plan).train(
            self._data,
            self.steps + steps,
            initial=None if saves else self._trained,
            trained=0 if saves else self.steps,
            seed=options.seed,
            stop_when_diverged=options.stop_when_diverged,
            timeout_s=options.timeout_s,
            checkpoints=options.checkpoints,
            resume=saves,
            redirect=options.redirect,
        )
        self._trained = result.variables
        self.steps = result.first_step + result.last_step

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        if self._trained is None:
            raise BadUsage("nothing was trained yet", at="variables", fix="call train(steps) first")
        return self._trained

    def save(self) -> Path:
        """Return the file that the last training left."""
        self.variables()
        return self._saved.keep(self._plan.path / TRAINED_FILE)

    def close(self) -> None:
        """Do nothing: servers and workers have ended with the training."""
