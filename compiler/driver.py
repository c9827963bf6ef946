"""The compilation, from a training graph and a cluster to a plan's folder, on one screen."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from partc.compiler.asynchronous import make_sessions
from partc.compiler.build_plan import build_plan
from partc.compiler.check_kernels import check_kernels
from partc.compiler.choose_partitions import Partitioner
from partc.compiler.choose_reading import Reading, choose_reading
from partc.compiler.doubt_estimate import Doubt, doubt_estimate
from partc.compiler.load_segments import load_segments
from partc.compiler.measure_sparsity import Sample, measure_sparsity
from partc.compiler.plan_files import PlanFiles
from partc.compiler.price_step import StepPrice
from partc.compiler.stopwatch import Stopwatch
from partc.cost.cluster import Cluster, ranks_of
from partc.cost.memory import DeviceMemory, check_memory
from partc.cost.partitions import PartitionSearch, check_partitions, search_partitions
from partc.cost.session_view import view_of_session
from partc.cost.sparsity import Sparsity, with_measured_rows
from partc.cost.strategy import Batch, Mechanism, Strategy, SyncFacts
from partc.cost.strategy_check import check_strategy
from partc.cost.synchronisation import Mode, StrategyCosts, choose_strategy
from partc.cost.timeline import Timeline, simulate
from partc.passes.analysis.describe_parameters import describe_parameters
from partc.passes.analysis.find_gradients import find_gradients
from partc.passes.distribute import Analysis, analyse, lower_step
from partc.passes.lowering.expected_rows import expect_rows
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.training_graph import TrainingGraph
from partc.runtime.check_program import check_program
from partc.runtime.log import log
from partc.runtime.program import Aggregation, Plan


@dataclass(frozen=True)
class CompileOptions:
    """What the user asks of a compilation.

    strategy  how parameters are synchronised: a mode, or a strategy of the user's own
    batch     what the graph's batch is: one replica's, or the whole; None: as choose_reading.py does
    sizes     a value for every symbolic size, for pricing and synthetic data
    sample    data from which the rows that a step touches are measured; None: assumed
    partitions  of large variables on servers: a number, or how to choose it; None: as balance wants
    without   mechanisms that are switched off, to see what they bring
    asynchronous  workers push and pull without waiting for each other
    aggregation   whether gradients are averaged or summed, and which ones are outputs; None: as the
                  strategy says
    recompute_bytes  what a step's values may take at once; None: as the strategy says
    force     trained variables of an earlier plan in the output folder may go
    """

    strategy: Mode | Strategy = "auto"
    batch: Batch | None = "per-replica"
    sizes: Mapping[str, int] = field(default_factory=dict)
    sample: Sample | None = None
    partitions: Partitioner | int | None = None
    without: frozenset[Mechanism] = frozenset()
    asynchronous: bool = False
    aggregation: Aggregation | None = None
    recompute_bytes: int | None = None
    force: bool = False

    def chosen_aggregation(self) -> Aggregation:
        """Return how gradients become one, of which a user's own strategy may tell."""
        if self.aggregation is not None:
            return self.aggregation
        return self.strategy.aggregation if isinstance(self.strategy, Strategy) else Aggregation()

    def chosen_recompute_bytes(self) -> int | None:
        """Return the most bytes of values at once, of which a user's own strategy may tell."""
        if self.recompute_bytes is not None:
            return self.recompute_bytes
        return self.strategy.recompute_bytes if isinstance(self.strategy, Strategy) else None

    def complete(self, strategy: Strategy) -> Strategy:
        """Return a strategy with the decisions that are the user's alone."""
        return msgspec.structs.replace(
            strategy,
            aggregation=self.chosen_aggregation(),
            recompute_bytes=self.chosen_recompute_bytes(),
        )


@dataclass(frozen=True)
class Compilation:
    """A plan and what led to it."""

    plan: Plan
    strategy: Strategy
    costs: StrategyCosts
    lowered: LoweredGraph
    timeline: Timeline
    memory: tuple[DeviceMemory, ...]
    facts: tuple[SyncFacts, ...]
    shapes: Mapping[str, tuple[int, ...]]  # of the original graph's tensors, under the assumed sizes
    watch: Stopwatch
    sparsity: Sparsity | None = None  # as measured
    partitions: PartitionSearch | None = None  # if it was asked for
    doubt: Doubt | None = None  # where an estimate of rows touched decided


def compile_graph(
    training: TrainingGraph, cluster: Cluster, out: Path, options: CompileOptions
) -> Compilation:
    """Compile into `out`, which appears whole or not at all. Raises PartcError.

    An asynchronous plan is that of one session, which every worker of the cluster has for itself.
    """
    watch = Stopwatch()
    machines = machines_of(cluster, options)
    with watch.phase("ask for kernels"):
        check_kernels(training, machines)
    decided = decide(training, cluster, options, watch)
    analysis, facts, strategy = decided.analysis, decided.facts, decided.strategy
    options = replace(options, batch=strategy.batch)
    with watch.phase("lay out and lower"):
        lowered = decided.lowered
        if lowered is None:
            expected = expect_rows(facts, strategy, machines)
            lowered = lower_step(analysis, strategy, expected, options.asynchronous)
    with PlanFiles(out, options.force) as files:
        with watch.phase("schedule and write"):
            plan = cut_step(analysis, lowered, strategy, cluster, options, files)
            plan = msgspec.structs.replace(plan, departures=decided.departures)
        with watch.phase("load segments"):
            load_segments(files.folder, plan)
        with watch.phase("check and simulate"):
            check_program(plan)
            timeline = simulate(plan, machines)
            memory = check_memory(plan, machines)
        compilation = Compilation(
            plan,
            strategy,
            decided.costs,
            lowered,
            timeline,
            memory,
            facts,
            analysis.facts.shapes,
            watch,
            decided.sparsity,
            decided.partitions,
            decided.doubt,
        )
        with watch.phase("report"):
            files.finish(compilation, machines, cluster)
    return compilation


