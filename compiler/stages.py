"""The stages of a compilation, one function each; pipeline.py has their order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import NoneType

import msgspec

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.output.describe_plan import describe_plan
from partc.compiler.output.plan_files import PlanFiles
from partc.compiler.planning.ahead import Ahead, is_worthwhile
from partc.compiler.planning.asynchronous import make_sessions
from partc.compiler.planning.check_estimate import check_estimate
from partc.compiler.planning.check_kernels import check_kernels
from partc.compiler.planning.choose_reading import BatchReading, batch_sizes_of, choose_reading
from partc.compiler.planning.explain_stages import explain_stages
from partc.compiler.planning.load_segments import load_segments
from partc.compiler.planning.measure_sparsity import measure_sparsity
from partc.compiler.planning.name_strategy import name_strategy
from partc.compiler.planning.order_step import order_step
from partc.compiler.planning.plan_in_memory import plan_in_memory
from partc.compiler.planning.price_step import StepPricer
from partc.compiler.planning.quickest_workers import quickest_first
from partc.compiler.planning.stage_prices import StagePrices
from partc.cost.assignment.partitions import PartitionSearch, check_partitions, search_partitions
from partc.cost.assignment.synchronisation import SyncChoice, choose_strategy
from partc.cost.named_strategy import NamedStrategy
from partc.cost.simulation.measured_kernels import prices_sha256
from partc.cost.simulation.timeline import Measured, simulate
from partc.cost.sparsity import with_measured_rows
from partc.cost.strategy import Mode, Strategy
from partc.cost.strategy_check import check_strategy
from partc.passes.analysis import Analysis
from partc.passes.configure import configure
from partc.passes.distribute import (
    check_one_batch,
    declare_gradients,
    drop_unservable,
    lower_step,
)
from partc.passes.find_split_ops import find_rewriting
from partc.passes.graph.fetch_gradients import fetch_gradients
from partc.passes.graph.fix_sizes import fix_sizes, open_sizes
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.probe_sizes import is_fixed_at_other_sizes
from partc.passes.graph.simplify import expand_casts
from partc.passes.indexed_rows.expected_rows import expect_rows
from partc.passes.replicas.average_replicas import average_replicas
from partc.passes.roles.describe_parameters import describe_parameters
from partc.passes.roles.find_followers import find_followers
from partc.passes.roles.find_gradients import find_gradients, refuse_unfound
from partc.passes.roles.find_roles import find_roles
from partc.passes.roles.find_sample_axes import check_draws
from partc.passes.roles.find_zeros import find_zeros
from partc.runtime.errors import UnsupportedModel
from partc.runtime.log import log
from partc.runtime.plan.check_program import check_program
from partc.runtime.plan.program import Plan

# ---------------------------------------------------------------- the step


def refuse_missing_kernels(compilation: Compilation) -> None:
    """Refuse what the machines have no kernels for. Raises UnsupportedModel."""
    check_kernels(compilation.training, compilation.machines)


def find_unrecorded_gradients(compilation: Compilation) -> None:
    """Find the gradients that the graph's file does not tell."""
    find_gradients(compilation.training)


def choose_batch(compilation: Compilation) -> None:
    """Settle what the graph's batch is. Raises UnsupportedModel."""
    options = compilation.options
    batch = "per-replica" if options.asynchronous else options.batch
    aggregation = options.chosen_aggregation()
    reading = choose_reading(compilation.training, compilation.replicas, batch, options.sizes, aggregation)
    if options.asynchronous:  # not what one device trains, as it says
        refuse_unfound(compilation.training, compilation.training.variables)
        reading = BatchReading("per-replica")
    compilation.options = replace(options, batch=reading.batch)
    compilation.departures = reading.departures


def measure_rows(compilation: Compilation) -> None:
    """Measure the rows touched by one replica, by those of each host, and by all, where there is data."""
    options, hosts = compilation.options, compilation.machines.hosts
    if options.sample is None:
        return
    together = {len(host.devices) for host in hosts if host.devices} | {sum(len(h.devices) for h in hosts)}
    batch = options.chosen_batch()
    compilation.sparsity = measure_sparsity(
        compilation.training, options.sample, options.sizes, batch, together
    )


