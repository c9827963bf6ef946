"""Train a plan on its cluster: the public way to run."""

import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from partc.runtime.asynchronous.collect import check_sessions_request, collect_sessions
from partc.runtime.asynchronous.launcher import launch_sessions
from partc.runtime.asynchronous.session import plan_of_data
from partc.runtime.data.batches import check_total_batch, sizes_of
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.data.feeds import STAGED_FILE
from partc.runtime.errors import BadData, BadPlan, BadUsage, CopiesDiffer
from partc.runtime.jobs.job import Job, outputs_file, read_report, read_times, variables_file, write_job
from partc.runtime.jobs.job_folder import job_folder
from partc.runtime.jobs.launcher import OnProgress, launch
from partc.runtime.jobs.results import (
    DISAGREEING_FILE,
    TRAINED_FILE,
    TrainingResult,
    assemble_outputs,
)
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.program import Plan

Array = np.ndarray[Any, np.dtype[Any]]
Batches = Iterable[Mapping[str, Array]]

LOG_FILE = "run.log"
# Ranks lose patience before the launcher does: they can say what they waited for.
_RANKS_SHARE = 0.8


class Runner:
    """Trains one plan, a daemon per rank."""

    def __init__(self, plan: PlanFolder | Path | str, addresses: Mapping[str, str] | None = None) -> None:
        self._folder = plan if isinstance(plan, PlanFolder) else read_plan_folder(plan)
        self._addresses = addresses_of(self._folder.path) if addresses is None else dict(addresses)

    def train(
        self,
        data: str | Path | Batches,
        steps: int,
        *,
        initial: Mapping[str, Array] | None = None,
        seed: int = 0,
        sizes: Mapping[str, int] | None = None,
        read_after: Collection[int] = (),
        stop_when_diverged: bool = True,
        outputs: Literal["loss", "all"] = "loss",
        on_progress: OnProgress | None = None,
        timeout_s: float = 600.0,
        save: bool = True,
        traced_steps: int = 0,
        staleness: int | None = None,
        first_step: int = 0,
        keep_in: Path | None = None,
    ) -> TrainingResult:
        """Train `steps` steps and save trained.safetensors in the plan's folder, unless told not to.

        `data`: FILE.npz, "synthetic", "MODULE:FUNC", or total batches. `initial`: whole variables that
        replace the plan's first values. `sizes`: symbolic sizes that differ from the plan's. `read_after`:
        steps (from 1) whose variables are returned as well. `traced_steps`: how many of the last steps are
        timed instruction by instruction. `staleness`: of an asynchronous plan, the most steps that a worker
        may be ahead of the slowest; None: no bound. `first_step`: how many steps were trained before, so that
        draws, and data that is not handed over as batches, go on there. `keep_in`: a folder that takes the
        variables after `read_after`, as files (job.py), instead of the result. Raises the error of
        the rank that failed first, and CopiesDiffer if `save` is asked and replicas are not equal in the end.
        """
        _check_request(steps, first_step, timeout_s)
        check_sessions_request(self._folder.plan, staleness, read_after, traced_steps)
        with job_folder(self._folder.path) as folder:
            staged, data_sizes = self._stage(data, steps, folder)
            job = Job(
                plan_folder=str(self._folder.path.resolve()),
                steps=steps,
                data=staged,
                seed=seed,
                sizes=data_sizes | dict(sizes or {}),
                read_after=tuple(sorted(read_after)),
                stop_when_diverged=stop_when_diverged,
                outputs=outputs,
                has_initial=initial is not None,
                deadline_s=_RANKS_SHARE * timeout_s,
                traced_steps=traced_steps,
                first_step=first_step,
                first_batch=first_step if isinstance(data, str | Path) else 0,
            )
            write_job(folder, job, initial)
            result = self._play(folder, job, staleness, on_progress, timeout_s)
            return self._keep(folder, job, result, save, keep_in)

    def _stage(self, data: str | Path | Batches, steps: int, folder: Path) -> tuple[str, dict[str, int]]:
        plan = self._folder.plan
        return stage_data(plan_of_data(plan) if plan.asynchronous else plan, data, steps, folder)

    def _keep(
        self, folder: Path, job: Job, result: TrainingResult, save: bool, keep_in: Path | None
    ) -> TrainingResult:
        """Take the variables out of a job's folder before it goes."""
        if keep_in is not None:
            assert not save, "the last of the files has one place only"
            _move_variables(job.read_after, folder, keep_in)
            return result
        after = {step: read_arrays(variables_file(folder, step)) for step in job.read_after}
        if save:
            self._save(variables_file(folder, job.steps), result)
        return replace(result, variables_after=after)

    def _save(self, variables: Path, result: TrainingResult) -> None:
        """Keep the trained variables: under another name, and with an error, where copies of them differ."""
        saved = self._folder.path / (DISAGREEING_FILE if result.disagreeing else TRAINED_FILE)
        variables.replace(saved)
        if result.disagreeing:
            names = ", ".join(result.disagreeing[:8]) + (", ..." if len(result.disagreeing) > 8 else "")
            raise CopiesDiffer(
                f"ranks ended with different copies of {len(result.disagreeing)} variables: {names}",
                at=str(self._folder.path),
                fix="compile the model again: this plan does not keep replicas equal; "
                f"the first rank's variables are in {saved}",
            )

    def _play(
        self, folder: Path, job: Job, staleness: int | None, on_progress: OnProgress | None, timeout_s: float
    ) -> TrainingResult:
        """Start the processes of a job, wait for them, and collect what they made."""
        plan, addresses, log = self._folder.plan, self._addresses, self._folder.path / LOG_FILE
        if plan.asynchronous:
            lost = launch_sessions(plan, folder, log, addresses, staleness, on_progress, timeout_s)
            return collect_sessions(plan, folder, job, lost)
        launch([rank.host for rank in plan.ranks], folder, log, addresses, on_progress, timeout_s)
        return self._collect(folder, job)

    def _collect(self, folder: Path, job: Job) -> TrainingResult:
        plan = self._folder.plan
        reports = {rank.rank: read_report(folder, rank.rank) for rank in plan.ranks}
        return TrainingResult(
            variables=read_arrays(variables_file(folder, job.steps)),
            outputs=_outputs(plan, folder, job),
            disagreeing=reports[0].disagreeing,
            payload_bytes={rank: report.payload_bytes for rank, report in reports.items()},
            exchanged={rank: report.exchanged for rank, report in reports.items()},
            steps_per_s=reports[0].steps_per_s,
            times={rank: read_times(folder, rank) for rank in reports} if job.traced_steps else {},
        )