# ---------------------------------------------------------------- the stages


@dataclass(frozen=True)
class Decided:
    """A step that was looked through, and every decision about it."""

    analysis: Analysis
    facts: tuple[SyncFacts, ...]
    strategy: Strategy
    costs: StrategyCosts
    sparsity: Sparsity | None
    partitions: PartitionSearch | None
    doubt: Doubt | None  # where an estimate of rows touched decided
    lowered: LoweredGraph | None  # the distributed step, where choosing made it
    departures: tuple[str, ...]  # of a batch per replica from one device


def decide(training: TrainingGraph, cluster: Cluster, options: CompileOptions, watch: Stopwatch) -> Decided:
    """Analyse a step and choose a strategy. Raises PartcError."""
    machines = machines_of(cluster, options)
    with watch.phase("analyse"):
        find_gradients(training)
        reading = read_batch(training, cluster, options)
        options = replace(options, batch=reading.batch)
        sparsity = _measure(training, machines, options)
        analysis = analyse_step(training, cluster, options)
        facts = describe_parameters(analysis)
        facts = facts if sparsity is None else with_measured_rows(facts, sparsity)
    with watch.phase("choose a strategy"):
        partitions = _search_partitions(facts, machines, options)
        price = StepPrice(analysis, facts, machines, options)
        chosen = partitions.chosen if partitions else None
        strategy, costs = _choose(facts, machines, options, chosen, price)
        strategy = options.complete(strategy)
        doubt = doubt_estimate(costs.tried, facts, price)
    for choice in costs.choices:
        log.info("%s: %s. %s", choice.variable, choice.method, choice.reason)
    if doubt is not None:
        log.info("%s", doubt.sentence())
    return Decided(
        analysis,
        facts,
        strategy,
        costs,
        sparsity,
        partitions,
        doubt,
        price.lowered(strategy),
        reading.departures,
    )


def read_batch(training: TrainingGraph, cluster: Cluster, options: CompileOptions) -> Reading:
    """Return what the graph's batch is. Needs: gradients are found. Raises UnsupportedModel."""
    if options.asynchronous:  # not what one device trains, as it says
        return Reading("per-replica")
    workers = _workers(cluster)
    return choose_reading(training, workers, options.batch, options.sizes, options.chosen_aggregation())


def _workers(cluster: Cluster) -> int:
    return sum(rank.replica is not None for rank in ranks_of(cluster))


def machines_of(cluster: Cluster, options: CompileOptions) -> Cluster:
    """Return what a plan's ranks run on: the cluster, or one session's view of it."""
    return view_of_session(cluster) if options.asynchronous else cluster


def analyse_step(training: TrainingGraph, cluster: Cluster, options: CompileOptions) -> Analysis:
    """Find out what layouts need to know. Needs: gradients are found, and the batch is chosen."""
    replicas = 1 if options.asynchronous else _workers(cluster)
    per_replica = options.batch == "per-replica"
    return analyse(training, options.sizes, replicas, per_replica, options.chosen_aggregation())


def cut_step(
    analysis: Analysis,
    lowered: LoweredGraph,
    strategy: Strategy,
    cluster: Cluster,
    options: CompileOptions,
    files: PlanFiles,
) -> Plan:
    """Schedule the distributed step, and write its segments."""
    plan = build_plan(analysis, lowered, strategy, machines_of(cluster, options), options, files)
    return make_sessions(plan, lowered, cluster, files.folder) if options.asynchronous else plan


def _measure(training: TrainingGraph, cluster: Cluster, options: CompileOptions) -> Sparsity | None:
    """Measure the rows touched by one replica, by those of each host, and by all."""
    if options.sample is None:
        return None
    of_hosts = {len(host.devices) for host in cluster.hosts if host.devices}
    every = sum(len(host.devices) for host in cluster.hosts)
    return measure_sparsity(training, options.sample, options.sizes, _batch(options), {*of_hosts, every})


def _search_partitions(
    facts: tuple[SyncFacts, ...], cluster: Cluster, options: CompileOptions
) -> PartitionSearch | None:
    """Price the strategy for every number of partitions that is allowed."""
    asked = options.partitions
    if asked is None or isinstance(options.strategy, Strategy):
        return None
    least = asked if isinstance(asked, int) else asked.min_partitions
    check_partitions(cluster, least)

    def price_s(partitions: int) -> float:
        _, costs = _choose(facts, cluster, options, partitions, None)
        return min(costs.totals_s.values())

    if isinstance(asked, int) or asked.search == "off":
        return PartitionSearch({least: price_s(least)}, least)
    return search_partitions(price_s, cluster, least)


def _choose(
    facts: tuple[SyncFacts, ...],
    cluster: Cluster,
    options: CompileOptions,
    partitions: int | None,
    price: StepPrice | None,
) -> tuple[Strategy, StrategyCosts]:
    given = options.strategy
    if not isinstance(given, Strategy):
        return choose_strategy(
            facts,
            cluster,
            given,
            _batch(options),
            without=options.without,
            partitions=partitions,
            price=price,
        )
    check_strategy(given, facts, cluster)
    # What a user's strategy leaves open, servers keep where workers do not wait for each other.
    mode: Mode = "ps" if options.asynchronous else "auto"
    return choose_strategy(
        facts, cluster, mode, _batch(options), given.parameters, options.without, partitions, price
    )


def _batch(options: CompileOptions) -> Batch:
    assert options.batch is not None, "the batch is chosen first"
    return options.batch
