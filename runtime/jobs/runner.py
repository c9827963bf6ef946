"""Train a plan on its cluster: the public way to run."""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from partc.runtime.asynchronous.collect import check_sessions_request, collect_sessions
from partc.runtime.asynchronous.processes.launcher import launch_sessions
from partc.runtime.asynchronous.processes.watch import Rules
from partc.runtime.asynchronous.sessions.session import plan_of_data
from partc.runtime.callers_code import CallersBatches, callers_function
from partc.runtime.check_arguments import public
from partc.runtime.checkpoints.manifest import refuse_others
from partc.runtime.checkpoints.resume import DataAsked, StartPoint, begin_behind, data_asked, resume_from
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.checkpoints.training_folders import training_folders
from partc.runtime.checkpoints.write_checkpoint import remove_parts
from partc.runtime.data.batches import (
    Batch,
    check_total_batch,
    copied,
    refuse_other_sizes,
    sizes_of,
)
from partc.runtime.data.checkpoint import map_arrays, read_arrays, write_tensors
from partc.runtime.data.feeds import STAGED_FILE
from partc.runtime.data.npz import write_npz
from partc.runtime.data.sample_files import is_of_samples
from partc.runtime.data.sharded import BatchStream
from partc.runtime.data.staged_batches import write_batches
from partc.runtime.engines.machines import machines_at
from partc.runtime.engines.place import Place
from partc.runtime.errors import BadData, BadUsage, CopiesDiffer
from partc.runtime.execution.recorder import MIDDLE, TracedSteps, middle_of
from partc.runtime.jobs.check_training import check_plan_sizes, check_request, check_traced, check_trained
from partc.runtime.jobs.job import (
    Checkpoints,
    Job,
    Notice,
    outputs_file,
    read_report,
    read_times,
    variables_file,
    write_job,
)
from partc.runtime.jobs.job_folder import job_folder
from partc.runtime.jobs.launcher import OnProgress, launch
from partc.runtime.jobs.results import (
    DISAGREEING_FILE,
    LOG_FILE,
    TRAINED_FILE,
    TrainingResult,
    assemble_outputs,
)
from partc.runtime.jobs.step_outputs import read_outputs
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Plan, instructions_of
from partc.runtime.supervision.stop_signals import stopped

Array = np.ndarray[Any, np.dtype[Any]]
Batches = Iterable[Batch]

# The supervisor loses patience before ranks do: it knows for whom they wait.
_RANKS_SHARE = 2.0


