"""Whether the hosts of an asynchronous job have what it needs, before any of its processes begins.

every process     found.NAME.json      what it found (engines/host_check.py), in the job's folder
the launcher      lost.NAME            that a worker has died, and is not waited for
the chief         start_check.json     whether nothing is lacking; if something is, it says what and ends

A worker that is started again waits for that, too, and then compares itself with the chief. Nothing is loaded
before that a host may lack.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from partc.runtime.asynchronous.processes.job import SESSION_FILE, SessionJob
from partc.runtime.asynchronous.sessions.session import (
    own_ranks,
    server_name,
    servers_of,
    session_name,
    worker_name,
    worker_of,
)
from partc.runtime.engines.host_check import (
    HostFindings,
    disk_lacks,
    file_lacks,
    found_by,
    gpu_lacks,
    judge,
    lack_of,
    memory_lacks,
    needed_bytes,
)
from partc.runtime.errors import BadPlan, HostLacks, RankFailed
from partc.runtime.jobs.job import Job, read_job, write_record
from partc.runtime.plan.plan_folder import open_plan_folder
from partc.runtime.plan.program import Plan, Rank, SessionWorker
from partc.runtime.plan.record import Record

VERDICT_FILE = "start_check.json"
_LOOK_S = 0.05
_AFTER_WORD_S = 30.0  # that a process waits to be ended, once the chief has told what is lacking


class StartDecision(Record, frozen=True):
    """What the chief has decided."""

    may_begin: bool


def await_start(folder: Path, part: str, number: int) -> None:
    """Look around, and wait until all processes of the job have. Raises HostLacks, in the chief first."""
    job = read_job(folder)
    sessions = msgspec.json.decode((folder / SESSION_FILE).read_bytes(), type=SessionJob)
    workers = len(sessions.steps)
    name = server_name(number) if part == "server" else session_name(number, workers)
    first_life = server_name(number) if part == "server" else worker_name(worker_of(number, workers))
    findings, chief = look_around(job, sessions, first_life), next(iter(sessions.places))
    if name == first_life:
        write_record(_found_file(folder, name), findings)
    if name == chief:
        fault = _decide(folder, list(sessions.places), job.deadline_s)
        write_record(folder / VERDICT_FILE, StartDecision(fault is None))
    else:
        _await((folder / VERDICT_FILE).exists, job.deadline_s, chief)
        fault = judge([_read(folder, chief), findings]) if name != first_life else None
    if fault is not None:
        raise fault
    if not msgspec.json.decode((folder / VERDICT_FILE).read_bytes(), type=StartDecision).may_begin:
        time.sleep(_AFTER_WORD_S)
        raise HostLacks("a host lacks something", at=f"{chief} says what", fix="read run.log")


def give_up(folder: Path, name: str) -> None:
    """Let nobody wait any more for what a process finds: it has died."""
    (folder / f"lost.{name}").touch()


def look_around(job: Job, sessions: SessionJob, name: str) -> HostFindings:
    """Return what a process finds on its machine; the first process of each looks for files and memory."""
    own = sessions.places[name]
    findings = msgspec.structs.replace(found_by(name), host=own.host)
    try:
        plan = open_plan_folder(job.plan_folder).plan
    except BadPlan as fault:
        return msgspec.structs.replace(findings, lacks=(lack_of(fault),))
    place, _ = _members(plan)[name]
    here = [other for other, there in sessions.places.items() if there.address == own.address]
    is_chief = name == next(iter(sessions.places))
    lacks = [*gpu_lacks(place.device, place.device_index)] if place.kind == "gpu" else []
    if name == here[0]:
        lacks += file_lacks(plan, job, looks_for_data=True)
        ranks = [rank for other in here for rank in _members(plan)[other][1]]
        lacks += memory_lacks(sum(needed_bytes(plan, rank) for rank in ranks), f"{len(here)} processes")
    if is_chief:
        lacks += disk_lacks(plan, job)
    return msgspec.structs.replace(findings, device=place.device, plan_sha256=plan.sha256, lacks=tuple(lacks))


def _members(plan: Plan) -> dict[str, tuple[Rank | SessionWorker, tuple[Rank, ...]]]:
    """Return name -> the device that a process computes on, and the ranks that it plays."""
    members: dict[str, tuple[Rank | SessionWorker, tuple[Rank, ...]]] = {
        server_name(rank.rank): (rank, (rank,)) for rank in servers_of(plan)
    }
    for number, place in enumerate(plan.asynchronous):
        members[worker_name(number)] = (place, own_ranks(plan))
    return members


def _decide(folder: Path, names: list[str], patience_s: float) -> HostLacks | None:
    """Return what is lacking, once all have told who live."""
    for name in names:
        _await(partial(_has_told, folder, name), patience_s, name)
    return judge([_read(folder, name) for name in names if _found_file(folder, name).exists()])


def _has_told(folder: Path, name: str) -> bool:
    return _found_file(folder, name).exists() or (folder / f"lost.{name}").exists()


def _await(holds: Callable[[], bool], patience_s: float, name: str) -> None:
    since_s = time.monotonic()
    while not holds():
        if time.monotonic() - since_s > patience_s:
            raise RankFailed(
                f"{name} did not say what it finds on its host for {patience_s:.0f} s",
                at="before the first step",
                fix="see that its host sees the job's folder; raise the timeout if it starts slowly",
            )
        time.sleep(_LOOK_S)


def _found_file(folder: Path, name: str) -> Path:
    return folder / f"found.{name}.json"


def _read(folder: Path, name: str) -> HostFindings:
    return msgspec.json.decode(_found_file(folder, name).read_bytes(), type=HostFindings)
