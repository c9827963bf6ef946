"""One training job, as the launcher hands it to the executors, and what they write back.

Everything lies in the job's folder, which all hosts see:

    job.json                 the job
    initial.safetensors      first values that replace the plan's, if any
    rank-R.json              what rank R sent
    times.rank-R.json        when rank R executed what, if the job is traced
    outputs.rank-R                   what a step's outputs were, one step behind the other (step_outputs.py)
    variables.step-S.safetensors     the variables after step S

    supervisor.json, job.key         where keepers report to, and the key to it between machines

What a rank prints while it trains are lines of JSON that the launcher reads.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from partc.runtime.check_arguments import settle_fields
from partc.runtime.checkpoints.not_saved import Unsaved
from partc.runtime.checkpoints.resume import StartPoint
from partc.runtime.data.batches import unmasked
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.errors import BadUsage, naming_file
from partc.runtime.execution.recorder import RankTimes, TracedSteps
from partc.runtime.plan.record import Record
from partc.runtime.transports.exchanged import Exchanged

JOB_FILE = "job.json"
INITIAL_FILE = "initial.safetensors"

Array = np.ndarray[Any, np.dtype[Any]]


class Checkpoints(Record, frozen=True):
    """Where and when a training is saved; after a step in which it is asked to stop, at any rate."""

    folder: str
    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 3  # so many complete ones stay

    def __post_init__(self) -> None:
        settle_fields(self)
        for name in ("every_steps", "every_s", "keep"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise BadUsage(f"{name} of {value}", at=f"Checkpoints.{name}", fix="give more than 0")


class Straggler(Record, frozen=True):
    """A rank that keeps others waiting: shares of the time that it waited itself, and at most another one."""

    rank: int
    waited: float
    others_waited: float


class Job(Record, frozen=True):
    """What the executors are to do."""

    plan_folder: str
    steps: int  # beside those that were trained before
    data: str  # as open_source takes it
    is_shuffled: bool = False  # the samples of files
    seed: int = 0
    sizes: dict[str, int] = msgspec.field(default_factory=dict)  # symbolic sizes that are not the plan's
    read_after: tuple[int, ...] = ()  # steps (from 1) after which the variables are written
    stop_when_diverged: bool = True
    outputs: Literal["none", "loss", "all"] = "loss"
    has_initial: bool = False
    report_every_s: float = 0.5
    deadline_s: float = 600.0  # longest wait for one communication
    traced_steps: TracedSteps = 0  # are timed, instruction by instruction
    first_step: int = 0  # steps that were trained before: random numbers go on behind them
    first_batch: int = 0  # batches that were used before
    first_samples: int | None = 0  # in them; None: nobody has counted them
    data_from: int = 0  # the batch with which `data` begins: batches that are handed over begin behind these
    data_name: str = ""  # as it was asked for
    file_samples: int | None = None  # that it holds, if it is files
    shards: int = 0  # whose batches, one of each, are a step's, if they are handed over so; else 0
    resumed_from: str = ""  # the checkpoint that the variables come from
    checkpoints: Checkpoints | None = None
    metrics_file: str = ""  # takes a line of every step
    training: str = ""  # which training it is, with all that went on with it
    tells_waiting: bool = False  # ranks say now and then how much they waited
    worker_steps: tuple[
        int, ...
    ] = ()  # of each asynchronous worker, trained before; `first_step` is their mean

    @property
    def steps_ahead(self) -> int:
        """Return by how many steps training is ahead of the batches that it has used of files.

        It has gone on with more or fewer samples a step. What is handed over has entries of each batch.
        """
        return 0 if self.data_from else max((self.first_step, *self.worker_steps)) - self.first_batch

    def behind(self, start: StartPoint) -> "Job":
        """Return the job that goes on with what was trained before; its `steps` stay."""
        return msgspec.structs.replace(
            self,
            seed=start.seed,
            first_step=start.step,
            first_batch=start.batches,
            first_samples=start.samples,
            resumed_from="" if start.checkpoint is None else str(start.checkpoint.resolve()),
            training=start.training,
            worker_steps=start.workers,
        )


class Progress(Record, frozen=True, tag="progress"):
    """A line that the first worker prints. Steps count from the training's beginning, whoever resumed it."""

    step: int
    steps: int
    loss: float | None
    steps_per_s: float
    straggler: Straggler | None = None  # lately
    data_waited: float = 0.0  # the share of its time that the first worker lately waited for data
    not_finite_since: int = 0  # the step since which the loss is NaN or infinite, and null here; 0: a number
    samples_per_s: float | None = None  # of all workers; None: nothing says how many a step takes


class Notice(Record, frozen=True, tag="notice"):
    """A line that the first rank prints: something that a person should know while training goes on."""

    text: str


class RankReport(Record, frozen=True):
    """What one rank sent in all, by kind, and which replicated variables disagree.

    `last_step`: after which it ended, as all ranks did. `trained_s`: how long its steps took; `waiting_s`,
    `data_s`, `saving_s`: how long it waited meanwhile for communications, for data, and for checkpoints.
    """

    payload_bytes: dict[str, int]
    ids_bytes: dict[str, int]
    counts_bytes: dict[str, int]
    exchanged: Exchanged
    trained_s: float
    samples: int | None  # that all replicas were fed
    disagreeing: tuple[str, ...]
    last_step: int
    waiting_s: float
    data_s: float
    saving_s: float
    unsaved: Unsaved | None = None


