"""`partc compile`: spread a training step over a cluster."""

from pathlib import Path

from partc.compiler.api import compile_step, decide_step
from partc.compiler.commands.arguments import compile_arguments as arguments
from partc.compiler.commands.arguments.parse_options import (
    choose_aggregation,
    parse_bytes,
    parse_mechanisms,
    parse_seconds,
    parse_sizes,
    refuse_with,
    refuse_without,
)
from partc.compiler.commands.arguments.shared_arguments import (
    AxesArgument,
    InitialArgument,
    LossArgument,
    OutArgument,
    SampleDataArgument,
    SampleStepsArgument,
    SizesArgument,
    StateArgument,
    TrainArgument,
    graph_options,
    sample_of,
)
from partc.compiler.commands.console import answer, note, tell, working_on
from partc.compiler.commands.results.plans import ComparedStrategy, Compiled, Decided, RankMemory
from partc.compiler.comparison.what_if_rows import what_if_lines
from partc.compiler.compilation import Compilation
from partc.compiler.machines.this_machine import unusable_gpus
from partc.compiler.options import PLACED, SEARCH, SEARCH_BUDGET, Options, Partitioner, SearchOptions
from partc.compiler.planning.choose_reading import are_of_outputs
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.report.choices.describe_mesh import describe_grid
from partc.compiler.report.units import seconds, size
from partc.passes.lowering.round_sums import LEAST_ELEMENTS
from partc.runtime.data.batches import fixed_sizes
from partc.runtime.plan.program import IDLE, Plan, rounding_of

EPILOG = "Example: partc compile train.onnx -c examples/cluster-2x2.json -o out"

MAX_COMPARED = 3  # strategies besides the one taken
PRICED_A_LINE = 8  # changes
MAX_SENTENCES = 4  # sentences on the terminal


@paused_collection()
def compile_command(
    train: TrainArgument,
    cluster: arguments.ClusterFile,
    out: OutArgument,
    strategy: arguments.StrategyName = "auto",
    budget: arguments.SearchBudget = SEARCH_BUDGET,
    seed: arguments.SearchSeed = 0,
    method: arguments.SearchMethodName = "auto",
    proposals: arguments.SearchProposals = None,
    together: arguments.SearchTogether = None,
    profile: arguments.ProfileFile = None,
    batch: arguments.BatchReadingName = None,
    state: StateArgument = [],
    sample_axis: AxesArgument = [],
    loss: LossArgument = "",
    initial: InitialArgument = None,
    size: SizesArgument = [],
    sample_data: SampleDataArgument = "",
    sample_steps: SampleStepsArgument = None,
    search_partitions: arguments.PartitionSearchMode = None,
    min_partitions: arguments.MinPartitions = None,
    without: arguments.DisabledMechanisms = [],
    asynchronous: arguments.Asynchronous = False,
    sum_dense: arguments.SumDense = False,
    sum_sparse: arguments.SumSparse = False,
    fetch_gradients: arguments.FetchGradients = "",
    recompute: arguments.RecomputeSize = "",
    round_sums: arguments.RoundSums = None,
    what_if: arguments.WhatIfOption = False,
    force: arguments.Force = False,
    decisions_only: arguments.DecisionsOnly = False,
) -> None:
    """Spread a training step over a cluster: segments, plan, report."""
    _refuse_without_search(strategy, budget, seed, method, proposals, together)
    refuse_without("--min-partitions", min_partitions, "--search-partitions", search_partitions is not None)
    least = 1 if min_partitions is None else min_partitions
    options = Options(
        strategy=strategy,
        search=SearchOptions(parse_seconds(budget, "--budget"), seed, method, proposals, together),
        batch=batch,
        profile=profile,
        sizes=parse_sizes(size),
        options=graph_options(state, sample_axis, loss, initial),
        sample=sample_of(sample_data, sample_steps),
        partitions=Partitioner(least, search_partitions) if search_partitions else None,
        without=parse_mechanisms(without),
        asynchronous=asynchronous,
        aggregation=choose_aggregation(sum_dense, sum_sparse, fetch_gradients),
        recompute_bytes=parse_bytes(recompute, "--recompute"),
        round_sums=round_sums or "",
        what_if=what_if,
        force=force,
    )
    if decisions_only:
        refuse_with("--what-if", what_if, "--decisions-only")
        decisions = decide_step(train, cluster, out, options)
        tell(f"{len(decisions.parameters)} parameters decided -> {out}")
        answer(Decided(str(out), len(decisions.parameters)))
        return
    with working_on("compiling"):
        compilation = compile_step(train, cluster, out, options, _show_priced)
    warnings = _warnings(compilation)
    _print_summary(compilation, out, warnings)
    answer(_record(compilation, out, warnings))


