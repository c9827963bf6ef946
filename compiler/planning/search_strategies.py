"""Find a quick strategy: every named one, then a walk over operators' own configurations.

    names     data parallelism as `auto` has it, then experts and products of them, simplest first
    walk      from data parallelism, the quickest name and a single worker: operator groups' configurations,
              priced by the task graph; the quickest states are then priced as whole plans

What counts is the simulated step of the whole plan, as compiling would lower and schedule it: so nothing is
returned that does not compile, that does not fit, or that is slower than any named strategy that was priced.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, LOWERING, run
from partc.compiler.planning.build_plan import bucket_bytes, build_plan
from partc.compiler.planning.step_tasks import StepTasks
from partc.compiler.planning.task_prices import TaskPrices
from partc.compiler.planning.walk_tasks import State, climb, walk_tasks
from partc.compiler.settle_options import settle_options
from partc.cost.cluster.cluster import Cluster
from partc.cost.named_strategy import LAYERWISE, ONE_WEIRD_TRICK
from partc.cost.simulation.memory import check_memory
from partc.cost.simulation.timeline import simulate
from partc.cost.strategy import MESH_STRATEGY_FORMAT, Batch, OpConfig, Strategy
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.search.find_groups import OperatorGroup, find_groups
from partc.passes.search.grouped_step import group_step
from partc.passes.search.operator_space import (
    OperatorConfig,
    OperatorSpace,
    data_parallel_config,
    kinds_of,
)
from partc.passes.search.read_configs import read_configs
from partc.runtime.errors import InputError, NoPlacement
from partc.runtime.log import silent_log

NAMED_SHARE = 0.5  # of the budget: what named strategies may take
START = "auto"
ROUNDS = 3  # of walking and pricing
TRIED = 3  # states that are priced in a round


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy and the simulated seconds of its step. `name`: what it is, in a word."""

    name: str
    strategy: Strategy
    step_s: float


@dataclass(frozen=True)
class Found:
    """The answer of a search: the quickest, and data parallelism; how many were priced, and could not be.

    `proposals`: configurations of operators that were priced by the task graph.
    """

    best: Priced
    data_parallel: Priced
    proposals: int
    priced: int
    refused: int
    seconds: float


@dataclass
class WholeSteps:
    """Prices strategies by their whole steps. `read`: returns the graph anew, since compiling changes it."""

    read: Callable[[], TrainingGraph]
    cluster: Cluster
    options: Options
    priced: int = 0
    refused: int = 0
    failure: Exception | None = None
    slowest_s: float = 0.0  # that pricing took
    replicas: int | None = None  # that a batch per replica allows: those of data parallelism
    first: Compilation = field(init=False)

    def __call__(self, name: str, strategy: str | Strategy) -> Priced | None:
        """Return the price of a strategy, None where it cannot be or does not fit."""
        begun_s = time.monotonic()
        try:
            with silent_log():
                return self._price(name, strategy)
        except (InputError, NoPlacement) as error:
            self.refused += 1
            self.failure = self.failure or error
            return None
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)

    def _price(self, name: str, strategy: str | Strategy) -> Priced | None:
        training = self.read()
        options = settle_options(replace(self.options, strategy=strategy), training)
        compilation = Compilation(training, self.cluster, options)
        if self.replicas is not None and compilation.replicas != self.replicas:
            return None  # it would train on another total batch
        run((*DECIDE, LOWERING), compilation)
        if self.priced == 0:
            self.first = compilation
            self.options = replace(self.options, batch=compilation.options.batch)
            self.replicas = compilation.replicas if compilation.analysis.per_replica else None
        chosen, sizes = compilation.strategy, compilation.options.sizes
        plan = build_plan(compilation.analysis, compilation.lowered, chosen, self.cluster, sizes, None)
        check_memory(plan, self.cluster)
        self.priced += 1
        return Priced(name, chosen, simulate(plan, self.cluster).step_s)


def search_strategies(
    read: Callable[[], TrainingGraph],
    cluster: Cluster,
    options: Options,
    budget_s: float,
    seed: int,
    show: Callable[[Priced, Priced], None],
) -> Found:
    """Return the quickest strategy found within a budget. Raises what data parallelism is refused with.

    `show` is told of each improvement, and of data parallelism. Ctrl-C ends the search with the best so far.
    """
    begun_s = time.monotonic()
    price = WholeSteps(read, cluster, options)
    start = price(START, START)
    if start is None:
        assert price.failure is not None
        raise price.failure
    search = _Search(price, start, show)
    try:
        search.try_names(begun_s + NAMED_SHARE * budget_s)
        search.walk(np.random.default_rng(seed), begun_s + budget_s)
    except KeyboardInterrupt:
        pass
    return Found(
        search.best, start, search.proposals, price.priced, price.refused, time.monotonic() - begun_s
    )