class Runner:
    """Trains one plan, a daemon per rank."""

    @public
    def __init__(
        self,
        plan: PlanFolder | Path | str,
        addresses: Mapping[str, str] | None = None,
        place: Place | None = None,
    ) -> None:
        """`place`: of this process, the first, among ranks that others have started."""
        folder = plan if isinstance(plan, PlanFolder) else read_plan_folder(plan)
        # Absolute: the caller may go elsewhere before it trains.
        self._folder = PlanFolder(folder.plan, folder.path.absolute())
        self._machines = machines_at(self._folder, addresses)
        self._place = place

    @public
    def train(
        self,
        data: str | Path | Batches,
        steps: int,
        *,
        initial: Mapping[str, Array] | None = None,
        trained: int = 0,
        shuffle: bool = False,
        seed: int | None = None,
        sizes: Mapping[str, int] | None = None,
        read_after: Collection[int] = (),
        stop_when_diverged: bool = True,
        outputs: Literal["none", "loss", "all"] = "loss",
        on_progress: OnProgress | None = None,
        timeout_s: float = 600.0,
        save: bool = True,
        traced_steps: TracedSteps | Literal["middle"] = 0,
        staleness: int | None = None,
        keep_in: Path | None = None,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        metrics: Path | None = None,
        worker_restarts: int = 0,
        tells_waiting: bool = False,
        redirect: Path | None = None,
    ) -> TrainingResult:
        """Train `steps` steps and save trained.safetensors in the plan's folder, unless told not to.

        `data`: files of samples, "synthetic", "MODULE:FUNC" (runtime/data/feeds.py), or total batches.
        `shuffle`: samples of files, in every epoch anew, as the seed says. `initial`: whole variables that
        replace the plan's first values; `trained`: steps that led to them, behind which data and draws go on,
        to `steps` in all: as many of the batches are passed over. `seed`: of synthetic data and draws; None:
        0, or the resumed training's. `sizes`: symbolic sizes that differ from the plan's. `read_after`: steps
        (from 1) whose variables are returned as well. `traced_steps`: how many of the last steps, or which,
        are timed instruction by instruction; MIDDLE: some in the middle. `staleness`: of an asynchronous
        plan, the most steps that a worker may be ahead of the slowest; None: no bound. `keep_in`: a folder
        that takes the variables after `read_after`, as files (job.py), instead of the result.

        `checkpoints`: where and when the training is saved; asked to stop, it is saved after that step.
        `resume`: go on from the newest of them that is whole, to `steps` in all, perhaps none; where there
        is none, begin.
        `metrics`: a file that takes a line of every step. `worker_restarts`: how often an asynchronous worker
        that died is started again. `tells_waiting`: `on_progress` hears now and then how much each rank
        waited. `redirect`: a folder that takes what each process prints, a file for each.

        Raises the error of the rank that failed first, NotSaved if the last checkpoint could not be written,
        CopiesDiffer if `save` is asked and replicas are not equal in the end, and BadUsage while another
        process trains in the plan's folder or that of the checkpoints.
        """
        on_progress = on_progress and callers_function(on_progress)
        check_request(steps, timeout_s, read_after, worker_restarts, save and keep_in is not None)
        check_trained(trained, steps, resume)
        check_plan_sizes(sizes or {}, self._folder.plan)
        check_sessions_request(self._folder.plan, staleness, read_after, bool(traced_steps))
        plan = _plan_of_data(self._folder.plan, sizes or {})
        asked = data_asked(plan, str(data) if isinstance(data, str | Path) else "", shuffle)
        job = Job(
            plan_folder=str(self._folder.path.resolve()),
            steps=steps,
            data="",
            is_shuffled=shuffle,
            sizes=dict(sizes or {}),
            read_after=tuple(sorted(read_after)),
            stop_when_diverged=stop_when_diverged,
            outputs=outputs,
            has_initial=initial is not None,
            deadline_s=_RANKS_SHARE * timeout_s,
            data_name=asked.name,
            file_samples=asked.file_samples,
            shards=plan.replicas if isinstance(data, BatchStream) else 0,
            checkpoints=checkpoints,
            metrics_file="" if metrics is None else str(metrics.resolve()),
            tells_waiting=tells_waiting,
        )
        with self._folders(save, checkpoints):
            start = self._begin(plan, steps, trained, seed, asked, checkpoints, resume, on_progress)
            if start.checkpoint is not None and start.step == steps:
                return self._already_trained(start.checkpoint, start.step, save)
            job = _begun(job, start, traced_steps)
            rules = Rules(start.workers, staleness, worker_restarts, checkpoints)
            with job_folder(self._folder.path) as folder:
                job = _staged(plan, job, data, start, folder)
                write_job(folder, job, initial)
                result = self._play(folder, job, rules, on_progress, timeout_s, redirect)
                kept = self._keep(folder, job, result, save, keep_in)
        if kept.unsaved is not None:
            saved = f"what was trained is in {self._folder.path / TRAINED_FILE}" if save else ""
            raise kept.unsaved.error(saved)
        return kept

    def _folders(self, save: bool, checkpoints: Checkpoints | None) -> AbstractContextManager[None]:
        """Hold what a training writes: nothing, where nothing is saved."""
        return training_folders(self._folder.path, checkpoints) if save or checkpoints else nullcontext()

    def _begin(
        self,
        plan: Plan,
        steps: int,
        trained: int,
        seed: int | None,
        data: DataAsked,
        checkpoints: Checkpoints | None,
        resume: bool,
        on_progress: OnProgress | None,
    ) -> StartPoint:
        """Return where training begins, and make way for its checkpoints."""
        if resume and checkpoints is None:
            fix = "give checkpoints=Checkpoints(folder), from which it goes on"
            raise BadUsage("no checkpoints to resume from", at="Runner.train(resume=True)", fix=fix)
        begun = begin_behind(trained, plan, data.name, seed or 0)
        if checkpoints is None:
            return begun
        folder = Path(checkpoints.folder)
        remove_parts(folder)
        if not resume:
            refuse_others(folder)
            return begun
        start = resume_from(
            plan,
            folder,
            seed,
            data,
            lambda text: on_progress(Notice(text)) if on_progress else None,
        )
        if start.step > steps:
            raise BadUsage(
                f"{steps} steps, of which {start.step} are trained",
                at="--steps",
                fix="give the number of steps in all",
            )
        return start

    def _already_trained(self, checkpoint: Path, steps: int, save: bool) -> TrainingResult:
        """Return what a training came to that failed when nothing was left to it but its end."""
        stored, trained = StoredValues(checkpoint), self._folder.path / TRAINED_FILE
        if not save:
            variables = {tensor.name: piece for tensor in stored.whole() for piece in tensor.pieces}
            return TrainingResult(variables, first_step=steps)
        write_tensors(trained, stored.whole())
        return TrainingResult(map_arrays(trained, is_writable=True), first_step=steps)

    def _keep(
        self, folder: Path, job: Job, result: TrainingResult, save: bool, keep_in: Path | None
    ) -> TrainingResult:
        """Take the variables out of a job's folder before it goes."""
        if keep_in is not None:
            _move_variables(job.read_after, folder, keep_in)
            return result
        after = {step: read_arrays(variables_file(folder, step)) for step in job.read_after}
        if save:
            self._save(variables_file(folder, result.last_step), result)
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
        self,
        folder: Path,
        job: Job,
        rules: Rules,
        on_progress: OnProgress | None,
        timeout_s: float,
        redirect: Path | None,
    ) -> TrainingResult:
        """Start the processes of a job, wait for them, and collect what they made."""
        plan, machines, log = self._folder.plan, self._machines, self._folder.path / LOG_FILE
        if plan.asynchronous:
            ended = launch_sessions(plan, folder, log, machines, rules, on_progress, timeout_s, redirect)
            if ended.stopped_by and job.checkpoints is None:
                raise stopped(ended.stopped_by, "all workers")
            return collect_sessions(plan, folder, job, ended)
        hosts = [rank.host for rank in plan.ranks]
        stopped_by = launch(
            hosts, folder, log, machines, on_progress, timeout_s, place=self._place, redirect=redirect
        )
        if stopped_by and job.checkpoints is None:
            raise stopped(stopped_by, "all ranks")
        return replace(self._collect(folder, job), stopped_by=stopped_by)

    def _collect(self, folder: Path, job: Job) -> TrainingResult:
        plan = self._folder.plan
        reports = {rank.rank: read_report(folder, rank.rank) for rank in plan.ranks}
        last_step = reports[0].last_step
        return TrainingResult(
            variables=map_arrays(variables_file(folder, last_step), is_writable=True),
            outputs=tuple(_outputs(plan, folder)),
            first_step=job.first_step,
            last_step=last_step,
            waiting_s={
                rank.rank: reports[rank.rank].waiting_s for rank in plan.ranks if instructions_of(plan, rank)
            },
            data_s=max(report.data_s for report in reports.values()),
            saving_s=max(report.saving_s for report in reports.values()),
            disagreeing=reports[0].disagreeing,
            unsaved=next((report.unsaved for report in reports.values() if report.unsaved), None),
            payload_bytes={rank: report.payload_bytes for rank, report in reports.items()},
            exchanged={rank: report.exchanged for rank, report in reports.items()},
            steps_per_s=last_step / reports[0].trained_s,
            trained_s=max(report.trained_s for report in reports.values()),
            samples=next((report.samples for report in reports.values() if report.samples), None),
            times={rank: read_times(folder, rank) for rank in reports} if job.traced_steps else {},
        )


