"""What an asynchronous job leaves: variables in pieces from their servers, outputs and reports."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from partc.runtime.asynchronous.processes.job import (
    ServerReport,
    SessionsEnd,
    WorkerReport,
    kept_file,
    pieces_file,
    report_file,
    session_outputs_file,
)
from partc.runtime.asynchronous.sessions.session import own_ranks, server_name, servers_of, worker_name
from partc.runtime.data.checkpoint import TensorFile, map_array, read_arrays, write_arrays, write_tensors
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job import Job, variables_file
from partc.runtime.jobs.results import Owner, TrainingResult, owners_of, pieces_among
from partc.runtime.jobs.step_outputs import read_outputs
from partc.runtime.plan.boxes import assemble
from partc.runtime.plan.program import Plan

Array = np.ndarray[Any, np.dtype[Any]]
Report = TypeVar("Report", ServerReport, WorkerReport)


def check_sessions_request(
    plan: Plan, staleness: int | None, read_after: Collection[int], is_traced: bool
) -> None:
    """Refuse what only one of the two ways to train can do. Raises BadUsage."""
    if staleness is not None and not plan.asynchronous:
        raise BadUsage(
            "a bound of staleness for workers that wait for each other in every step",
            at="--staleness",
            fix="leave it out, or compile with --asynchronous",
        )
    if staleness is not None and staleness < 0:
        raise BadUsage(f"a staleness of {staleness} steps", at="--staleness", fix="give 0 or more steps")
    if plan.asynchronous and (is_traced or (read_after and len(plan.asynchronous) > 1)):
        raise BadUsage(
            "variables after a step, or the times of a step, where every worker is in another step",
            at="--trace" if is_traced else "read_after",
            fix="leave it out, or compile without --asynchronous",
        )


def collect_sessions(plan: Plan, folder: Path, job: Job, ended: SessionsEnd) -> TrainingResult:
    """Return what an asynchronous job left in its folder, and write its variables there.

    `outputs` of a step are those of all workers whose one process trained all steps, along a new first axis.
    """
    of_servers = {r.rank: _report(folder, server_name(r.rank), ServerReport) for r in servers_of(plan)}
    (chief, *_) = of_servers.values()
    last_step = sum(chief.steps) // len(chief.steps) - job.first_step if ended.stopped_by else job.steps
    variables = merge_variables(
        plan,
        {rank.rank: read_arrays(pieces_file(folder, server_name(rank.rank))) for rank in servers_of(plan)},
        read_arrays(kept_file(folder)),
    )
    write_arrays(variables_file(folder, last_step), variables)
    for step in job.read_after:
        _write_after(plan, folder, step)
    of_workers = {name: _report(folder, name, WorkerReport) for name in ended.trained}
    first_worker = min(of_workers, default="")
    payload_bytes = {rank: report.payload_bytes for rank, report in of_servers.items()}
    if first_worker:
        payload_bytes[own_ranks(plan)[0].rank] = of_workers[first_worker].payload_bytes
    whole = [worker_name(w) for w in range(len(plan.asynchronous)) if worker_name(w) in of_workers]
    return TrainingResult(
        variables=variables,
        outputs=tuple(_outputs(folder, whole)),
        first_step=job.first_step,
        last_step=last_step,
        stopped_by=ended.stopped_by,
        payload_bytes=payload_bytes,
        steps_per_s=min((r.steps / r.trained_s for r in of_workers.values() if r.steps), default=0.0),
        trained_s=max((report.trained_s for report in of_workers.values()), default=0.0),
        data_s=max((report.data_s for report in of_workers.values()), default=0.0),
        saving_s=max(report.saving_s for report in of_servers.values()),
        unsaved=chief.unsaved,
        lost_workers=ended.lost,
        missed_pushes=chief.missed,
    )


def _report(folder: Path, name: str, kind: type[Report]) -> Report:
    return msgspec.json.decode(report_file(folder, name).read_bytes(), type=kind)


def _outputs(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Array]]:
    logs = [read_outputs(session_outputs_file(folder, name)) for name in names]
    for of_step in zip(*logs, strict=False):
        yield {name: np.stack([outputs[name] for outputs in of_step]) for name in of_step[0]}


def _write_after(plan: Plan, folder: Path, step: int) -> None:
    """Write the variables after a step of the only worker, of which none is read into memory."""
    servers = {rank.rank for rank in servers_of(plan)}
    variables = {variable.name: variable for variable in plan.variables}

    def pieces(name: str, shared: Sequence[Owner]) -> Iterator[Array]:
        for owner in shared:
            yield map_array(pieces_file(folder, server_name(owner.rank), step), owner.piece.value)
        if not shared:
            yield map_array(pieces_file(folder, worker_name(0), step), name)

    def tensor_of(name: str, owners: Sequence[Owner]) -> TensorFile:
        shared = pieces_among([owner for owner in owners if owner.rank in servers])
        boxes = [owner.piece.box for owner in shared] or [None]
        return TensorFile(name, variables[name].dtype, variables[name].shape, pieces(name, shared), boxes)

    tensors = [tensor_of(name, owners) for name, owners in owners_of(plan).items()]
    write_tensors(variables_file(folder, step), tensors)


def merge_variables(
    plan: Plan, of_servers: Mapping[int, Mapping[str, Array]], of_workers: Mapping[str, Array]
) -> dict[str, Array]:
    """Return every variable, whole.

    `of_servers`: rank -> value name -> what it owns; `of_workers`: variable name -> what workers hold of it.
    """
    servers = {rank.rank for rank in servers_of(plan)}
    variables = {variable.name: variable for variable in plan.variables}
    merged: dict[str, Array] = {}
    for name, owners in owners_of(plan).items():
        shared = [owner for owner in owners if owner.rank in servers]
        if shared:
            pieces = [
                (owner.piece.box, of_servers[owner.rank][owner.piece.value]) for owner in pieces_among(shared)
            ]
            merged[name] = assemble(variables[name].shape, np.dtype(variables[name].dtype), pieces)
        elif name in of_workers:
            merged[name] = of_workers[name]
    return merged
