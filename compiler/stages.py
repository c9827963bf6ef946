"""The stages of a compilation, one function each; pipeline.py has their order."""

from dataclasses import replace

import msgspec

from partc.compiler.compilation import Compilation
from partc.compiler.output.describe_plan import describe_plan
from partc.compiler.planning.asynchronous import make_sessions
from partc.compiler.planning.build_plan import build_plan
from partc.compiler.planning.check_kernels import check_kernels
from partc.compiler.planning.choose_reading import Reading, choose_reading
from partc.compiler.planning.doubt_estimate import doubt_estimate
from partc.compiler.planning.load_segments import load_segments
from partc.compiler.planning.measure_sparsity import measure_sparsity
from partc.compiler.planning.price_step import StepPrice
from partc.cost.assignment.partitions import PartitionSearch, check_partitions, search_partitions
from partc.cost.assignment.synchronisation import StrategyCosts, choose_strategy
from partc.cost.simulation.memory import check_memory
from partc.cost.simulation.timeline import simulate
from partc.cost.sparsity import with_measured_rows
from partc.cost.strategy import Mode, Strategy
from partc.cost.strategy_check import check_strategy
from partc.passes.distribute import Analysis, check_one_batch, declare_gradients, drop_unservable, lower_step
from partc.passes.graph.facts import infer_facts
from partc.passes.graph.fetch_gradients import fetch_gradients
from partc.passes.graph.simplify import expand_casts
from partc.passes.indexed_rows.expected_rows import expect_rows
from partc.passes.replicas.average_replicas import average_replicas
from partc.passes.roles.describe_parameters import describe_parameters
from partc.passes.roles.find_followers import find_followers
from partc.passes.roles.find_gradients import find_gradients
from partc.passes.roles.find_roles import find_roles
from partc.passes.roles.find_sample_axes import check_draws
from partc.passes.roles.find_zeros import find_zeros
from partc.runtime.log import log
from partc.runtime.plan.check_program import check_program

# ---------------------------------------------------------------- the step


def ask_for_kernels(done: Compilation) -> None:
    """Refuse what the machines have no kernels for. Raises UnsupportedModel."""
    check_kernels(done.training, done.machines)


def know_gradients(done: Compilation) -> None:
    """Find the gradients that the graph's file does not tell."""
    find_gradients(done.training)


def choose_batch(done: Compilation) -> None:
    """Settle what the graph's batch is. Raises UnsupportedModel."""
    options = done.options
    if options.asynchronous:  # not what one device trains, as it says
        reading = Reading("per-replica")
    else:
        aggregation = options.chosen_aggregation()
        reading = choose_reading(done.training, done.workers, options.batch, options.sizes, aggregation)
    done.options = replace(options, batch=reading.batch)
    done.departures = reading.departures


def measure_rows(done: Compilation) -> None:
    """Measure the rows touched by one replica, by those of each host, and by all, where there is data."""
    options, hosts = done.options, done.machines.hosts
    if options.sample is None:
        return
    together = {len(host.devices) for host in hosts if host.devices} | {sum(len(h.devices) for h in hosts)}
    batch = options.chosen_batch()
    done.sparsity = measure_sparsity(done.training, options.sample, options.sizes, batch, together)


def assign_roles(done: Compilation) -> None:
    """Tell the main computation from updates, and what each variable is for."""
    done.roles = find_roles(done.training)
    done.main = set(done.roles.main)
    declare_gradients(done.training)


def average_over_replicas(done: Compilation) -> None:
    """Say in the graph where replicas are averaged. Raises BadUsage for what only a batch per replica has."""
    aggregation = done.options.chosen_aggregation()
    if done.options.chosen_batch() == "global":
        check_one_batch(done.training, aggregation)
        return
    if _replicas(done) > 1:
        check_draws(done.training)
    done.training = average_replicas(done.training, done.main, aggregation)


def show_gradients(done: Compilation) -> None:
    """Make the gradients that the user wants to see outputs of the step."""
    done.training = fetch_gradients(done.training, done.options.chosen_aggregation().fetched)


def know_tensors(done: Compilation) -> None:
    """Infer shapes, dtypes and values."""
    done.tensors = infer_facts(done.training, done.options.sizes, _replicas(done))
    expand_casts(done.training, done.tensors)


