"""Settle what a user asks, once the graph is read: every size has a value, strategy and batch agree."""

from collections.abc import Mapping
from dataclasses import replace

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.planning.asynchronous import strategy_of_sessions
from partc.cost.cluster.cluster import Cluster
from partc.cost.named_strategy import NamedStrategy
from partc.cost.strategy import Batch, Mode, Strategy
from partc.passes.graph.fix_sizes import open_sizes
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.data.batches import check_sizes
from partc.runtime.errors import BadStrategy, BadUsage, some_of

DEFAULT_BATCH = 8  # a symbolic size that nobody gave a value


def begin_compilation(training: TrainingGraph, cluster: Cluster, options: Options) -> Compilation:
    """Return a compilation of which nothing has run, its options settled. Raises BadUsage, BadStrategy."""
    return Compilation(training, cluster, settle_options(options, training))


def settle_options(options: Options, graph: TrainingGraph) -> Options:
    """Return the options as the compiler takes them. Raises BadUsage, BadStrategy."""
    strategy = options.chosen_strategy()
    batch = choose_batch(options.batch, strategy)
    _check_rounding(replace(options, strategy=strategy))
    if options.asynchronous:
        strategy = strategy_of_sessions(strategy, batch)
    sizes = fill_sizes(options.sizes, graph)
    return replace(options, strategy=strategy, batch=batch, sizes=sizes, strategy_name=options.asked_strategy)


def _check_rounding(options: Options) -> None:
    """Refuse to round the sums of what is more than replicas that meet in every step.

    Raises BadUsage of the option, BadStrategy of a strategy's field.
    """
    strategy = options.strategy
    is_mesh = isinstance(strategy, NamedStrategy) or (isinstance(strategy, Strategy) and strategy.has_meshes)
    if options.chosen_rounding() and (options.asynchronous or is_mesh):
        refusal, at = (BadUsage, "--round-sums") if options.round_sums else (BadStrategy, "round_sums")
        raise refusal(
            "sums are rounded of replicas that are whole on their workers and meet in every step",
            at=at,
            fix="leave it out, or compile with --strategy auto, allreduce, ps or hybrid",
        )


def fill_sizes(values: Mapping[str, int], graph: TrainingGraph) -> dict[str, int]:
    """Return a value for every symbolic size of the graph. Raises BadUsage of others, and of no size."""
    check_sizes(values)
    names = open_sizes(graph) | graph.fixed_sizes.keys()
    if stray := sorted(set(values) - names):
        fix = f"use {some_of(sorted(names))}" if names else "leave it out: the graph has no symbolic size"
        raise BadUsage(f"the graph has no symbolic size {stray[0]!r}", at="--size", fix=fix)
    return {name: values.get(name, DEFAULT_BATCH) for name in sorted(names)} | graph.fixed_sizes


def choose_batch(requested: Batch | None, strategy: Mode | NamedStrategy | Strategy) -> Batch | None:
    """Return the batch reading that the user or the strategy file asks for, if any. Raises BadStrategy."""
    if isinstance(strategy, NamedStrategy) and strategy.splits_dense:
        return requested or "global"  # dense layers take the samples of all replicas together
    if not isinstance(strategy, Strategy):
        return requested
    if requested not in (None, strategy.batch):
        raise BadStrategy(
            f"the strategy is for a {strategy.batch} batch, not {requested}",
            at="--batch and the strategy file",
            fix=f"leave --batch out, or change the file's batch to {requested!r}",
        )
    return strategy.batch