def fix_open_sizes(compilation: Compilation) -> None:
    """Make the plan for one size alone where more than samples is divided, or these unevenly.

    How parts of operators lie in each other, and which has an entry more, follows from every size.
    """
    training, sizes = compilation.training, compilation.options.sizes
    if not open_sizes(training):
        return
    is_shared = compilation.options.chosen_batch() == "global"
    samples = batch_sizes_of(training, sizes).values() if is_shared else ()
    if compilation.options.divides_more or any(count % _replicas(compilation) for count in samples):
        fix_sizes(training, sizes)


def assign_roles(compilation: Compilation) -> None:
    """Tell the main computation from updates, and what each variable is for."""
    compilation.roles = find_roles(compilation.training)
    compilation.main = set(compilation.roles.main)
    declare_gradients(compilation.training)


def average_over_replicas(compilation: Compilation) -> None:
    """Say in the graph where replicas are averaged. Raises BadUsage for what only a batch per replica has."""
    aggregation = compilation.options.chosen_aggregation()
    if compilation.options.chosen_batch() == "global":
        check_one_batch(compilation.training, aggregation, _strategy_of_one_batch(compilation.options))
        return
    training = compilation.training
    if _replicas(compilation) > 1:
        check_draws(training)
    is_alone = compilation.replicas == 1  # asynchronous workers are averaged in the end
    compilation.training = average_replicas(training, compilation.main, aggregation, is_alone=is_alone)


def _strategy_of_one_batch(options: Options) -> str:
    """Return the strategy that has one batch for all whatever --batch says; empty where that decides."""
    strategy = options.chosen_strategy()
    if isinstance(strategy, Strategy) or (isinstance(strategy, NamedStrategy) and strategy.splits_dense):
        return f"--strategy {options.asked_strategy}" if options.asked_strategy else "the strategy file"
    return ""


def add_gradient_outputs(compilation: Compilation) -> None:
    """Make the gradients that the user wants to see outputs of the step. Raises BadUsage, BadStrategy."""
    options = compilation.options
    fetched = options.chosen_aggregation().fetched
    in_file = isinstance(options.strategy, Strategy) and options.aggregation is None
    compilation.training = fetch_gradients(compilation.training, fetched, in_file=in_file)


def infer_tensors(compilation: Compilation) -> None:
    """Infer shapes, dtypes and values; of a step that bounds a size, for that size alone."""
    training, sizes, replicas = compilation.training, compilation.options.sizes, _replicas(compilation)
    compilation.tensors = infer_facts(training, sizes, replicas)
    if not is_fixed_at_other_sizes(training, compilation.tensors, sizes, replicas):
        log.info("the step takes another course at other sizes: the plan is for these alone")
        fix_sizes(training, sizes)
        compilation.tensors = infer_facts(training, sizes, replicas)
    expand_casts(compilation.training, compilation.tensors)


def find_servable_variables(compilation: Compilation) -> None:
    """Find out whose rows may live on servers: what cannot is found by trying."""
    training, tensors, main = compilation.training, compilation.tensors, compilation.main
    followers = find_followers(training, tensors, main)
    analysis = Analysis(
        training,
        tensors,
        compilation.roles,
        frozenset(main),
        find_zeros(training.graph, tensors),
        followers,
        frozenset(name for name in training.gradients if followers[name] == name and tensors.nbytes(name)),
        _replicas(compilation),
        compilation.options.chosen_batch() == "per-replica",
        compilation.worker_names,
    )
    try:
        compilation.analysis = drop_unservable(analysis)
    except UnsupportedModel:
        if not _has_meshes(compilation.options.chosen_strategy()):
            raise
        # Replicas alone cannot divide this batch; meshes have no servers, and may divide it otherwise.
        compilation.analysis = replace(analysis, servable=frozenset())


def _has_meshes(strategy: object) -> bool:
    return isinstance(strategy, NamedStrategy) or (isinstance(strategy, Strategy) and strategy.has_meshes)


def _replicas(compilation: Compilation) -> int:
    return 1 if compilation.options.asynchronous else compilation.replicas


# ---------------------------------------------------------------- the decisions