class _Search:
    """The best so far, and what makes it better."""

    def __init__(self, price: WholeSteps, start: Priced, show: Callable[[Priced, Priced], None]) -> None:
        self.best = self._start = start
        self.proposals = 0
        self._price = price
        self._show = show
        show(start, start)

    def _see(self, priced: Priced | None) -> Priced | None:
        if priced is not None and priced.step_s < self.best.step_s:
            self.best = priced
            self._show(priced, self._start)
        return priced

    def try_names(self, until_s: float) -> None:
        """Price named strategies, as many as there is time for."""
        for name in _names(len(self._price.first.worker_names)):
            if time.monotonic() > until_s:
                return
            self._see(self._price(name, name))

    def walk(self, rng: np.random.Generator, until_s: float) -> None:
        """Give operator groups configurations of their own, in rounds: what tasks say is quick is priced.

        A batch of each replica's own leaves nothing to choose: all operators have all workers as replicas.
        """
        analysis = self._price.first.analysis
        groups = find_groups(analysis.training, analysis.facts, analysis.main)
        if analysis.per_replica or not groups or time.monotonic() + 2 * self._price.slowest_s > until_s:
            return
        tasks = make_tasks(self._price.first, groups)
        space = space_of(self._price.first, groups)
        starts = self._starts(groups, space)
        for remaining in reversed(range(ROUNDS)):
            walking_s = until_s - time.monotonic() - 2 * self._price.slowest_s
            if walking_s <= 0:
                return
            walked_until_s = time.monotonic() + walking_s / (remaining + 1)
            best, proposals = walk_tasks(tasks, space, starts, rng, walked_until_s)
            self.proposals += proposals
            climbed, step_s, _ = climb(tasks, space, best.in_order()[0], walked_until_s)
            best.add(climbed, step_s)
            for number, state in enumerate(best.in_order()):
                strategy = strategy_of(state, groups, self._price.first.worker_names, "global")
                self._see(self._price("operators' own", strategy))
                if time.monotonic() + (remaining + 2) * self._price.slowest_s > until_s or number == TRIED:
                    break
            starts = [*starts[:1], *best.in_order()[:2]]

    def _starts(self, groups: Sequence[OperatorGroup], space: OperatorSpace) -> list[State]:
        """Return data parallelism, the quickest name, and everything on one worker."""
        alone = OperatorConfig((("batch", 1),), (0,))
        starts = [(alone,) * len(groups)]
        if self.best.strategy.has_meshes:
            starts.insert(0, read_configs(self._price.first.analysis, self.best.strategy, groups))
        if space.samples % space.workers == 0:
            starts.insert(0, (data_parallel_config(space.workers),) * len(groups))
        return starts


def strategy_of(
    state: State, groups: Sequence[OperatorGroup], worker_names: Sequence[str], batch: Batch
) -> Strategy:
    """Return the strategy that configures every group."""
    entries = tuple(
        OpConfig(group.node, dict(config.split), devices=tuple(worker_names[w] for w in config.workers))
        for group, config in zip(groups, state, strict=True)
    )
    return Strategy(MESH_STRATEGY_FORMAT, batch, {}, ops=entries)


def make_tasks(first: Compilation, groups: Sequence[OperatorGroup]) -> StepTasks:
    """Return the task graph of a step's operator groups on its cluster."""
    step = group_step(first.analysis, groups)
    return StepTasks(step, TaskPrices(first.cluster), bucket_bytes(first.cluster))


def space_of(first: Compilation, groups: Sequence[OperatorGroup]) -> OperatorSpace:
    """Return what configurations of a step's operator groups may be drawn."""
    analysis = first.analysis
    fed = analysis.training.data_inputs.values()
    sizes = [analysis.facts.shape(e.name)[e.sample_axis] for e in fed if e.sample_axis is not None]
    return OperatorSpace(kinds_of(groups), len(first.worker_names), min(sizes, default=1))


def _names(workers: int) -> Iterator[str]:
    """Yield named strategies, and products of two and three of them, the simplest first."""
    parts = [n for n in range(2, workers + 1) if workers % n == 0]
    yield from (f"tensor={n}" for n in parts)
    yield "fsdp"
    yield from (LAYERWISE, ONE_WEIRD_TRICK)
    yield from (f"pipeline={n}" for n in parts)
    yield from (f"spatial={n}" for n in parts)
    for n in parts:
        yield from (f"{words},tensor={n}" for words in ("fsdp", *(f"pipeline={k}" for k in parts)))