def _begun(job: Job, start: StartPoint, traced_steps: TracedSteps | Literal["middle"]) -> Job:
    """Return the job of what is left to train. Raises BadUsage if that has not the steps to trace."""
    traced = middle_of(start.step + 1, job.steps) if traced_steps == MIDDLE else traced_steps
    check_traced(traced, start.step, job.steps)
    left = msgspec.structs.replace(job, steps=job.steps - start.step, traced_steps=traced)
    return left.behind(start)


def _staged(plan: Plan, job: Job, data: str | Path | Batches, start: StartPoint, folder: Path) -> Job:
    """Return the job with its data where daemons can open it. Asynchronous workers read from the slowest on.

    Raises BadData, BadUsage.
    """
    lag = start.furthest - min(start.workers, default=start.step)
    consumed = start.batches - lag
    left = job.first_step + job.steps - start.furthest + lag
    staged, sizes = stage_data(plan, _behind(data, consumed), left, folder, consumed)
    refuse_other_sizes(job.sizes, sizes)
    data_from = 0 if isinstance(data, str | Path) else consumed
    return msgspec.structs.replace(job, data=staged, data_from=data_from, sizes=sizes | job.sizes)


def _behind(data: str | Path | Batches, consumed: int) -> str | Path | Batches:
    """Return data without the batches that were used; of files and functions, daemons skip them."""
    if isinstance(data, BatchStream):
        return data.behind(consumed)
    return data if isinstance(data, str | Path) else islice(CallersBatches(data), consumed, None)


