"""The command line: each command reads files, calls one function, and says what came of it.

    partc model NAME -> forward.onnx      partc grad -> train.onnx      partc inspect
    partc compile    -> out/              partc run, partc verify       partc executor

Exit codes: 0 done, 1 verification failed or an executor died, 2 what the user gave must change, 3 a mistake
of partc's own.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from partc.compiler.api import inspect
from partc.compiler.arguments import (
    parse_sizes,
)
from partc.compiler.cluster_command import cluster_app
from partc.compiler.compile_command import compile_command
from partc.compiler.console import Advance, console, progress_of, tell, working_on
from partc.compiler.deploy import write_trained_model
from partc.compiler.executor_command import EXECUTOR_HELP, executor_command
from partc.compiler.grad_command import grad_command
from partc.compiler.graph_arguments import (
    Axes,
    Initial,
    Loss,
    SampleData,
    SampleSteps,
    Sizes,
    State,
    TrainFile,
    graph_options,
    sample_of,
)
from partc.compiler.list_models import list_models
from partc.compiler.measure_sparsity import SAMPLE_STEPS
from partc.compiler.model_file import write_model
from partc.compiler.output_paths import check_output_file
from partc.compiler.simulate_command import SIMULATE_HELP, TraceFile, simulate_command
from partc.compiler.traces.write_traces import HOW_TO_OPEN, write_run_trace
from partc.compiler.training.coverage import coverage, coverage_lines
from partc.compiler.verification.verify import verify
from partc.models.catalogue import MODELS, ModelRequestError, build_model, describe_options, parse_options
from partc.runtime.errors import BadUsage, PartcError, RankFailed
from partc.runtime.job import Progress
from partc.runtime.launcher import OnProgress
from partc.runtime.log import configure_log, log
from partc.runtime.plan_folder import read_plan_folder, seal_plan_folder
from partc.runtime.results import TRAINED_FILE
from partc.runtime.runner import Runner

INTERNAL_ERROR = 3

app = typer.Typer(
    name="partc",
    help="Compile one ONNX training step into the ONNX subgraphs that train it on every device of a cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PlanPath = Annotated[Path, typer.Argument(help="A plan's folder, as compile wrote it.", metavar="OUT")]
Data = Annotated[str, typer.Option(help="FILE.npz, synthetic, or MODULE:FUNC.")]


_MODEL_HELP = "\n\n".join(
    ["Example: partc model lm --set vocab=50000 --set batch=16 -o forward.onnx"]
    + [
        f"{name}: {model.description}. Options: {', '.join(o.name for o in describe_options(name))}."
        for name, model in MODELS.items()
    ]
)


@app.command("model", epilog=_MODEL_HELP)
def model_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(MODELS)}.")] = "",
    out: Annotated[Path | None, typer.Option("-o", "--output", help="File to write.")] = None,
    options: Annotated[list[str], typer.Option("--set", help="KEY=VALUE: an option of the model.")] = [],
    show: Annotated[bool, typer.Option("--list", help="Show the models and their parameters.")] = False,
) -> None:
    """Write a model of partc's own as a forward ONNX graph."""
    if show:
        console.print(list_models())
        return
    if not name or out is None:
        missing = "missing option '-o'" if name else "missing argument 'name'"
        raise BadUsage(missing, at="partc model", fix="see `partc model --help` and `partc model --list`")
    check_output_file(out)
    model = build_model(name, **parse_options(options))
    write_model(model, out)
    tell(f"{name}: {len(model.graph.node)} nodes -> {out}")


app.command(
    "grad",
    epilog="Example: partc grad forward.onnx --loss softmax_cross_entropy --optimizer momentum -o train.onnx",
)(grad_command)


@app.command("inspect", epilog="Example: partc inspect train.onnx")
def inspect_command(
    train: TrainFile,
    state: State = "",
    sample_axis: Axes = [],
    loss: Loss = "",
    initial: Initial = None,
    size: Sizes = [],
    sample_data: SampleData = "",
    sample_steps: SampleSteps = SAMPLE_STEPS,
) -> None:
    """Show variables, gradients, data inputs, and the work of one step."""
    options = graph_options(state, sample_axis, loss, initial)
    with working_on("reading"):
        inspection = inspect(
            train, sizes=parse_sizes(size), options=options, sample=sample_of(sample_data, sample_steps)
        )
    console.print(inspection.render())


app.command("compile", epilog="Example: partc compile train.onnx -c examples/cluster-2x2.json -o out")(
    compile_command
)
app.add_typer(cluster_app, name="cluster")
app.command("simulate", epilog=SIMULATE_HELP)(simulate_command)


