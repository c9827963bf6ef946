"""One training job, as the launcher hands it to the executors, and what they write back.

Everything lies in the job's folder, which all hosts see:

    job.json                 the job
    initial.safetensors      first values that replace the plan's, if any
    error.rank-R.json        why rank R stopped
    process.rank-R           the process of rank R
    rank-R.json              what rank R sent
    times.rank-R.json        when rank R executed what, if the job is traced
    outputs.rank-R.safetensors       "STEP/NAME" -> output
    variables.step-S.safetensors     the variables after step S

What a rank prints while it trains are lines of JSON that the launcher reads.
"""

import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from partc.runtime import errors
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.errors import PartcError, RankFailed
from partc.runtime.execution.recorder import RankTimes
from partc.runtime.plan.record import Record
from partc.runtime.transports.exchanged import Exchanged

JOB_FILE = "job.json"
INITIAL_FILE = "initial.safetensors"

Array = np.ndarray[Any, np.dtype[Any]]


class Job(Record, frozen=True):
    """What the executors are to do."""

    plan_folder: str
    steps: int
    data: str  # as open_source takes it
    seed: int = 0
    sizes: dict[str, int] = msgspec.field(default_factory=dict)  # symbolic sizes that are not the plan's
    read_after: tuple[int, ...] = ()  # steps (from 1) after which the variables are written
    stop_when_diverged: bool = True
    outputs: Literal["loss", "all"] = "loss"
    has_initial: bool = False
    report_every_s: float = 0.5
    deadline_s: float = 600.0  # longest wait for one communication
    traced_steps: int = 0  # the last so many steps are timed, instruction by instruction
    first_step: int = 0  # steps that were trained before: random numbers go on behind them
    first_batch: int = 0  # batches of the data that were used before


class Progress(Record, frozen=True, tag="progress"):
    """A line that the first worker prints."""

    step: int
    steps: int
    loss: float | None
    steps_per_s: float


class Failure(Record, frozen=True):
    """Why a rank stopped."""

    rank: int
    time_s: float  # since the epoch
    kind: str  # a class of runtime/errors.py
    what: str
    at: str
    fix: str


def failure_of(error: BaseException, rank: int, at: str) -> Failure:
    """Return what a rank leaves behind when it stops; `at` is where it was."""
    if not isinstance(error, PartcError):
        traceback.print_exception(error)
        error = RankFailed(f"{type(error).__name__}: {error}", at=at, fix="see run.log in the plan's folder")
    return Failure(rank, time.time(), type(error).__name__, error.what, error.at, error.fix)


class RankReport(Record, frozen=True):
    """What one rank sent in all, by kind, and which replicated variables disagree."""

    payload_bytes: dict[str, int]
    ids_bytes: dict[str, int]
    counts_bytes: dict[str, int]
    exchanged: Exchanged
    steps_per_s: float
    disagreeing: tuple[str, ...]


def write_record(path: Path, record: Record) -> None:
    """Write a record as JSON: whole or not at all, since a rank may be killed at any moment."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.encode(record))
    part.replace(path)


def write_job(folder: Path, job: Job, initial: Mapping[str, Array] | None) -> None:
    """Write a job and the first values that replace the plan's."""
    if initial is not None:
        write_arrays(folder / INITIAL_FILE, dict(initial))
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


def first_failure(folder: Path) -> PartcError | None:
    """Return the error of the rank that stopped first, None if no rank said why."""
    failures = [
        msgspec.json.decode(path.read_bytes(), type=Failure) for path in folder.glob("error.rank-*.json")
    ]
    if not failures:
        return None
    first = min(failures, key=lambda failure: (failure.time_s, failure.rank))
    kind = getattr(errors, first.kind, RankFailed)
    error: PartcError = kind(first.what, at=first.at, fix=first.fix)
    return error


def write_process(folder: Path, rank: int) -> None:
    """Note which process this rank is."""
    (folder / f"process.rank-{rank}").write_text(str(os.getpid()))


def ranks_of_process(folder: Path, process: int) -> list[int]:
    """Return the ranks that noted a process of this number: several, where hosts number theirs alike."""
    return sorted(
        int(path.suffix.removeprefix(".rank-"))
        for path in folder.glob("process.rank-*")
        if path.read_text() == str(process)
    )


def variables_file(folder: Path, step: int) -> Path:
    """Return the file of the variables after a step."""
    return folder / f"variables.step-{step}.safetensors"


def outputs_file(folder: Path, rank: int) -> Path:
    """Return the file of a worker's outputs."""
    return folder / f"outputs.rank-{rank}.safetensors"


class Reporter:
    """Prints progress, now and then."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun_s = self._reported_s = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begun_s = time.monotonic()

    def steps_per_s(self, step: int) -> float:
        """Return the mean rate so far."""
        return step / max(time.monotonic() - self._begun_s, 1e-9)

    def report(self, step: int, loss: float | None) -> None:
        """Print a line of JSON, if the last is old enough."""
        now_s = time.monotonic()
        if step < self._job.steps and step > 1 and now_s - self._reported_s < self._job.report_every_s:
            return
        self._reported_s = now_s
        line = Progress(step, self._job.steps, loss, self.steps_per_s(step))
        print(msgspec.json.encode(line).decode(), flush=True)
