"""The variables at the end: pieces from their servers, and what each worker kept for itself.

A variable that workers keep, a moving average of data or a state carried on, is the mean of what the
workers have: as under synchronous training, where each step ends with that mean. Of whole numbers, which
have no mean, the first worker's are taken.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from partc.runtime.asynchronous.job import (
    ServerReport,
    WorkerReport,
    pieces_file,
    report_file,
    session_outputs_file,
)
from partc.runtime.asynchronous.session import own_ranks, server_name, servers_of, worker_name
from partc.runtime.data.checkpoint import TensorFile, read_array, read_arrays, write_arrays, write_tensors
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job import Checkpoints, Job, variables_file
from partc.runtime.jobs.results import Owner, TrainingResult, owners_of, pieces_among
from partc.runtime.jobs.step_outputs import read_outputs
from partc.runtime.plan.boxes import assemble
from partc.runtime.plan.program import Plan

Array = np.ndarray[Any, np.dtype[Any]]
Report = TypeVar("Report", ServerReport, WorkerReport)


def check_sessions_request(
    plan: Plan,
    staleness: int | None,
    read_after: Collection[int],
    traced_steps: int,
    checkpoints: Checkpoints | None,
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
    if plan.asynchronous and checkpoints is not None:
        raise BadUsage(
            "checkpoints of workers that do not wait for each other: there is no step that all have done",
            at="--save-every",
            fix="leave it out, or compile without --asynchronous",
        )
    if plan.asynchronous and (traced_steps or (read_after and len(plan.asynchronous) > 1)):
        raise BadUsage(
            "variables after a step, or the times of a step, where every worker is in another step",
            at="--trace" if traced_steps else "read_after",
            fix="leave it out, or compile without --asynchronous",
        )


def collect_sessions(plan: Plan, folder: Path, job: Job, lost: tuple[str, ...]) -> TrainingResult:
    """Return what an asynchronous job left in its folder, and write its variables there.

    `outputs` of a step are those of all workers that trained to the end, along a new first axis.
    """
    workers = [w for w in range(len(plan.asynchronous)) if report_file(folder, worker_name(w)).exists()]
    variables = merge_variables(
        plan,
        {rank.rank: read_arrays(pieces_file(folder, server_name(rank.rank))) for rank in servers_of(plan)},
        [read_arrays(pieces_file(folder, worker_name(worker))) for worker in workers],
    )
    write_arrays(variables_file(folder, job.steps), variables)
    for step in job.read_after:
        _write_after(plan, folder, step)
    of_servers = {r.rank: _report(folder, server_name(r.rank), ServerReport) for r in servers_of(plan)}
    of_workers = [_report(folder, worker_name(worker), WorkerReport) for worker in workers]
    (chief, *_) = of_servers.values()
    return TrainingResult(
        variables=variables,
        outputs=tuple(_outputs(folder, workers)),
        last_step=job.steps,
        payload_bytes={rank: report.payload_bytes for rank, report in of_servers.items()}
        | {own_ranks(plan)[0].rank: of_workers[0].payload_bytes},
        steps_per_s=min(report.steps_per_s for report in of_workers),
        lost_workers=lost,
        missed_pushes=chief.missed,
    )


def _report(folder: Path, name: str, kind: type[Report]) -> Report:
    return msgspec.json.decode(report_file(folder, name).read_bytes(), type=kind)


def _outputs(folder: Path, workers: Sequence[int]) -> Iterator[dict[str, Array]]:
    logs = [read_outputs(session_outputs_file(folder, worker_name(worker))) for worker in workers]
    for of_step in zip(*logs, strict=True):
        yield {name: np.stack([outputs[name] for outputs in of_step]) for name in of_step[0]}


def _write_after(plan: Plan, folder: Path, step: int) -> None:
    """Write the variables after a step of the only worker, one piece in memory at a time."""
    servers = {rank.rank for rank in servers_of(plan)}
    variables = {variable.name: variable for variable in plan.variables}

    def pieces(name: str, shared: Sequence[Owner]) -> Iterator[Array]:
        for owner in shared:
            yield read_array(pieces_file(folder, server_name(owner.rank), step), owner.held.value)
        if not shared:
            yield read_array(pieces_file(folder, worker_name(0), step), name)

    def tensor_of(name: str, owners: Sequence[Owner]) -> TensorFile:
        shared = pieces_among([owner for owner in owners if owner.rank in servers])
        boxes = [owner.held.box for owner in shared] or [None]
        return TensorFile(name, variables[name].dtype, variables[name].shape, pieces(name, shared), boxes)

    tensors = [tensor_of(name, owners) for name, owners in owners_of(plan).items()]
    write_tensors(variables_file(folder, step), tensors)


def merge_variables(
    plan: Plan, of_servers: Mapping[int, Mapping[str, Array]], of_workers: Sequence[Mapping[str, Array]]
) -> dict[str, Array]:
    """Return every variable, whole. `of_servers`: rank -> value name -> what it owns."""
    servers = {rank.rank for rank in servers_of(plan)}
    variables = {variable.name: variable for variable in plan.variables}
    merged: dict[str, Array] = {}
    for name, owners in owners_of(plan).items():
        shared = [owner for owner in owners if owner.rank in servers]
        if shared:
            pieces = [
                (owner.held.box, of_servers[owner.rank][owner.held.value]) for owner in pieces_among(shared)
            ]
            merged[name] = assemble(variables[name].shape, np.dtype(variables[name].dtype), pieces)
        else:
            merged[name] = _mean([worker[name] for worker in of_workers])
    return merged


def _mean(values: Sequence[Array]) -> Array:
    first = values[0]
    if first.dtype.kind != "f" or len(values) == 1:
        return first.copy()
    mean = np.mean(values, axis=0, dtype=np.float64)
    return np.asarray(mean, dtype=first.dtype)
