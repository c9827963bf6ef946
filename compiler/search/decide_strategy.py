"""Decide the strategy of a compilation: what is asked for; for `auto`, the quickest of ways and of names.

    batch per replica   data parallelism, as choose_synchronisation decides it: names have other replicas, but
                        for `fsdp` and micro-batches, which are taken where memory is too small
    one batch for all   data parallelism so, and named strategies: the quickest by simulated steps of whole
                        plans. Names are estimated; of each family the one that promises most is priced, and
                        others as long as the graph's size allows, but for those whose estimate is far slower
                        than what was priced

How many names are priced depends on the graph alone, never on the clock: compiling twice gives the same plan.
Of large graphs a second core searches data parallelism while the first estimates and prices names, and then
prices every other name; what is priced, and what of it counts, is the same on one core.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import inf
from operator import attrgetter

from partc.compiler.compilation import Compilation
from partc.compiler.importing.read_annotations import has_annotations, strategy_of_annotations
from partc.compiler.options import Options
from partc.compiler.pipeline import CHOICE, ROW_ESTIMATE, PipelinePhase, run
from partc.compiler.planning.ahead import Ahead, is_worthwhile
from partc.compiler.planning.price_step import MANY_RANKS
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.search.name_what_fits import names_by_need
from partc.compiler.search.price_in_turns import NameChoice, PriceInTurns
from partc.compiler.search.rank_names import NameEstimate, estimate_names, in_order
from partc.compiler.search.whole_steps import Priced, WholeSteps, names_beside, names_for, names_of_fewer
from partc.compiler.settle_options import begin_compilation, fill_sizes
from partc.cost.assignment.search_strategy import DATA_PARALLEL, TIE, Tried
from partc.cost.assignment.synchronisation import SyncChoice
from partc.cost.cluster.cluster import Cluster
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import DoesNotFit
from partc.runtime.log import log

# Names that are priced besides: together of so many nodes, which takes some ten seconds on 48 devices.
TRIED_NODES = 5_000
MOST_NAMES = 16
# Names that are estimated, likewise: of so many nodes, these many at least, and those of fewer workers.
ESTIMATED_NODES, FEWEST_ESTIMATED = 60_000, 8

ReadStep = Callable[[], TrainingGraph]


@paused_collection()
def decide_strategy(
    read: ReadStep,
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
    compilation = _decide(read, cluster, options, phases, follows_annotations)
    run((ROW_ESTIMATE,), compilation)  # of what is taken alone: it may price two more steps
    return compilation


def _decide(
    read: ReadStep,
    cluster: Cluster,
    options: Options,
    phases: Sequence[PipelinePhase],
    follows_annotations: bool,
) -> Compilation:
    training = read()
    if follows_annotations and has_annotations(training):
        options = _follow_annotations(options, training, cluster)
        training = read()
    compilation = begin_compilation(training, cluster, options)
    if not _names_are_open(compilation):
        run(phases, compilation)
        return compilation
    refusal: DoesNotFit | None = None
    names: _Names | None = None
    cut = phases.index(CHOICE)
    with ExitStack() as processes:
        try:
            run(phases[:cut], compilation)
            has_names = not compilation.analysis.per_replica and compilation.workers > 1
            if has_names:
                names = _Names(compilation, _price_of_names(compilation, read), processes)
                compilation.search = names.search
            run((CHOICE,), compilation)
            if not has_names:
                run(phases[cut + 1 :], compilation)
                return compilation
            compilation.compared = _data_parallel(compilation)
        except DoesNotFit as error:
            refusal = error
        price = _price_of_names(compilation, read) if names is None else names.price
        named = tuple(_price_names(compilation, price, None if refusal else names))
    best = min(named, key=attrgetter("step_s"), default=None)
    if best is None and refusal is not None:
        raise refusal
    ways, compilation.compared = compilation.compared, (*compilation.compared, *map(_tried, named))
    if best is None or (ways and best.step_s * (1 + TIE) >= ways[0].step_s):
        run(phases[cut + 1 :], compilation)
        return compilation
    return _take(best, compilation, price)


def _follow_annotations(options: Options, training: TrainingGraph, cluster: Cluster) -> Options:
    """Return the options with what the graph's file pins, unless the user asks for a strategy."""
    if options.strategy != "auto":
        log.warning("the devices that the model's annotations name are not followed: a strategy is asked for")
        return options
    sizes = fill_sizes(options.sizes, training)
    pinned = strategy_of_annotations(training, sizes, cluster, options.batch)
    assert pinned is not None, "the file has annotations"
    return replace(options, strategy=pinned)


