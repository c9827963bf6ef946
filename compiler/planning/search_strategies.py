"""Find a quick strategy: every named one, then a walk over operators' own configurations.

    names     data parallelism as `auto` has it, then experts and products of them, simplest first
    walk      from the quickest, one kind of operators at a time; the budget is shared by walks from the
              quickest name and from data parallelism, which may be far from it

What counts is the simulated step of the whole plan, as compiling would lower and schedule it: so nothing is
returned that does not compile, that does not fit, or that is slower than any named strategy that was priced.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, LOWERING, run
from partc.compiler.planning.build_plan import build_plan
from partc.compiler.settle_options import settle_options
from partc.cost.cluster.cluster import Cluster
from partc.cost.named_strategy import LAYERWISE, ONE_WEIRD_TRICK
from partc.cost.simulation.memory import check_memory
from partc.cost.simulation.timeline import simulate
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.search.find_groups import find_groups
from partc.passes.search.metropolis import Walked, walk
from partc.passes.search.operator_space import KindConfig, OperatorSpace, kinds_of
from partc.runtime.errors import InputError, NoPlacement
from partc.runtime.log import silent_log

NAMED_SHARE = 0.5  # of the budget: what named strategies may take
START = "auto"

State = tuple[tuple[int, KindConfig], ...]  # the kinds of operators that have a configuration of their own


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy and the simulated seconds of its step. `name`: what it is, in a word."""

    name: str
    strategy: Strategy
    step_s: float


@dataclass(frozen=True)
class Found:
    """The answer of a search: the quickest, and data parallelism; how many were priced, and could not be."""

    best: Priced
    data_parallel: Priced
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
    replicas: int | None = None  # that a batch per replica allows: those of data parallelism
    first: Compilation = field(init=False)

    def __call__(self, name: str, strategy: str | Strategy) -> Priced | None:
        """Return the price of a strategy, None where it cannot be or does not fit."""
        try:
            with silent_log():
                return self._price(name, strategy)
        except (InputError, NoPlacement) as error:
            self.refused += 1
            self.failure = self.failure or error
            return None

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
    return Found(search.best, start, price.priced, price.refused, time.monotonic() - begun_s)


class _Search:
    """The best so far, and what makes it better."""

    def __init__(self, price: WholeSteps, start: Priced, show: Callable[[Priced, Priced], None]) -> None:
        self.best = self._start = start
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
        """Change operators' configurations, until the time is over or half of it has brought nothing."""
        space = _space_of(self._price.first)
        bases = {name: base for name, base in self._bases() if space.kinds}
        walks = [w for name, base in bases.items() if (w := self._begin(space, name, base, rng)) is not None]
        patience_s = (until_s - time.monotonic()) / 2
        improved_s, least_s = time.monotonic(), self.best.step_s
        while walks and time.monotonic() < min(until_s, improved_s + patience_s):
            for steps in walks:
                next(steps)
            if self.best.step_s < least_s:
                improved_s, least_s = time.monotonic(), self.best.step_s

    def _bases(self) -> Iterator[tuple[str, Strategy]]:
        """Yield what operators' configurations are added to: data parallelism, and the quickest name."""
        batch, workers = self._price.options.chosen_batch(), len(self._price.first.worker_names)
        yield "data", Strategy(MESH_STRATEGY_FORMAT, batch, {}, mesh={"data": workers})
        if self.best.strategy.has_meshes:
            yield self.best.name, self.best.strategy

    def _begin(
        self, space: OperatorSpace, name: str, base: Strategy, rng: np.random.Generator
    ) -> Iterator[Walked[State]] | None:
        known: dict[State, float | None] = {}

        def price(state: State) -> float | None:
            if state not in known:
                entries = [entry for number, own in state for entry in own.entries(space.kinds[number])]
                priced = self._price(f"{name}, changed", _with_entries(base, entries))
                known[state] = None if (seen := self._see(priced)) is None else seen.step_s
            return known[state]

        def propose(state: State, rng: np.random.Generator) -> State:
            number, config = space.draw(rng)
            kept = {n: own for n, own in state if n != number} | ({} if config is None else {number: config})
            return tuple(sorted(kept.items(), key=lambda pair: pair[0]))

        cost = price(())
        return None if cost is None else walk((), cost, propose, price, rng)


def _with_entries(base: Strategy, entries: Sequence[OpConfig]) -> Strategy:
    """Return a strategy with more entries for operators, which hold before its own."""
    return msgspec.structs.replace(base, ops=(*base.ops, *entries))


def _space_of(first: Compilation) -> OperatorSpace:
    analysis = first.analysis
    groups = find_groups(analysis.training, analysis.facts, analysis.main)
    fed = analysis.training.data_inputs.values()
    sizes = [analysis.facts.shape(e.name)[e.sample_axis] for e in fed if e.sample_axis is not None]
    return OperatorSpace(kinds_of(groups), first.worker_names, min(sizes, default=1))


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