def _plan_of_data(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """Return the plan as data sources see it, with sizes that are not its own."""
    if plan.asynchronous:
        return plan_of_data(plan, sizes)
    return msgspec.structs.replace(plan, sizes=plan.sizes | dict(sizes))


def _move_variables(steps: Iterable[int], source: Path, target: Path) -> None:
    for step in steps:
        shutil.move(variables_file(source, step), variables_file(target, step))


def _outputs(plan: Plan, folder: Path) -> Iterator[dict[str, Array]]:
    leaders = [rank.rank for rank in leaders_of(plan)]
    logs = [read_outputs(outputs_file(folder, rank)) for rank in leaders]
    for of_step in zip(*logs, strict=True):
        yield assemble_outputs(plan, dict(zip(leaders, of_step, strict=True)))


def stage_data(
    plan: Plan, data: str | Path | Batches, steps: int, folder: Path, consumed: int = 0
) -> tuple[str, dict[str, int]]:
    """Return the data as the daemons can open it, and its symbolic sizes, if one. Batches go to a file.

    `consumed`: how many batches were passed over before. Raises BadData.
    """
    if isinstance(data, Path) or (isinstance(data, str) and is_of_samples(data)):
        return str(Path(data).resolve()), {}
    if isinstance(data, str):
        return data, {}
    batches: list[dict[str, Array]] = []
    for batch in islice(data, steps):
        check_total_batch(plan, batch)
        batches.append(copied(batch))
    if len(batches) < steps:
        raise _too_few(len(batches), steps, consumed)
    if not all(_are_alike(plan, batches[0], batch) for batch in batches):
        return write_batches(plan, batches, folder), {}
    axes = {data_input.name: data_input.sample_axis for data_input in plan.data_inputs}
    arrays = {
        name: np.stack([batch[name] for batch in batches])
        if axis is None
        else np.concatenate([batch[name] for batch in batches], axis=axis)
        for name, axis in axes.items()
    }
    write_npz(folder / STAGED_FILE, arrays)
    return str(folder / STAGED_FILE), sizes_of(plan, batches[0])


def _too_few(batches: int, steps: int, consumed: int) -> BadData:
    if not consumed:
        return BadData(f"{batches} batches for {steps} steps", at="data", fix="supply a batch per step")
    return BadData(
        f"{batches} batches for {steps} steps, behind the {consumed} that are passed over as trained",
        at="data",
        fix="supply the batches of all steps, those that were trained before, too",
    )


def _are_alike(plan: Plan, first: Batch, batch: Batch) -> bool:
    return all(batch[entry.name].shape == first[entry.name].shape for entry in plan.data_inputs)
