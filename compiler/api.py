"""What the command line does, as functions of Python."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Concatenate, ParamSpec, get_args

import onnx

from partc.compiler.comparison.price_changes import PriceChanges, ShowPriced, show_nothing
from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.inspect import Inspection, inspect_graph
from partc.compiler.kernel_times.list_kernels import StepKernels, list_kernels
from partc.compiler.kernel_times.read_times import with_times
from partc.compiler.options import PLACED, SEARCH, GraphOptions, Options, Partitioner, Sample
from partc.compiler.output.materialise import write_decisions
from partc.compiler.output.output_paths import check_new_folder, check_output_folder
from partc.compiler.pipeline import COMPILE, DECIDE, write_plan
from partc.compiler.planning.check_kernels import check_cpu_kernels
from partc.compiler.planning.choose_partitions import (
    describe_fit,
    fit_partitions,
    get_partitioner,
    measure_partitions,
    quickest,
    sample_partitions,
)
from partc.compiler.planning.choose_reading import describe_departures, judge_step
from partc.compiler.planning.measure_sparsity import measure_sparsity
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.search.decide_strategy import decide_strategy
from partc.compiler.search.name_what_fits import may_share_variables, name_what_fits
from partc.compiler.search.search_result import SearchResult, Show
from partc.compiler.settle_options import fill_sizes, settle_options
from partc.compiler.verification.verify import verify
from partc.cost.assignment.partitions import check_partitions
from partc.cost.cluster.cluster import Cluster, read_any_cluster
from partc.cost.strategy import Mode, Strategy
from partc.models.catalogue import ModelRequestError
from partc.models.catalogue import build_model as build_catalogued
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.roles.find_gradients import find_gradients
from partc.passes.rules.sharding_rules import count_flops
from partc.runtime.callers_code import callers_function
from partc.runtime.check_arguments import check_call, public
from partc.runtime.errors import (
    BadCluster,
    BadModel,
    BadStrategy,
    BadUsage,
    DoesNotFit,
    NoPlacement,
    OverLimit,
    UnsupportedModel,
    naming,
)
from partc.runtime.jobs.job_folder import locked_folder
from partc.runtime.log import log
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder

MEASURING = ("measured", "fitted")  # searches for the number of partitions that run steps
MOST_PARTITIONS = 4  # of each server: more are not sampled
ABOUT_THE_MODEL = (BadModel, UnsupportedModel, BadUsage)
Train = str | Path | onnx.ModelProto
Fields = ParamSpec("Fields")

__all__ = ["build_model", "build_training_graph", "compile", "get_partitioner", "inspect", "search", "verify"]


def _compiler_for(
    make_options: Callable[Fields, Options],
) -> Callable[Concatenate[Train, str | Path | Cluster, str | Path, Fields], PlanFolder]:
    """Return `compile` with the options as keywords: their names and types are those of the one record."""

    @public
    def compile(
        train: Train,
        cluster: str | Path | Cluster,
        out: str | Path,
        /,
        *positional: Fields.args,
        **fields: Fields.kwargs,
    ) -> PlanFolder:
        """Compile a training step for a cluster, and return the plan and its folder, as Runner takes it.

        Keywords: the fields of Options. Raises PartcError.
        """
        if positional:
            fix = "name what follows the output, such as strategy='auto': the fields of Options"
            raise BadUsage("more than a step, a cluster and an output without names", at="compile()", fix=fix)
        check_call(make_options, positional, fields)
        compile_step(train, cluster, out, make_options(*positional, **fields))
        return read_plan_folder(out)

    return compile


compile = _compiler_for(Options)


@paused_collection()
def compile_step(
    train: Train,
    cluster: str | Path | Cluster,
    out: str | Path,
    options: Options,
    show_priced: ShowPriced = show_nothing,
) -> Compilation:
    """Compile a training step for a cluster into the folder `out`. Raises PartcError.

    `show_priced` is told of each change that `options.what_if` prices.
    """
    check_output_folder(Path(out), options.force)
    with locked_folder(Path(out)):
        return _compile_into(Path(out), train, cluster, options, show_priced)


def _compile_into(
    out: Path, train: Train, cluster: str | Path | Cluster, options: Options, show_priced: ShowPriced
) -> Compilation:
    if options.what_if and options.asynchronous:
        raise BadUsage(
            "workers that do not wait for each other have no common step to price",
            at="--what-if with --asynchronous",
            fix="leave one of the two out",
        )
    machines = _machines(cluster)
    options = _search_where_asked(train, machines, with_times(options, machines))
    if isinstance(options.partitions, Partitioner) and options.partitions.search in MEASURING:
        partitions = _measure_partitions(train, machines, options, options.partitions)
        options = replace(options, partitions=partitions)
    with _naming_files(train, cluster, options), _naming_what_fits(train, machines, options):
        compilation = decide_strategy(
            lambda: _read_graph(train, options.options), machines, options, COMPILE, follows_annotations=True
        )
        if options.what_if:
            compilation.price_changes = PriceChanges(
                lambda: _read_graph(train, options.options), machines, options, show_priced
            )
        return write_plan(compilation, out)


def decide_step(train: Train, cluster: str | Path | Cluster, out: str | Path, options: Options) -> Strategy:
    """Decide as `compile_step` does, and write the decisions alone into `out`. Raises PartcError.

    From them `partc executor --materialise` makes any rank's segments.
    """
    search = options.partitions.search if isinstance(options.partitions, Partitioner) else "off"
    if options.asynchronous or search in MEASURING:
        other = "--asynchronous" if options.asynchronous else f"--search-partitions {search}"
        raise BadUsage(
            "a strategy file cannot say this, or not before anything ran",
            at=f"--decisions-only with {other}",
            fix="leave one of the two out",
        )
    check_new_folder(Path(out))
    machines = _machines(cluster)
    options = _search_where_asked(train, machines, with_times(options, machines))
    with _naming_files(train, cluster, options), _naming_what_fits(train, machines, options):
        compilation = decide_strategy(
            lambda: _read_graph(train, options.options), machines, options, DECIDE, follows_annotations=True
        )
        return write_decisions(compilation, Path(out))


@public
def search(
    train: Train,
    cluster: str | Path | Cluster,
    options: Options,
    show: Show = lambda best, data_parallel: None,
) -> SearchResult:
    """Find a quick strategy as `options.search` asks for it. Raises PartcError.

    `show` is told of each improvement, and of data parallelism. `options.strategy` is not asked for.
    """
    from partc.compiler.search.search_strategies import search_strategies  # numba takes a third of a second

    machines, show = _machines(cluster), callers_function(show)
    options = replace(with_times(options, machines), strategy="auto")
    with _naming_files(train, cluster, options):
        return search_strategies(
            lambda: _read_graph(train, options.options), machines, options, options.search, show
        )


def kernels_of(
    train: Train, cluster: str | Path | Cluster, options: Options, with_parts: bool
) -> StepKernels:
    """List the kernels of a step, and of the parts that a search may choose. Raises PartcError."""
    machines = _machines(cluster)
    with _naming_files(train, cluster, options):
        return list_kernels(lambda: _read_graph(train, options.options), machines, options, with_parts)


@public
def inspect(
    train: Train,
    *,
    sizes: Mapping[str, int] | None = None,
    options: GraphOptions | None = None,
    sample: Sample | None = None,
) -> Inspection:
    """Look at a training step: variables, gradients, data inputs, work, operator groups. Raises PartcError.

    Variables need no first values here. `sample`: data from which the rows that a step of one replica touches
    are measured.
    """
    with naming(train, *ABOUT_THE_MODEL):
        graph = import_training_graph(train, options or GraphOptions(), needs_initial=False)
        refusal = _refusal_of_kernels(graph)
        find_gradients(graph)
        all_sizes = fill_sizes(sizes or {}, graph)
        sparsity = measure_sparsity(graph, sample, all_sizes, "per-replica", {1}) if sample else None
        departures = describe_departures(judge_step(graph, all_sizes))
        facts = infer_facts(graph, all_sizes)
        return inspect_graph(graph, count_flops(graph, facts), sparsity, departures, facts, refusal)


@public
def build_model(name: str, **options: object) -> onnx.ModelProto:
    """Build the forward graph of a model of partc's own, by its name and options. Raises BadUsage."""
    try:
        return build_catalogued(name, **options)
    except ModelRequestError as error:  # models stand alone, and know no error of partc's
        raise BadUsage(error.what, at=error.at, fix=error.fix) from error


