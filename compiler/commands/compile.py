"""`partc compile`: spread a training step over a cluster."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from partc.compiler.api import compile_step, decide_step
from partc.compiler.commands.arguments import choose_aggregation, parse_bytes, parse_mechanisms, parse_sizes
from partc.compiler.commands.console import tell, working_on
from partc.compiler.commands.graph_arguments import (
    Axes,
    Initial,
    Loss,
    Out,
    SampleData,
    SampleSteps,
    Sizes,
    State,
    TrainFile,
    graph_options,
    sample_of,
)
from partc.compiler.compilation import Compilation
from partc.compiler.options import SAMPLE_STEPS, Options, Partitioner, SearchMode
from partc.runtime.plan.program import Plan

EPILOG = "Example: partc compile train.onnx -c examples/cluster-2x2.json -o out"

MAX_SENTENCES = 4  # sentences on the terminal


def compile_command(
    train: TrainFile,
    cluster: Annotated[Path, typer.Option("-c", "--cluster", help="cluster.json, or a resource file.")],
    out: Out,
    strategy: Annotated[str, typer.Option(help="auto, hybrid, allreduce, ps, or a strategy.json.")] = "auto",
    batch: Annotated[
        Literal["per-replica", "global"] | None,
        typer.Option(
            help="What the graph's batch is: one replica's, or the whole. Left out: one replica's where that "
            "is proven to train what one device trains, else the whole."
        ),
    ] = None,
    state: State = "",
    sample_axis: Axes = [],
    loss: Loss = "",
    initial: Initial = None,
    size: Sizes = [],
    sample_data: SampleData = "",
    sample_steps: SampleSteps = SAMPLE_STEPS,
    search_partitions: Annotated[
        SearchMode | None,
        typer.Option(
            help="Choose the partitions of large variables on servers: by the cost model, or by short runs; "
            "off takes the minimum."
        ),
    ] = None,
    min_partitions: Annotated[int, typer.Option(help="The fewest partitions to consider.")] = 1,
    without: Annotated[
        list[str],
        typer.Option(
            help="Switch a mechanism off: local-aggregation, post-aggregation or boundary-ops; repeatable."
        ),
    ] = [],
    asynchronous: Annotated[
        bool,
        typer.Option(
            "--asynchronous",
            help="Workers push and pull without waiting for each other: not what one device trains.",
        ),
    ] = False,
    sum_dense: Annotated[
        bool, typer.Option("--sum-dense", help="Sum dense gradients over replicas: no average.")
    ] = False,
    sum_sparse: Annotated[
        bool, typer.Option("--sum-sparse", help="Sum sparse gradients over replicas: no average.")
    ] = False,
    fetch_gradients: Annotated[
        str,
        typer.Option(help="Parameters NAME,... whose aggregated gradients are outputs: NAME.aggregated."),
    ] = "",
    recompute: Annotated[
        str,
        typer.Option(
            help="SIZE, such as 800MB, that a step's values may take at once: others are computed again.",
            metavar="SIZE",
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace trained variables that lie in the output folder.")
    ] = False,
    decisions_only: Annotated[
        bool,
        typer.Option(
            "--decisions-only",
            help="Write train.onnx, strategy.json and cluster.json, from which ranks make their segments.",
        ),
    ] = False,
) -> None:
    """Spread a training step over a cluster: segments, plan, report."""
    options = Options(
        strategy=strategy,
        batch=batch,
        sizes=parse_sizes(size),
        options=graph_options(state, sample_axis, loss, initial),
        sample=sample_of(sample_data, sample_steps),
        partitions=Partitioner(min_partitions, search_partitions) if search_partitions else None,
        without=parse_mechanisms(without),
        asynchronous=asynchronous,
        aggregation=choose_aggregation(sum_dense, sum_sparse, fetch_gradients),
        recompute_bytes=parse_bytes(recompute, "--recompute"),
        force=force,
    )
    if decisions_only:
        decisions = decide_step(train, cluster, out, options)
        tell(f"{len(decisions.parameters)} parameters decided -> {out}")
        return
    with working_on("compiling"):
        compilation = compile_step(train, cluster, out, options)
    _print_summary(compilation, out)


def _print_summary(made: Compilation, out: Path) -> None:
    log = made.watch.write(out)
    methods = [choice.method for choice in made.strategy.parameters.values()]
    counted = ", ".join(f"{methods.count(m)} by {m}" for m in dict.fromkeys(methods))
    tell(f"parameters: {counted}")
    if made.partitions is not None:
        tell(f"partitions of large variables on servers: {made.partitions.chosen}")
    _print_departures(made.plan)
    for name, axis in ((d.name, d.sample_axis) for d in made.plan.data_inputs):
        tell(f"data input {name}: " + ("the same for all" if axis is None else f"samples on axis {axis}"))
    for name in made.plan.unread_inputs:
        tell(f"data input {name}: not read; no data is needed for it")
    if draws := made.plan.drawn_inputs:
        shared = sum(drawn.sample_axis is None for drawn in draws)
        tell(f"drawn in every step: {len(draws)} inputs, {shared} of them the same for all")
    if again := made.plan.recomputed:
        was, now = (f"{peak / 1e6:,.1f} MB" for peak in (again.before_bytes, again.after_bytes))
        tell(f"computed again: {again.values} values; at most {now} at once instead of {was}")
    if made.doubt is not None:
        tell(made.doubt.sentence())
    step_ms = made.timeline.step_s * 1e3
    if workers := len(made.plan.asynchronous):
        tell(f"asynchronous: {workers} workers, each in a session of its own with all servers")
    tell(f"{len(made.plan.ranks)} ranks, {step_ms:.1f} ms/step predicted -> {out}")
    tell(f"report: {out / 'report.html'}   wall times: {log}")


def _print_departures(plan: Plan) -> None:
    """Say how a batch per replica departs from one device, whether it is compiled or avoided."""
    if not plan.departures:
        return
    if plan.batch == "global":
        tell("batch: global, as one device has it. Batches per replica would train something else:")
    else:
        tell("warning: replicas on batches of their own do not make what one device makes of all of them:")
    for sentence in plan.departures[:MAX_SENTENCES]:
        tell(f"  {sentence}")
    if len(plan.departures) > MAX_SENTENCES:
        tell(f"  and {len(plan.departures) - MAX_SENTENCES} more: see the report")
    if plan.batch == "per-replica":
        tell("  exact are --batch global, and losses that are means over samples")