def _check_request(steps: int, first_step: int, timeout_s: float) -> None:
    if steps < 1:
        raise BadUsage(f"{steps} steps", at="--steps", fix="train at least one step")
    if first_step < 0:
        raise BadUsage(f"first step {first_step}", at="first_step", fix="count from 0")
    if not timeout_s > 0:
        raise BadUsage(f"a timeout of {timeout_s} s", at="--timeout", fix="give more than 0 seconds")


def _move_variables(steps: Iterable[int], source: Path, target: Path) -> None:
    for step in steps:
        shutil.move(variables_file(source, step), variables_file(target, step))


def _outputs(plan: Plan, folder: Path, job: Job) -> tuple[dict[str, Array], ...]:
    by_rank = {rank.rank: read_arrays(outputs_file(folder, rank.rank)) for rank in leaders_of(plan)}
    names = {output.name for output in plan.outputs if job.outputs == "all" or output.name == plan.loss}
    return tuple(
        assemble_outputs(
            plan,
            {rank: {name: arrays[f"{step}/{name}"] for name in names} for rank, arrays in by_rank.items()},
        )
        for step in range(1, job.steps + 1)
    )


def stage_data(
    plan: Plan, data: str | Path | Batches, steps: int, folder: Path
) -> tuple[str, dict[str, int]]:
    """Return the data as the daemons can open it, and its symbolic sizes. Batches go to a file."""
    if isinstance(data, Path) or (isinstance(data, str) and data.endswith(".npz")):
        return str(Path(data).resolve()), {}
    if isinstance(data, str):
        return data, {}
    batches = list(islice(data, steps))
    if len(batches) < steps:
        raise BadData(f"{len(batches)} batches for {steps} steps", at="data", fix="supply a batch per step")
    for batch in batches:
        check_total_batch(plan, batch)
        _check_same_shapes(batches[0], batch)
    axes = {data_input.name: data_input.sample_axis for data_input in plan.data_inputs}
    arrays = {
        name: np.stack([batch[name] for batch in batches])
        if axis is None
        else np.concatenate([batch[name] for batch in batches], axis=axis)
        for name, axis in axes.items()
    }
    np.savez(folder / STAGED_FILE, allow_pickle=False, **arrays)
    return str(folder / STAGED_FILE), sizes_of(plan, batches[0])


def _check_same_shapes(first: Mapping[str, Array], batch: Mapping[str, Array]) -> None:
    for name, array in first.items():
        if batch[name].shape != array.shape:
            raise BadData(
                f"batches of shapes {list(array.shape)} and {list(batch[name].shape)}",
                at=f"data input {name!r}",
                fix="supply batches of one size, or a MODULE:FUNC",
            )


class _HostAddress(msgspec.Struct):
    name: str
    address: str = "localhost"


class _HostAddresses(msgspec.Struct):
    hosts: tuple[_HostAddress, ...]


def addresses_of(folder: Path) -> dict[str, str]:
    """Return the network names of the hosts, from the cluster file beside the plan."""
    path = folder / "cluster.json"
    if not path.exists():
        return {}
    try:
        hosts = msgspec.json.decode(path.read_bytes(), type=_HostAddresses).hosts
    except NOT_DECODED as error:
        raise BadPlan(f"not a cluster: {error}", at=str(path), fix="compile the model again") from error
    return {host.name: host.address for host in hosts}