def _refusal_of_kernels(graph: TrainingGraph) -> str:
    """Return in what words compiling for CPUs refuses the step's element types, or nothing."""
    try:
        check_cpu_kernels(graph)
    except UnsupportedModel as refusal:
        return str(refusal)
    return ""


def _read_graph(train: Train, options: GraphOptions) -> TrainingGraph:
    with naming(train, *ABOUT_THE_MODEL):
        return import_training_graph(train, options)


def _machines(cluster: str | Path | Cluster) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else read_any_cluster(Path(cluster))


def _search_where_asked(train: Train, cluster: Cluster, options: Options) -> Options:
    """Return the options with the strategy that a search or a placement finds, where that was asked for."""
    if options.strategy not in (SEARCH, PLACED):
        return options
    if options.asynchronous:
        raise BadUsage(
            "workers that do not wait for each other have no step to make quicker",
            at=f"--strategy {options.strategy} with --asynchronous",
            fix="leave one of the two out",
        )
    if options.strategy == SEARCH:
        strategy = search(train, cluster, options).best.strategy
    else:
        from partc.compiler.search.place_operators import place_operators

        with _naming_files(train, cluster, replace(options, strategy="auto")):
            strategy = place_operators(lambda: _read_graph(train, options.options), cluster, options)
    return replace(options, strategy=strategy, batch=strategy.batch, strategy_name=options.strategy)


