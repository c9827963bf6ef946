"""`partc run`: train a plan."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from partc.compiler.commands.arguments import run_arguments as arguments
from partc.compiler.commands.arguments.parse_options import (
    parse_endpoint,
    parse_interval,
    parse_steps,
    refuse_without,
)
from partc.compiler.commands.arguments.shared_arguments import (
    CheckpointsOption,
    DataArgument,
    PlanArgument,
    TraceArgument,
    checkpoints_of,
)
from partc.compiler.commands.console import Advance, announce, answer, note, progress_of, tell
from partc.compiler.commands.results.trainings import Trained
from partc.compiler.comparison.explain_run import ExplainedRun, explain_run
from partc.compiler.output.deploy import write_trained_model
from partc.compiler.output.materialise import CLUSTER
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.output.write_measured import write_measured
from partc.compiler.recompile import HostsLeft
from partc.compiler.report.units import percent, seconds
from partc.compiler.traces.write_traces import HOW_TO_OPEN, write_run_trace
from partc.cost.cluster.cluster import read_cluster
from partc.runtime.checkpoints.training_folders import training_folders
from partc.runtime.engines.external_launch import check_place, take_place
from partc.runtime.errors import BadUsage
from partc.runtime.execution.recorder import MIDDLE, TracedSteps
from partc.runtime.jobs.job import Checkpoints, JobMessage, Notice, Progress, Restarted
from partc.runtime.jobs.job_folder import locked_folder
from partc.runtime.jobs.launcher import OnProgress
from partc.runtime.jobs.metrics import METRICS_FILE
from partc.runtime.jobs.metrics_port import MetricsPort
from partc.runtime.jobs.restarts import train_with_restarts
from partc.runtime.jobs.results import TRAINED_FILE, TrainingResult
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Plan

SLOW_DATA = 0.05  # of the time
UNEQUAL_WAITING = 0.1
WORKER_RESTARTS = 3
KEPT = 3  # checkpoints, if nothing is said
TRACED = "3"  # the last three steps
EPILOG = (
    "Asked to stop (Ctrl-C, SIGTERM, SIGHUP), it ends after the step under way with a checkpoint, from which "
    "--resume goes on, with this plan or another one of the same model.\n\n"
    f"Example: partc run out --data synthetic --steps 100\n\n{HOW_TO_OPEN}"
)


def run_command(
    out: PlanArgument,
    steps: arguments.Steps,
    data: DataArgument = "synthetic",
    shuffle: arguments.Shuffle = False,
    seed: arguments.Seed = None,
    save_every: arguments.SaveEvery = "",
    keep: arguments.Keep = None,
    checkpoints: CheckpointsOption = None,
    resume: arguments.Resume = False,
    restarts: arguments.Restarts = None,
    min_hosts: arguments.MinHosts = 0,
    on_nan: arguments.OnNan = "stop",
    timeout: arguments.Timeout = 600.0,
    trace: TraceArgument = None,
    trace_steps: arguments.TraceSteps = None,
    staleness: arguments.MostStaleness = None,
    metrics_port: arguments.MetricsEndpoint = "",
) -> int:
    """Train: one executor daemon per device; save the trained variables."""
    place = take_place()
    refuse_without("--trace-steps", trace_steps, "--trace", trace is not None)
    refuse_without("--keep", keep, "--save-every", bool(save_every))
    if trace is not None:
        check_output_file(trace, (data,))
    with ExitStack() as at_the_end:  # from before the plan is read until its variables are written
        at_the_end.enter_context(locked_folder(out))
        folder = read_plan_folder(out)
        if place is not None:
            check_place(place, len(folder.plan.ranks), restarts or 0, bool(folder.plan.asynchronous))
        steps_apart, seconds_apart = parse_interval(save_every, "--save-every")
        checkpoint_folder = checkpoints_of(out, checkpoints).resolve()
        _check_min_hosts(folder, min_hosts, restarts)
        traced = parse_steps(trace_steps or TRACED, "--trace-steps") if trace else _untold(folder.plan)
        endpoint = parse_endpoint(metrics_port, "--metrics-port")
        saves = Checkpoints(str(checkpoint_folder), steps_apart, seconds_apart, keep or KEPT)
        at_the_end.enter_context(training_folders(out, saves))
        hosts_left, last = HostsLeft(folder, min_hosts, note), _LastProgress()
        with _telling(hosts_left, steps, endpoint, last) as on_progress:

            def restart(text: str) -> None:
                note(text)
                on_progress(Restarted("all ranks"))

            def train(resume: bool) -> TrainingResult:
                return Runner(hosts_left.folder, place=place).train(
                    data,
                    steps,
                    shuffle=shuffle,
                    seed=seed,
                    stop_when_diverged=on_nan == "stop",
                    outputs="none",
                    on_progress=on_progress,
                    timeout_s=timeout,
                    traced_steps=traced,
                    staleness=staleness,
                    checkpoints=saves,
                    resume=resume,
                    metrics=out / METRICS_FILE,
                    worker_restarts=WORKER_RESTARTS if restarts is None else restarts,
                    tells_waiting=endpoint is not None,
                )

            result = train_with_restarts(train, restarts or 0, resume, restart, look=hosts_left.look)
        return _tell_result(hosts_left.folder, result, steps, checkpoint_folder, trace, last)


def _check_min_hosts(folder: PlanFolder, min_hosts: int, restarts: int | None) -> None:
    if min_hosts and not restarts:
        raise BadUsage(
            "nothing is started again without --restarts",
            at=f"--min-hosts {min_hosts}",
            fix="say how often: --restarts 3",
        )
    hosts = len(read_cluster(folder.path / CLUSTER).hosts) if min_hosts else 0
    if min_hosts > hosts:
        raise BadUsage(
            f"{min_hosts} hosts at least, of which the plan has {hosts}",
            at=f"--min-hosts {min_hosts}",
            fix=f"ask for {hosts} or fewer",
        )


class _LastProgress:
    """Hears the last loss that is told, and since when it is no number. `metrics_url`: where metrics were."""

    metrics_url = ""
    loss: float | None = None
    not_finite_since = 0

    def hear(self, message: JobMessage) -> None:
        """Take in what a job tells."""
        if isinstance(message, Progress):
            self.loss, self.not_finite_since = message.loss, message.not_finite_since


@contextmanager
def _telling(
    hosts_left: HostsLeft, steps: int, endpoint: tuple[str, int] | None, last: _LastProgress
) -> Iterator[OnProgress]:
    """Tell what a job tells to everyone who hears it: the terminal, Prometheus, and the last loss."""
    hears: list[OnProgress] = []
    with ExitStack() as at_the_end:
        if endpoint is not None:
            port = at_the_end.enter_context(MetricsPort(*endpoint))
            (note if endpoint[1] else announce)(f"metrics: {port.url}")
            last.metrics_url = port.url
            hears.append(port.hear)
        hears.append(last.hear)
        advance = at_the_end.enter_context(progress_of("training", steps))
        hears.append(_showing(advance, lambda: hosts_left.folder))

        def on_progress(message: JobMessage) -> None:
            for hear in hears:
                hear(message)

        yield on_progress


def _tell_result(
    folder: PlanFolder,
    result: TrainingResult,
    steps: int,
    checkpoint_folder: Path,
    trace: Path | None,
    last: _LastProgress,
) -> int:
    """Say what a training came to, write what belongs beside its variables, and return the exit code."""
    for line in _summary(folder, result):
        tell(line)
    model = write_trained_model(folder)
    tell(f"forward model with the trained variables -> {model}")
    if trace is not None:
        write_run_trace(trace, folder, result.times)
        tell(f"timeline, as predicted and as measured -> {trace}")
    explained = explain_run(folder, result.times)
    if explained is not None:
        write_measured(folder, explained)
    if result.last_step:
        tell(_step_line(folder, result, explained))
    if last.not_finite_since:
        tell(
            f"the loss is not finite since step {last.not_finite_since}: the trained variables are of no use"
        )
    done = result.first_step + result.last_step
    if done < steps:
        tell(
            f"stopped after step {done} of {steps}, saved in {checkpoint_folder}: --resume goes on from there"
        )
    written = {
        "model": str(model),
        "checkpoints": str(checkpoint_folder),
        "trace": "" if trace is None else str(trace),
        "metrics_url": last.metrics_url,
    }
    written |= {"reason": explained.record.reason if explained is not None else ""}
    answer(_record(folder, result, steps, last, written))
    return 0 if done == steps else 128 + (result.stopped_by or signal.SIGTERM)


def _record(
    folder: PlanFolder, result: TrainingResult, steps: int, last: _LastProgress, written: Mapping[str, str]
) -> Trained:
    """Return the document of --json. `written`: what the run wrote beside its variables -> where."""
    plan = folder.plan
    return Trained(
        plan=str(folder.path),
        requested_steps=steps,
        first_step=result.first_step,
        steps=result.first_step + result.last_step,
        step_s=1 / result.steps_per_s if result.last_step else None,
        predicted_step_s=plan.predicted_step_s,
        samples_per_s=_samples_per_s(result),
        loss=last.loss,
        not_finite_since=last.not_finite_since,
        waited={str(rank): share for rank, share in result.waited.items()},
        data_waited=result.data_waited,
        lost_workers=result.lost_workers,
        stopped_by=result.stopped_by,
        variables=str(folder.path / TRAINED_FILE),
        **written,
    )


def _summary(folder: PlanFolder, result: TrainingResult) -> Iterator[str]:
    """Yield what a training came to, and who kept it waiting."""
    for worker in result.lost_workers:
        yield f"{worker}; the others trained on"
    if not result.last_step:
        if result.first_step:
            yield f"{result.first_step} steps, all of them before -> {folder.path / TRAINED_FILE}"
        return
    done = result.first_step + result.last_step
    speed = f"{result.steps_per_s:.1f} steps/s"
    if (samples_per_s := _samples_per_s(result)) is not None:
        speed += f", {samples_per_s:,.0f} samples/s"
    before = f", {result.first_step} of them before" if result.first_step else ""
    yield f"{done} steps{before}, {speed} -> {folder.path / TRAINED_FILE}"
    shares = result.waited
    slowest, most = min(shares, key=shares.__getitem__, default=0), max(shares.values(), default=0.0)
    if shares and most - shares[slowest] > UNEQUAL_WAITING:
        place = next(rank for rank in folder.plan.ranks if rank.rank == slowest)
        yield (
            f"slowest: rank {slowest} ({place.device}), which waited for others "
            f"{percent(shares[slowest])} of the time; the one that waited most: {percent(most)}"
        )
    if result.data_waited > SLOW_DATA:
        share = percent(result.data_waited)
        yield f"a rank waited for data {share} of the time: it is read more slowly than it is used"


def _untold(plan: Plan) -> TracedSteps | Literal["middle"]:
    """Return the steps to time where no trace is asked for: asynchronous plans have no common step."""
    return 0 if plan.asynchronous else MIDDLE


def _step_line(folder: PlanFolder, result: TrainingResult, explained: ExplainedRun | None) -> str:
    """Say what a step took beside its prediction, and why."""
    if explained is not None:
        return f"a step: {explained.line}"
    step_s = 1 / result.steps_per_s
    return (
        f"a step: predicted {seconds(folder.plan.predicted_step_s)}, measured {seconds(step_s)} in the mean"
    )


def _samples_per_s(result: TrainingResult) -> float | None:
    """Return how many samples a second took in the mean of the run; None where nobody has counted them."""
    if result.samples is None or not result.last_step:
        return None
    return result.samples / result.last_step * result.steps_per_s


def _showing(advance: Advance, folder: Callable[[], PlanFolder]) -> OnProgress:
    def show(message: JobMessage) -> None:
        match message:
            case Notice(text=text):
                note(text)
            case Progress(step=step):
                advance(step, _describe(message, folder()))

    return show


def _describe(progress: Progress, folder: PlanFolder) -> str:
    """Say how a training goes: loss, speed as measured and as predicted, and who keeps others waiting."""
    words = [] if progress.loss is None else [f"loss {progress.loss:.5g}"]
    if progress.not_finite_since:
        words.append(f"loss not finite since step {progress.not_finite_since}")
    speed = f"{progress.steps_per_s:.1f} steps/s"
    if progress.samples_per_s is not None:
        speed += f", {progress.samples_per_s:,.0f} samples/s"
    words.append(speed)
    predicted_s = folder.plan.predicted_step_s
    words.append(f"a step {seconds(1 / progress.steps_per_s)}, predicted {seconds(predicted_s)}")
    if (straggler := progress.straggler) is not None:
        waits, others = percent(straggler.waited), percent(straggler.others_waited)
        words.append(f"slowest: rank {straggler.rank} waits {waits}, others up to {others}")
    if progress.data_waited > SLOW_DATA:
        words.append(f"waits for data {percent(progress.data_waited)}")
    return "  ".join(words)