def _take(best: Priced, before: Compilation, price: WholeSteps) -> Compilation:
    """Return the compilation of a name instead of the one before."""
    log.info("auto: --strategy %s is the quickest of what was priced", best.name)
    compilation = price.compilation_of(best)
    compilation.watch = before.watch
    winner = _tried(best)
    compilation.compared = (winner, *(tried for tried in before.compared if tried != winner))
    return compilation


def _tried(priced: Priced) -> Tried:
    return Tried((priced.name,), priced.strategy, priced.step_s)


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
    """Return how many names, apart from one of each family, are worth their time."""
    return min(MOST_NAMES, TRIED_NODES // max(1, len(compilation.training.graph.nodes)))


def _price_of_names(compilation: Compilation, read: ReadStep) -> WholeSteps:
    """Return what prices names: of the same step, and of the same total batch."""
    replicas = compilation.replicas if compilation.analysis.per_replica else None
    price = WholeSteps(read, compilation.cluster, compilation.options, replicas=replicas)
    price.first = compilation
    return price


def _price_names(compilation: Compilation, price: WholeSteps, promising: "_Names | None") -> Iterator[Priced]:
    """Yield the prices of names that are worth one, without those that are refused.

    `promising`: of one batch for all, unless data parallelism does not fit. Where nothing fits so far, not
    even a name, the first that does of those that need less is the last.
    """
    per_replica = compilation.analysis.per_replica
    is_refused = not compilation.compared
    names = ["fsdp"] if per_replica else list(names_for(compilation.worker_hosts))
    with compilation.watch.phase("price names"):
        if promising is not None:
            yield from promising.priced()
            return
        fitting_names = list(filter(None, (price(name, name) for name in names[:MOST_NAMES])))
        yield from fitting_names
        if is_refused and not fitting_names:
            fitting = price.first_of(names_by_need(compilation.workers))
            if fitting is not None:
                yield fitting


class _Names:
    """Names that are told apart by estimates, and priced by turns with a second core where there is one."""

    def __init__(self, compilation: Compilation, price: WholeSteps, processes: ExitStack) -> None:
        self._compilation, self._first, self._processes = compilation, price.first_of_fixed_sizes, processes
        self.price = price
        self._nodes = max(1, len(compilation.training.graph.nodes))
        self._has_help = is_worthwhile(self._nodes)
        self._in_turns = PriceInTurns(price, self._has_help)
        processes.callback(self._in_turns.end)

    def search(self, choose: Callable[[], SyncChoice]) -> SyncChoice:
        """Return what data parallelism's search finds on a second core, and price names here meanwhile."""
        if not self._has_help:
            return choose()
        found = self._processes.enter_context(Ahead(choose, SyncChoice))
        alone = [estimate for estimate in self._estimates if not estimate.gain]
        choice, least_s = self._choice(alone, None), inf
        while not found.is_done and (name := choice.following(least_s)) is not None:
            priced = self._in_turns.price_here(name)
            least_s = least_s if priced is None else min(least_s, priced.step_s)
        return found.result()

    def priced(self) -> Iterator[Priced]:
        """Yield the prices of each family's best, and of others, that are not estimated to be far slower."""
        least_s = self._compilation.compared[0].step_s
        choice, best = self._choice(self._estimates, least_s), None
        while (name := choice.following(least_s)) is not None:
            priced = self._in_turns(name, list(choice.expected(least_s)), best)
            if priced is not None:
                best = priced if priced.step_s < least_s else best
                least_s = min(least_s, priced.step_s)
                yield priced
        beside = names_beside(best.name, self._compilation.worker_hosts) if best is not None else ()
        yield from filter(None, (self.price(name, name) for name in beside))

    def _choice(self, estimates: Iterable[NameEstimate], data_parallel_s: float | None) -> NameChoice:
        return NameChoice(in_order(estimates, data_parallel_s), _count_tried(self._compilation))

    @cached_property
    def _estimates(self) -> tuple[NameEstimate, ...]:
        hosts = self._compilation.worker_hosts
        laid_out = islice(names_for(hosts), max(FEWEST_ESTIMATED, ESTIMATED_NODES // self._nodes))
        return estimate_names(self._first, dict.fromkeys((*laid_out, *names_of_fewer(hosts))))