def know_what_servers_can_hold(done: Compilation) -> None:
    """Find out whose rows may live on servers: what cannot is found by trying."""
    training, tensors, main = done.training, done.tensors, done.main
    followers = find_followers(training, tensors, main)
    analysis = Analysis(
        training,
        tensors,
        done.roles,
        frozenset(main),
        find_zeros(training.graph, tensors),
        followers,
        frozenset(name for name in training.gradients if followers[name] == name),
        _replicas(done),
        done.options.chosen_batch() == "per-replica",
    )
    done.analysis = drop_unservable(analysis)


def _replicas(done: Compilation) -> int:
    return 1 if done.options.asynchronous else done.workers


# ---------------------------------------------------------------- the decisions


def know_parameters(done: Compilation) -> None:
    """Describe what the choice of a strategy depends on."""
    facts = describe_parameters(done.analysis)
    done.facts = facts if done.sparsity is None else with_measured_rows(facts, done.sparsity)


def choose_partitions(done: Compilation) -> None:
    """Price the strategy for every number of partitions that is allowed, where the user wants it."""
    asked = done.options.partitions
    if asked is None or isinstance(done.options.chosen_strategy(), Strategy):
        return
    least = asked if isinstance(asked, int) else asked.min_partitions
    check_partitions(done.machines, least)

    def price_s(partitions: int) -> float:
        _, costs = _choose(done, partitions, None)
        return min(costs.totals_s.values())

    if isinstance(asked, int) or asked.search == "off":
        done.partitions = PartitionSearch({least: price_s(least)}, least)
    else:
        done.partitions = search_partitions(price_s, done.machines, least)


def choose_synchronisation(done: Compilation) -> None:
    """Choose a strategy by the simulated time of whole steps."""
    done.price = StepPrice(done.analysis, done.facts, done.machines, done.options)
    partitions = done.partitions.chosen if done.partitions else None
    strategy, done.costs = _choose(done, partitions, done.price)
    done.strategy = done.options.complete(strategy)
    for choice in done.costs.choices:
        log.info("%s: %s. %s", choice.variable, choice.method, choice.reason)


def doubt_the_estimate(done: Compilation) -> None:
    """Say where an estimate of the rows touched decided."""
    done.doubt = doubt_estimate(done.costs.tried, done.facts, done.price)
    if done.doubt is not None:
        log.info("%s", done.doubt.sentence())


def _choose(
    done: Compilation, partitions: int | None, price: StepPrice | None
) -> tuple[Strategy, StrategyCosts]:
    options, given = done.options, done.options.chosen_strategy()
    pins = given.parameters if isinstance(given, Strategy) else {}
    if isinstance(given, Strategy):
        check_strategy(given, done.facts, done.machines)
        # What a user's strategy leaves open, servers keep where workers do not wait for each other.
        mode: Mode = "ps" if options.asynchronous else "auto"
    else:
        mode = given
    batch = options.chosen_batch()
    return choose_strategy(done.facts, done.machines, mode, batch, pins, options.without, partitions, price)


# ---------------------------------------------------------------- the plan


def lower(done: Compilation) -> None:
    """Make the distributed step, unless pricing has made it."""
    lowered = done.price.lowered(done.strategy)
    if lowered is None:
        done.expected = expect_rows(done.facts, done.strategy, done.machines)
        lower_as_decided(done)
    else:
        done.lowered = lowered


def lower_as_decided(done: Compilation) -> None:
    """Make the distributed step of the strategy."""
    done.lowered = lower_step(done.analysis, done.strategy, done.expected, done.options.asynchronous)


def schedule(done: Compilation) -> None:
    """Schedule the distributed step, and write its segments."""
    sizes = done.options.sizes
    plan = build_plan(done.analysis, done.lowered, done.strategy, done.machines, sizes, done.files)
    if done.options.asynchronous:
        plan = make_sessions(plan, done.lowered, done.cluster, done.files.folder)
    done.plan = msgspec.structs.replace(plan, departures=done.departures)


def open_segments(done: Compilation) -> None:
    """Open every segment in onnxruntime."""
    load_segments(done.files.folder, done.plan)


def check_and_simulate(done: Compilation) -> None:
    """Prove that the program ends, that it fits in memory, and predict its time."""
    check_program(done.plan)
    done.timeline = simulate(done.plan, done.machines)
    done.memory = check_memory(done.plan, done.machines)


def describe(done: Compilation) -> None:
    """Write what describes the whole: strategy, cluster, report and plan."""
    describe_plan(done)
