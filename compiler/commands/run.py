"""`partc run`: train a plan."""

from typing import Annotated, Literal

import typer

from partc.compiler.commands.console import Advance, progress_of, tell
from partc.compiler.commands.graph_arguments import DataArgument, PlanArgument, TraceArgument
from partc.compiler.output.deploy import write_trained_model
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.traces.write_traces import HOW_TO_OPEN, write_run_trace
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.launcher import OnProgress
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import read_plan_folder

EPILOG = f"Example: partc run out --data synthetic --steps 100\n\n{HOW_TO_OPEN}"


def run_command(
    out: PlanArgument,
    steps: Annotated[int, typer.Option(help="How many steps to train.")],
    data: DataArgument = "synthetic",
    seed: Annotated[int, typer.Option(help="The seed of synthetic data and of what a step draws.")] = 0,
    on_nan: Annotated[
        Literal["stop", "continue"], typer.Option(help="What to do when the loss is not finite.")
    ] = "stop",
    timeout: Annotated[float, typer.Option(help="Seconds without progress that end the run.")] = 600.0,
    trace: TraceArgument = None,
    trace_steps: Annotated[int, typer.Option(min=1, help="How many of the last steps a trace shows.")] = 3,
    staleness: Annotated[
        int | None,
        typer.Option(help="Of an asynchronous plan: the most steps a worker may be ahead of the slowest."),
    ] = None,
) -> None:
    """Train: one executor daemon per device; save the trained variables."""
    if trace is not None:
        check_output_file(trace)
    folder = read_plan_folder(out)
    with progress_of("training", steps) as advance:
        result = Runner(folder).train(
            data,
            steps,
            seed=seed,
            stop_when_diverged=on_nan == "stop",
            on_progress=_showing(advance),
            timeout_s=timeout,
            traced_steps=trace_steps if trace else 0,
            staleness=staleness,
        )
    for worker in result.lost_workers:
        tell(f"{worker}; the others trained on")
    tell(f"{steps} steps, {result.steps_per_s:.1f} steps/s -> {out / TRAINED_FILE}")
    tell(f"forward model with the trained variables -> {write_trained_model(folder)}")
    if trace is not None:
        write_run_trace(trace, folder, result.times)
        tell(f"timeline, as predicted and as measured -> {trace}")


def _showing(advance: Advance) -> OnProgress:
    def show(progress: Progress) -> None:
        loss = "" if progress.loss is None else f"loss {progress.loss:.5g}  "
        advance(progress.step, f"{loss}{progress.steps_per_s:.1f} steps/s")

    return show