def _refuse_without_search(strategy: str, *settings: object) -> None:
    """Refuse settings of a search where none is asked for. Raises BadUsage."""
    own = {
        "--budget": SEARCH_BUDGET,
        "--seed": 0,
        "--method": "auto",
        "--proposals": None,
        "--together": None,
    }
    of_placement = ("--budget", "--seed", "--proposals")
    for (option, default), value in zip(own.items(), settings, strict=True):
        is_read = strategy == SEARCH or (strategy == PLACED and option in of_placement)
        refuse_without(option, None if value == default else value, f"--strategy {SEARCH}", is_read)


def _show_priced(done: int, total: int, following: str) -> None:
    """Say which change is priced: the first, the last, and some between."""
    if done in (0, total) or not done % PRICED_A_LINE:
        note(f"what if: {done}/{total}  {following}".rstrip())


def _warnings(compilation: Compilation) -> list[str]:
    """Return what the user should know before the plan is run."""
    warnings = []
    if rounding := rounding_of(compilation.plan):
        warnings.append(
            f"gradients are rounded to {rounding} before they are sent: not what one device trains"
        )
    elif compilation.strategy.round_sums:
        warnings.append(
            f"no gradient is rounded to {compilation.strategy.round_sums}: replicas add up none of "
            f"float32[{LEAST_ELEMENTS:,} elements] or more"
        )
    if compilation.uneven_stages:
        warnings.append(compilation.uneven_stages)
    if scarce := _scarce_memory(compilation):
        warnings.append(scarce)
    return [*warnings, *unusable_gpus(compilation.cluster)]


def _scarce_memory(compilation: Compilation) -> str:
    """Say by how much the fullest rank is predicted to exceed its device, empty where it fits."""
    fullest = max(compilation.memory, key=lambda needs: needs.needed_bytes / max(1, needs.limit_bytes))
    if fullest.needed_bytes <= fullest.limit_bytes:
        return ""
    needed, limit = size(fullest.needed_bytes), size(fullest.limit_bytes)
    device = compilation.plan.ranks[fullest.rank].device
    return f"rank {fullest.rank} is predicted to take {needed} at its fullest, {device} has {limit}"


def _record(compilation: Compilation, out: Path, warnings: list[str]) -> Compiled:
    """Return the document of --json."""
    plan, strategy = compilation.plan, compilation.strategy
    rank_by_number = {rank.rank: rank for rank in plan.ranks}
    memory = (
        RankMemory(
            m.rank,
            rank_by_number[m.rank].host,
            rank_by_number[m.rank].device,
            m.variables_bytes,
            m.buffers_bytes,
            m.values_bytes,
            m.activations_bytes,
            m.process_bytes,
            m.limit_bytes,
        )
        for m in compilation.memory
    )
    return Compiled(
        plan=str(out),
        report=str(out / "report.html"),
        ranks=len(plan.ranks),
        replicas=plan.replicas,
        batch=plan.batch,
        predicted_step_s=compilation.timeline.step_s,
        methods={name: choice.method for name, choice in strategy.parameters.items()},
        compared=tuple(ComparedStrategy(t.names, t.step_s) for t in compilation.compared),
        mesh=dict(strategy.mesh),
        stages=strategy.stages,
        microbatches=plan.microbatches,
        memory=tuple(memory),
        departures=plan.departures,
        warnings=tuple(warnings),
        phases_s=dict(compilation.watch.seconds),
        what_if=compilation.what_if,
    )