@app.command("run", epilog=f"Example: partc run out --data synthetic --steps 100\n\n{HOW_TO_OPEN}")
def run_command(
    out: PlanPath,
    steps: Annotated[int, typer.Option(help="How many steps to train.")],
    data: Data = "synthetic",
    seed: Annotated[int, typer.Option(help="The seed of synthetic data and of what a step draws.")] = 0,
    on_nan: Annotated[
        Literal["stop", "continue"], typer.Option(help="What to do when the loss is not finite.")
    ] = "stop",
    timeout: Annotated[float, typer.Option(help="Seconds without progress that end the run.")] = 600.0,
    trace: TraceFile = None,
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
    for lost in result.lost_workers:
        tell(f"{lost}; the others trained on")
    tell(f"{steps} steps, {result.steps_per_s:.1f} steps/s -> {out / TRAINED_FILE}")
    tell(f"forward model with the trained variables -> {write_trained_model(folder)}")
    if trace is not None:
        write_run_trace(trace, folder, result.times)
        tell(f"timeline, as predicted and as measured -> {trace}")


@app.command("verify", epilog="Example: partc verify out --steps 4")
def verify_command(
    out: PlanPath,
    steps: Annotated[int, typer.Option(help="How many steps to compare.")] = 4,
    rtol: Annotated[float | None, typer.Option(help="Allowed relative error of a variable's change.")] = None,
    data: Data = "synthetic",
    seed: Annotated[int, typer.Option(help="The seed of synthetic data and of what a step draws.")] = 0,
) -> None:
    """Train on all ranks, and compare every step with one device on the same total batch."""
    with progress_of("all ranks and one device", steps) as advance:
        report = verify(out, steps=steps, rtol=rtol, data=data, seed=seed, on_step=advance)
    console.print(report.table())
    tell(("verified: " if report.passed else "NOT EQUAL: ") + report.summary())
    if not report.passed:
        raise typer.Exit(1)


@app.command("seal", epilog="Example: partc seal out")
def seal_command(out: PlanPath) -> None:
    """Accept a plan that you edited by hand: check its program, and write its hashes anew."""
    changed = seal_plan_folder(out)
    tell(f"accepted: {', '.join(changed)}" if changed else "nothing was changed: every hash is right")


app.command("executor", epilog=EXECUTOR_HELP)(executor_command)


@app.command("ops", epilog="Example: partc ops")
def ops_command() -> None:
    """List the standard ops: which of them `partc grad` differentiates, and how."""
    for line in coverage_lines(coverage()):
        tell(line)


def _showing(advance: Advance) -> OnProgress:
    def show(progress: Progress) -> None:
        loss = "" if progress.loss is None else f"loss {progress.loss:.5g}  "
        advance(progress.step, f"{loss}{progress.steps_per_s:.1f} steps/s")

    return show


def _bad_command(error: typer.TyperException, given: Sequence[str]) -> BadUsage:
    known = {command.name for command in app.registered_commands}
    command = f"partc {given[0]}" if given[0] in known else "partc"
    what = error.format_message().removesuffix(".")
    what = what.replace("Value error, ", "")
    return BadUsage(what[0].lower() + what[1:], at=f"`{command}`", fix=f"see `{command} --help`")


def _bad_file(error: OSError) -> BadUsage:
    return BadUsage(
        error.strerror or str(error),
        at=str(error.filename2 or error.filename or "the files read and written"),
        fix="give paths that this user can read and write, on a disk that has room",
    )


def _no_memory(error: MemoryError) -> BadUsage:
    return BadUsage(
        f"not enough memory: {error}", at=_own_frame(error), fix="use a machine with more, or smaller sizes"
    )


def _own_frame(error: Exception) -> str:
    """Return the last place in partc's own code that an exception came through."""
    own = Path(__file__).parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).is_relative_to(own) and "site-packages" not in f.filename]
    frame = (inside or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def _internal(error: Exception) -> str:
    """Return what to say of an exception that nobody foresaw: a mistake of partc's, not of the user's."""
    told = "".join(traceback.format_exception_only(error)).strip()
    return str(
        PartcError(
            f"internal error: {told}",
            at=_own_frame(error),
            fix="this is a mistake of partc: report it with the command and its files "
            "(PARTC_LOG_LEVEL=DEBUG shows more)",
        )
    )


def exit_code_of(command: Callable[[], object], given: Sequence[str] = ()) -> int:
    """Run a command; tell what went wrong on stderr, and return the exit code."""
    try:
        code = command()
    except (PartcError, ModelRequestError) as error:
        print(f"partc: {error}", file=sys.stderr)
        return 1 if isinstance(error, RankFailed) else 2
    except typer.TyperException as error:
        print(f"partc: {_bad_command(error, given)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"partc: {_bad_file(error)}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"partc: {_no_memory(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("partc: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # the last resort: an honest word instead of a traceback
        log.debug("an internal error", exc_info=error)
        print(f"partc: {_internal(error)}", file=sys.stderr)
        return INTERNAL_ERROR
    return code if isinstance(code, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Never shows a traceback for the user's mistakes."""
    given = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> object:
        configure_log()
        return app(args=given or ["--help"], prog_name="partc", standalone_mode=False)

    return exit_code_of(run, given)


if __name__ == "__main__":
    sys.exit(main())