def write_named_strategy(compilation: Compilation) -> None:
    """Write a strategy that was asked for by name out, as a file could say it. Raises BadUsage."""
    options = compilation.options
    if isinstance(named := options.chosen_strategy(), NamedStrategy):
        analysis, prices = compilation.analysis, StagePrices(compilation.cluster)
        few = () if named.workers is None else quickest_first(analysis, prices)[: named.workers]
        prices = replace(prices, order=few) if few else prices
        strategy = name_strategy(
            analysis,
            named,
            prices.hosts,
            options.chosen_batch(),
            prices.node_s,
            prices.traffic,
            tuple(analysis.workers[number] for number in few),
        )
        compilation.options = replace(options, strategy=strategy)


def expand_split_operators(compilation: Compilation) -> None:
    """Say ops in others where the strategy splits what they keep whole. Raises BadStrategy."""
    strategy = compilation.options.chosen_strategy()
    if not isinstance(strategy, Strategy) or not strategy.has_meshes:
        return
    while rewrite := find_rewriting(compilation.analysis, configure(compilation.analysis, strategy)):
        if compilation.shares_graph:
            own = compilation.training.graph.copy()
            compilation.training, compilation.shares_graph = replace(compilation.training, graph=own), False
        written, main = rewrite(compilation.training), compilation.main
        compilation.is_expanded = True
        compilation.main = main.union(*(written[node] for node in written.keys() & main))
        infer_tensors(compilation)
        find_servable_variables(compilation)


def describe_choices(compilation: Compilation) -> None:
    """Describe what the choice of a strategy depends on."""
    facts = describe_parameters(compilation.analysis)
    compilation.facts = (
        facts if compilation.sparsity is None else with_measured_rows(facts, compilation.sparsity)
    )


def choose_partitions(compilation: Compilation) -> None:
    """Price the strategy for every number of partitions that is allowed, where the user wants it."""
    request = compilation.options.partitions
    if request is None or isinstance(compilation.options.chosen_strategy(), Strategy):
        return
    least = request if isinstance(request, int) else request.min_partitions
    check_partitions(compilation.machines, least)

    def price_s(partitions: int) -> float:
        _, costs = _choose(compilation, partitions, None)
        return min(costs.totals_s.values())

    if isinstance(request, int) or request.search == "off":
        compilation.partitions = PartitionSearch({least: price_s(least)}, least)
    else:
        compilation.partitions = search_partitions(price_s, compilation.machines, least)


def choose_synchronisation(compilation: Compilation) -> None:
    """Choose a strategy by the simulated time of whole steps."""
    compilation.price = StepPricer(
        compilation.analysis,
        compilation.facts,
        compilation.machines,
        compilation.options,
    )
    strategy, compilation.costs = compilation.search(partial(_search, compilation))
    compilation.strategy = compilation.options.complete(strategy)
    compilation.compared = compilation.costs.tried
    for choice in compilation.costs.choices:
        log.info("%s: %s. %s", choice.variable, choice.method, choice.reason)


def _search(compilation: Compilation) -> SyncChoice:
    partitions = compilation.partitions.chosen if compilation.partitions else None
    try:
        return _choose(compilation, partitions, compilation.price)
    finally:
        compilation.price.end()


def check_row_estimate(compilation: Compilation) -> None:
    """Say where an estimate of the rows touched decided."""
    compilation.sensitivity = check_estimate(compilation.costs.tried, compilation.facts, compilation.price)
    if compilation.sensitivity is not None:
        log.info("%s", compilation.sensitivity.sentence())


IN_A_MESH = (
    "Replicas of a mesh have no servers; the times are those of a parameter that every worker keeps whole"
)