@contextmanager
def _naming_files(train: Train, cluster: str | Path | Cluster, options: Options) -> Iterator[None]:
    """Let every refusal name the file that it is about."""
    of_strategy = () if options.strategy in get_args(Mode) else (BadStrategy,)
    with (
        _naming_limit(options),
        naming(train, *ABOUT_THE_MODEL),
        naming(cluster, BadCluster, NoPlacement),
        naming(options.strategy, *of_strategy),
    ):
        yield


@contextmanager
def _naming_limit(options: Options) -> Iterator[None]:
    """Let a refusal of a limit say where it was given: as an option, or in the strategy's file."""
    try:
        yield
    except OverLimit as error:
        limit, file = options.recompute_bytes, options.strategy
        at = "recompute_bytes" if limit is None else f"--recompute {limit}"
        if limit is None and isinstance(file, str | Path):
            at = f"{file}: {at}"
        raise OverLimit(error.what, at=at, fix=error.fix) from error


@contextmanager
def _naming_what_fits(train: Train, cluster: Cluster, options: Options) -> Iterator[None]:
    """Let a refusal for lack of memory name a strategy that fits."""
    try:
        yield
    except DoesNotFit as refusal:
        if not may_share_variables(options):
            raise
        graphs = (_read_graph(train, options.options) for _ in count())
        settled = settle_options(options, next(graphs))
        raise name_what_fits(refusal, graphs, cluster, settled) from refusal


def _measure_partitions(train: Train, cluster: Cluster, options: Options, partitioner: Partitioner) -> int:
    """Return the number of partitions that trains quickest, by short runs. Raises PartcError."""
    simulated_s: dict[int, float] = {}

    def compile_with(count: int, folder: Path) -> PlanFolder:
        compile_step(train, cluster, folder, replace(options, partitions=count))
        compiled = read_plan_folder(folder)
        simulated_s[count] = compiled.plan.predicted_step_s
        return compiled

    least = partitioner.min_partitions
    most = check_partitions(cluster, least)
    if partitioner.search == "measured":
        return quickest(measure_partitions(range(least, most + 1), compile_with))
    servers = max(1, sum(host.server for host in cluster.hosts))
    measured_s = sample_partitions(
        lambda count: measure_partitions([count], compile_with)[count], servers, least, MOST_PARTITIONS * most
    )
    fit = fit_partitions(measured_s, servers)
    log.info("%s", describe_fit(fit, simulated_s))
    return fit.chosen