def _print_summary(compilation: Compilation, out: Path, warnings: list[str]) -> None:
    log = compilation.watch.write(out)
    methods = [choice.method for choice in compilation.strategy.parameters.values()]
    if compilation.plan.replicas > 1 or compilation.plan.asynchronous or not compilation.strategy.has_meshes:
        method_counts = ", ".join(f"{methods.count(m)} by {m}" for m in dict.fromkeys(methods))
        note(f"parameters: {method_counts or 'none that a gradient changes'}")
    _print_mesh(compilation)
    _print_compared(compilation)
    if compilation.partitions is not None:
        note(f"partitions of large variables on servers: {compilation.partitions.chosen}")
    _print_departures(compilation.plan)
    for name, axis in ((d.name, d.sample_axis) for d in compilation.plan.data_inputs):
        note(f"data input {name}: " + ("the same for all" if axis is None else f"samples on axis {axis}"))
    for name in compilation.plan.unread_inputs:
        note(f"data input {name}: not read; no data is needed for it")
    if fixed := fixed_sizes(compilation.plan):
        told = ", ".join(f"{name} = {size}" for name, size in fixed.items())
        tell(f"the plan is for {told} alone (--size)")
    if draws := compilation.plan.drawn_inputs:
        shared_count = sum(entry.sample_axis is None for entry in draws)
        note(f"drawn in every step: {len(draws)} inputs, {shared_count} of them the same for all")
    if recomputed := compilation.plan.recomputed:
        before, after = (
            f"{peak / 1e6:,.1f} MB" for peak in (recomputed.before_bytes, recomputed.after_bytes)
        )
        note(f"computed again: {recomputed.values} values; at most {after} at once instead of {before}")
    if compilation.sensitivity is not None:
        note(compilation.sensitivity.sentence())
    for warning in warnings:
        tell(f"warning: {warning}")
    step_ms = compilation.timeline.step_s * 1e3
    if workers := len(compilation.plan.asynchronous):
        note(f"asynchronous: {workers} workers, each in a session of its own with all servers")
    for line in what_if_lines(compilation.what_if):
        tell(line)
    plan = compilation.plan
    idle = sum(IDLE in rank.sites for rank in plan.ranks)
    ranks = f"{len(plan.ranks)} ranks" + (f", {idle} of them idle" if idle else "")
    tell(f"{ranks}, {step_ms:.1f} ms/step predicted -> {out}")
    note(f"report: {out / 'report.html'}   wall times: {log}")


def _print_mesh(compilation: Compilation) -> None:
    """Say what grid the workers are, where they are one, and how many parameters are kept in parts."""
    strategy = compilation.strategy
    if strategy.has_meshes:
        grid = describe_grid(strategy, compilation.lowered.meshes, " x ")
        parted = len(strategy.parameters.keys() & strategy.variables.keys())
        note(f"mesh: {grid}; {parted} of {len(strategy.parameters)} parameters kept in parts")


def _print_compared(compilation: Compilation) -> None:
    """Say which of the strategies that `auto` compared was taken, where names were among them."""
    if not any(tried.strategy.has_meshes for tried in compilation.compared):
        return
    best, *others = compilation.compared
    others = sorted(others, key=lambda tried: tried.step_s)
    estimates = ", ".join(f"{tried.names[0]} {seconds(tried.step_s)}" for tried in others[:MAX_COMPARED])
    more = f" and {len(others) - MAX_COMPARED} more" if len(others) > MAX_COMPARED else ""
    note(f"strategy: {best.names[0]}, {seconds(best.step_s)} a step; compared: {estimates}{more}")


def _print_departures(plan: Plan) -> None:
    """Say how a batch per replica departs from one device, whether it is compiled or avoided."""
    if not plan.departures:
        return
    if plan.batch == "global":
        tell("batch: global, as one device has it. Batches per replica would train something else:")
    elif are_of_outputs(plan.departures):
        tell("note: the training is what one device trains; these outputs are of each replica's own batch:")
    else:
        tell("warning: replicas on batches of their own do not make what one device makes of all of them:")
    for sentence in plan.departures[:MAX_SENTENCES]:
        tell(f"  {sentence}")
    if len(plan.departures) > MAX_SENTENCES:
        tell(f"  and {len(plan.departures) - MAX_SENTENCES} more: see the report")
    if plan.batch == "per-replica" and not are_of_outputs(plan.departures):
        tell("  exact are --batch global, and losses that are means over samples")
