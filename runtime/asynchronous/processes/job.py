"""One asynchronous job, as the launcher hands it to its processes, and what they write back.

Beside what every job's folder holds (runtime/jobs/job.py):

    session.json                     how the sessions run
    found.NAME.json                  what a process found on its host (start_check.py)
    lost.NAME                        that it has died before
    start_check.json                 whether all may begin
    endpoint.NAME                    between machines, see sockets.py
    report.NAME.json                 what it sent, how old its values were
    pieces.NAME.safetensors          what a server holds at the end, by values
    kept.safetensors                 what workers keep at the end, put together
    pieces.NAME.step-S.safetensors   what a server or worker (by variables) holds after step S, if there is
                                     one worker and the job asks for it
    outputs.NAME                     what a worker's steps put out (runtime/jobs/step_outputs.py)
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from partc.runtime.checkpoints.not_saved import Unsaved
from partc.runtime.jobs.job import write_record
from partc.runtime.plan.record import Record

SESSION_FILE = "session.json"


class ProcessPlace(Record, frozen=True):
    """Where a process runs: the plan's host, and its network name."""

    host: str
    address: str


class SessionJob(Record, frozen=True):
    """How the sessions of a job run. `places`: of all its processes in their first lives; the chief first."""

    endpoints: dict[str, str]  # server name -> where it listens
    limit_bytes: int  # of one value on its way
    steps: tuple[int, ...]  # of the workers that train: how many each has trained before
    places: dict[str, ProcessPlace]
    staleness: int | None = None  # None: workers never wait for each other


@dataclass(frozen=True, slots=True)
class SessionsEnd:
    """How a job's processes ended.

    `trained`: names of those that trained to the end, or until they were asked to stop by signal
    `stopped_by`; `lost`: workers that died and were not started again, and how.
    """

    trained: tuple[str, ...]
    lost: tuple[str, ...]
    stopped_by: int = 0


class ServerReport(Record, frozen=True):
    """What one server saw. `steps`, of the chief: how many each worker has trained; in all of them."""

    steps: tuple[int, ...]
    saving_s: float
    payload_bytes: dict[str, int]
    pushes: int
    missed: dict[int, int]  # pushes of others between a step's beginning and its own -> steps
    widest_lag: int
    unsaved: Unsaved | None = None


class WorkerReport(Record, frozen=True):
    """What one worker did. `trained_s`: what its steps took; `data_s`: what of that it waited for data."""

    payload_bytes: dict[str, int]
    steps: int
    trained_s: float
    data_s: float


def write_session_job(folder: Path, job: SessionJob) -> None:
    """Write how the sessions run."""
    write_record(folder / SESSION_FILE, job)


def read_session_job(folder: Path) -> SessionJob:
    """Read how the sessions run."""
    return msgspec.json.decode((folder / SESSION_FILE).read_bytes(), type=SessionJob)


def report_file(folder: Path, name: str) -> Path:
    """Return the file of a process's report."""
    return folder / f"report.{name}.json"


def pieces_file(folder: Path, name: str, step: int | None = None) -> Path:
    """Return the file of what a process holds after a step, at the end if none is named."""
    after = "" if step is None else f".step-{step}"
    return folder / f"pieces.{name}{after}.safetensors"


def kept_file(folder: Path) -> Path:
    """Return the file of what workers keep for themselves."""
    return folder / "kept.safetensors"


def session_outputs_file(folder: Path, name: str) -> Path:
    """Return the file of a worker's outputs."""
    return folder / f"outputs.{name}"