def check_timeout(timeout_s: float, at: str) -> None:
    """Raise BadUsage where a wait would have no length, or no end, for which a job's file has no number."""
    if not 0 < timeout_s < math.inf:
        raise BadUsage(f"a timeout of {timeout_s} s", at=at, fix="give a number of seconds, more than 0")


def write_record(path: Path, record: Record) -> None:
    """Write a record as JSON: whole or not at all, since a rank may be killed at any moment.

    Raises BadUsage for what is no text: a path of bytes that are no UTF-8.
    """
    part = path.with_name(path.name + ".part")
    try:
        text = msgspec.json.encode(record)
    except UnicodeEncodeError as error:
        what = "a name that is not UTF-8, which a job's files cannot hold"
        raise BadUsage(what, at=error.object, fix="give that file or folder another name") from error
    with naming_file(part):
        part.write_bytes(text)
    part.replace(path)


def write_job(folder: Path, job: Job, initial: Mapping[str, Array] | None) -> None:
    """Write a job and the first values that replace the plan's. Raises BadData where one has a mask."""
    if initial is not None:
        whole = {name: unmasked(array, f"initial values: {name}") for name, array in initial.items()}
        write_arrays(folder / INITIAL_FILE, whole)
    write_record(folder / JOB_FILE, job)


def read_job(folder: Path) -> Job:
    """Read the job of a folder."""
    return msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=Job)


def read_report(folder: Path, rank: int) -> RankReport:
    """Read what a rank wrote at its end."""
    return msgspec.json.decode((folder / f"rank-{rank}.json").read_bytes(), type=RankReport)


def times_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's times."""
    return folder / f"times.rank-{rank}.json"


def read_times(folder: Path, rank: int) -> RankTimes:
    """Read when a rank executed what."""
    return msgspec.json.decode(times_file(folder, rank).read_bytes(), type=RankTimes)


def variables_file(folder: Path, step: int) -> Path:
    """Return the file of the variables after a step."""
    return folder / f"variables.step-{step}.safetensors"


def outputs_file(folder: Path, rank: int) -> Path:
    """Return the file of a worker's outputs."""
    return folder / f"outputs.rank-{rank}"


class Saved(Record, frozen=True, tag="saved"):
    """A line that the first rank prints: a checkpoint is complete."""

    step: int


class Waited(Record, frozen=True, tag="waited"):
    """A line that a rank prints now and then, if the job asks: how many of so many seconds it waited."""

    member: str  # rank 0, worker-0
    waited_s: float
    trained_s: float


class Restarted(Record, frozen=True, tag="restarted"):
    """A member of the job is started again; the launcher says so itself."""

    member: str


JobMessage = Progress | Notice | Saved | Waited | Restarted


class Reporter:
    """Prints progress, now and then. `trained`: steps before those that are reported."""

    def __init__(self, job: Job, trained: int) -> None:
        self._trained = trained
        self._last = job.first_step + job.steps
        self._report_every_s = job.report_every_s
        self._begun_s = self._reported_s = self._data_s = 0.0
        self._not_finite_since = 0
        self.straggler: Straggler | None = None

    def begin(self) -> None:
        """Start the clock."""
        self._begun_s = self._reported_s = time.monotonic()

    def trained_s(self) -> float:
        """Return how long steps took so far, by this process's clock."""
        return max(time.monotonic() - self._begun_s, 1e-9)

    def report(self, step: int, loss: float | None, data_s: float, samples: int | None) -> None:
        """Take in a step; print a line of JSON, if the last is old enough.

        `data_s`: waited for data; `samples`: that all workers used, both so far.
        """
        now_s = time.monotonic()
        done = self._trained + step
        is_finite = loss is None or math.isfinite(loss)
        self._not_finite_since = 0 if is_finite else self._not_finite_since or done
        if done < self._last and step > 1 and now_s - self._reported_s < self._report_every_s:
            return
        data_waited = min(1.0, (data_s - self._data_s) / max(now_s - self._reported_s, 1e-9))
        self._reported_s, self._data_s = now_s, data_s
        steps_per_s, since = step / self.trained_s(), self._not_finite_since
        samples_per_s = None if samples is None else samples / step * steps_per_s
        straggler = self.straggler
        _print(Progress(done, self._last, loss, steps_per_s, straggler, data_waited, since, samples_per_s))


class WaitReporter:
    """Prints now and then how much a member waited for others, if the job asks for it."""

    def __init__(self, job: Job, member: str) -> None:
        self._is_asked = job.tells_waiting
        self._every_s = job.report_every_s
        self._member = member
        self._told_s = time.monotonic()
        self._told_waited_s = 0.0

    def report(self, waited_s: float) -> None:
        """Print how much was waited since the last line, if that is old enough; in all it is `waited_s`."""
        now_s = time.monotonic()
        if self._is_asked and now_s - self._told_s >= self._every_s:
            _print(Waited(self._member, waited_s - self._told_waited_s, now_s - self._told_s))
            self._told_s, self._told_waited_s = now_s, waited_s


def notify(text: str) -> None:
    """Print what a person should know."""
    _print(Notice(text))


def tell_saved(step: int) -> None:
    """Print that a checkpoint is complete."""
    _print(Saved(step))


def _print(message: JobMessage) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)
