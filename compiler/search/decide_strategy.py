"""Decide the strategy of a compilation: what is asked for; for `auto`, the quickest of ways and of names.

    batch per replica   data parallelism, as choose_synchronisation decides it: names have other replicas, but
                        for `fsdp` and micro-batches, which are taken where memory is too small
    one batch for all   data parallelism so, and named strategies: the quickest by simulated steps of whole
                        plans, if it is quicker by more than the price may be off (a quarter). All names are
                        estimated, and those that promise most are priced

How many names are priced depends on the graph alone, never on the clock: compiling twice gives the same plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from partc.compiler.compilation import Compilation
from partc.compiler.importing.read_annotations import has_annotations, strategy_of_annotations
from partc.compiler.options import Options
from partc.compiler.pipeline import PipelinePhase, run
from partc.compiler.planning.price_step import MANY_RANKS
from partc.compiler.search.name_what_fits import names_by_need
from partc.compiler.search.rank_names import rank_names
from partc.compiler.search.whole_steps import WholeSteps, names_for
from partc.compiler.settle_options import begin_compilation, fill_sizes
from partc.cost.assignment.search_strategy import DATA_PARALLEL, Tried
from partc.cost.cluster.cluster import Cluster
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import DoesNotFit
from partc.runtime.log import log

# By how much a name must be predicted quicker: such steps take up to a third more or less than predicted, and
# names that were to save less were slower when they ran (docs/decisions/045-auto-tries-names.md).
REQUIRED_GAIN_OF_NAMES = 0.25

# Names that are priced: together of so many nodes, which takes some ten seconds on 48 devices; one at least.
TRIED_NODES = 5_000
MOST_NAMES = 16
# Names that are estimated, likewise: of so many nodes, these many at least.
ESTIMATED_NODES, FEWEST_ESTIMATED = 60_000, 8

Read = Callable[[], TrainingGraph]


def decide_strategy(
    read: Read,
    cluster: Cluster,
    options: Options,
    phases: Sequence[PipelinePhase],
    follows_annotations: bool = False,
) -> Compilation:
    """Return a compilation that has run `phases`, with the strategy asked for, or the quickest for `auto`.

    `read`: returns the graph anew, since compiling changes it; `phases`: up to decisions, or further.
    `follows_annotations`: for `auto`, the graph's own devices and shards are pins. Raises PartcError;
    DoesNotFit where no strategy that is tried fits in memory.
    """
    training = read()
    if follows_annotations and has_annotations(training):
        options = _follow_annotations(options, training, cluster)
        training = read()
    compilation = begin_compilation(training, cluster, options)
    if not _names_are_open(compilation):
        run(phases, compilation)
        return compilation
    refusal: DoesNotFit | None = None
    try:
        run(phases, compilation)
        if compilation.analysis.per_replica or compilation.workers == 1:
            return compilation
        compilation.compared = _data_parallel(compilation)
    except DoesNotFit as error:
        refusal = error
    named = tuple(_price_names(compilation, read, refusal is not None))
    best = min(named, key=attrgetter("step_s"), default=None)
    if best is None and refusal is not None:
        raise refusal
    ways, compilation.compared = compilation.compared, (*compilation.compared, *named)
    if best is None or (ways and best.step_s * (1 + REQUIRED_GAIN_OF_NAMES) >= ways[0].step_s):
        return compilation
    return _take(best, compilation, read, phases)


def _follow_annotations(options: Options, training: TrainingGraph, cluster: Cluster) -> Options:
    """Return the options with what the graph's file pins, unless the user asks for a strategy."""
    if options.strategy != "auto":
        log.warning("the devices that the model's annotations name are not followed: a strategy is asked for")
        return options
    sizes = fill_sizes(options.sizes, training)
    pinned = strategy_of_annotations(training, sizes, cluster, options.batch)
    assert pinned is not None, "the file has annotations"
    return replace(options, strategy=pinned)


def _take(best: Tried, before: Compilation, read: Read, phases: Sequence[PipelinePhase]) -> Compilation:
    """Return the compilation of a name instead of the one before."""
    (name,) = best.names
    log.info("auto: --strategy %s is the quickest of what was priced", name)
    compilation = begin_compilation(read(), before.cluster, replace(before.options, strategy=name))
    compilation.watch = before.watch
    run(phases, compilation)
    compilation.compared = (best, *(tried for tried in before.compared if tried is not best))
    return compilation


def _names_are_open(compilation: Compilation) -> bool:
    """Tell whether a mesh may be taken: nobody asked for something else, or for what meshes do not have.

    Where there are many ranks a single plan takes long to simulate.
    """
    options = compilation.options
    return (
        options.strategy == "auto"
        and compilation.workers < MANY_RANKS
        and not options.asynchronous
        and options.partitions is None
        and not options.without
    )


def _data_parallel(compilation: Compilation) -> tuple[Tried, ...]:
    """Return what was priced of data parallelism, at least the strategy taken. Raises DoesNotFit."""
    if tried := compilation.costs.tried:
        return tried
    strategy = compilation.strategy
    return (Tried((DATA_PARALLEL,), strategy, compilation.price(strategy)),)


def _count_tried(compilation: Compilation) -> int:
    """Return how many names are worth their time, where data parallelism does it as well."""
    return max(1, min(MOST_NAMES, TRIED_NODES // max(1, len(compilation.training.graph.nodes))))


def _price_names(compilation: Compilation, read: Read, is_refused: bool) -> Iterator[Tried]:
    """Yield the prices of the names that promise most, without those that are refused.

    Where nothing fits so far, not even a name, the first that does of those that need less is the last.
    """
    analysis = compilation.analysis
    replicas = compilation.replicas if analysis.per_replica else None
    price = WholeSteps(read, compilation.cluster, compilation.options, replicas=replicas)
    names = ["fsdp"] if analysis.per_replica else list(names_for(compilation.worker_hosts))
    with compilation.watch.phase("price names"):
        if not analysis.per_replica and not is_refused:
            nodes = max(1, len(compilation.training.graph.nodes))
            names = rank_names(compilation, names[: max(FEWEST_ESTIMATED, ESTIMATED_NODES // nodes)])
        for name in islice(names, MOST_NAMES if is_refused else _count_tried(compilation)):
            if (priced := price(name, name)) is not None:
                yield Tried((name,), priced.strategy, priced.step_s)
        if is_refused and not price.priced:
            fitting = price.first_of(names_by_need(compilation.workers))
            if fitting is not None:
                yield Tried((fitting.name,), fitting.strategy, fitting.step_s)