def _choose(compilation: Compilation, partitions: int | None, price: StepPricer | None) -> SyncChoice:
    options, mode_or_strategy = compilation.options, compilation.options.chosen_strategy()
    pins = mode_or_strategy.parameters if isinstance(mode_or_strategy, Strategy) else {}
    if isinstance(mode_or_strategy, Strategy):
        check_strategy(mode_or_strategy, compilation.facts, compilation.machines)
        # What a user's strategy leaves open, servers keep where workers do not wait for each other.
        # In a mesh of several axes, replicas have no servers.
        otherwise: Mode = "allreduce" if mode_or_strategy.has_meshes else "auto"
        mode: Mode = "ps" if options.asynchronous else otherwise
        because = IN_A_MESH if mode_or_strategy.has_meshes else None
    else:
        assert not isinstance(mode_or_strategy, NamedStrategy), "it is written out by now"
        mode, because = mode_or_strategy, None
    batch = options.chosen_batch()
    return choose_strategy(
        compilation.facts,
        compilation.machines,
        mode,
        batch,
        pins,
        options.without,
        partitions,
        price,
        because,
    )


# ---------------------------------------------------------------- the plan


def lower(compilation: Compilation) -> None:
    """Make the distributed step, unless pricing has made it."""
    ordered = compilation.price.ordered(compilation.strategy)
    if ordered is None:
        lower_as_decided(compilation)
    else:
        compilation.lowered, compilation.ordered = ordered.lowered, ordered


def lower_as_decided(compilation: Compilation) -> None:
    """Make the distributed step of the strategy."""
    compilation.expected = expect_rows(compilation.facts, compilation.strategy, compilation.machines)
    compilation.lowered = lower_step(
        compilation.analysis, compilation.strategy, compilation.expected, compilation.options.asynchronous
    )


def outline(compilation: Compilation) -> None:
    """Cut the distributed step into segments, and write none of them: the plan is good for being priced."""
    compilation.plan = _plan(compilation, None)


def schedule(compilation: Compilation) -> None:
    """Cut the distributed step into segments, and write them."""
    plan = _plan(compilation, compilation.files)
    if compilation.options.asynchronous:
        plan = make_sessions(plan, compilation.lowered, compilation.cluster, compilation.files.folder)
    prices = prices_sha256(compilation.options.times)
    compilation.plan = msgspec.structs.replace(
        plan, departures=compilation.departures, cost_cache_sha256=prices
    )


def _plan(compilation: Compilation, files: PlanFiles | None) -> Plan:
    """Order what ranks do, unless pricing has, and plan it. Raises DoesNotFit."""
    analysis, strategy = compilation.analysis, compilation.strategy
    machines, options = compilation.machines, compilation.options
    ordered = compilation.ordered or order_step(analysis, compilation.lowered, strategy, machines)
    compilation.ordered, plan, compilation.memory = plan_in_memory(
        analysis, ordered, strategy, machines, options.sizes, files, options.times
    )
    return plan


def open_segments(compilation: Compilation) -> None:
    """Open every segment in onnxruntime: on a second core, where there is one, while this one goes on."""
    job = partial(load_segments, compilation.files.folder, compilation.plan)
    if is_worthwhile(len(compilation.training.graph.nodes)):
        compilation.opening = compilation.processes.enter_context(Ahead(job, NoneType))
    else:
        job()


def await_segments(compilation: Compilation) -> None:
    """See that all segments were opened. Raises UnsupportedModel."""
    if compilation.opening is not None:
        compilation.opening.result()


def check_and_simulate(compilation: Compilation) -> None:
    """Prove that the program ends, and predict its time."""
    with _checked(compilation):
        compilation.timeline = simulate(
            compilation.plan, compilation.machines, Measured(kernels=compilation.options.times)
        )


@contextmanager
def _checked(compilation: Compilation) -> Iterator[None]:
    """Prove that the program ends: on a second core, where there is one, while the block is done."""
    check = partial(check_program, compilation.plan)
    if not is_worthwhile(len(compilation.training.graph.nodes)):
        check()
        yield
        return
    with Ahead(check, NoneType) as proof:
        yield
        proof.result()


def explain_uneven_stages(compilation: Compilation) -> None:
    """Say why a pipeline leaves devices idle, where it does."""
    compilation.uneven_stages = explain_stages(compilation)


def price_changes(compilation: Compilation) -> None:
    """Price the step with changed machines, strategies and batches, if that is asked for."""
    if compilation.price_changes is not None:
        compilation.what_if = compilation.price_changes(compilation)


def describe(compilation: Compilation) -> None:
    """Write what describes the whole: strategy, cluster, report and plan."""
    describe_plan(compilation)
