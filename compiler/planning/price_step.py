"""What a step takes under a strategy: lowered, scheduled and simulated, nothing written.

    strategy ─ lower ─> distributed step ─ outline ─> plan without files ─ simulate ─> seconds

This is the plan that would be compiled, so its time is the one that a compilation predicts, to the last bit.
"""

from dataclasses import dataclass, replace
from functools import partial

from partc.compiler.options import Options
from partc.compiler.planning.ahead import Ahead, is_worthwhile
from partc.compiler.planning.order_step import OrderedStep, order_step
from partc.compiler.planning.plan_in_memory import plan_in_memory
from partc.compiler.planning.stopwatch import paused_collection
from partc.cost.cluster.cluster import Cluster, ranks_of, shares_places
from partc.cost.simulation.timeline import Measured, simulate
from partc.cost.strategy import Strategy, SyncFacts
from partc.passes.analysis import Analysis
from partc.passes.distribute import lower_step
from partc.passes.indexed_rows.expected_rows import expect_rows
from partc.runtime.errors import NoPlacement

# Pricing takes a seventh of compiling a large graph, and less of a small one's, since a compilation writes
# and reports as well: all of it is to take as long again at most (docs/decisions/020-whole-steps.md).
MIN_EVALUATIONS = 6
MAX_EVALUATIONS = 12
NODES_PER_EVALUATION = 500  # for a small graph, so many more nodes are lowered
SENSITIVITY_EVALUATIONS = 2  # of them are kept for asking what fewer rows would change (check_estimate.py)
MANY_RANKS = 128  # from here on simulating dominates, and moves are left out

# By how much a mix of methods must be quicker. A few percent are not worth a plan that is harder to read;
# where ranks share cores, a prediction may be off by a quarter: mixes that were to save 14 % took 12 % more.
REQUIRED_GAIN = 0.03
REQUIRED_GAIN_OVERSUBSCRIBED = 0.25


@dataclass(frozen=True)
class _Seconds:
    """What a step takes; None: it does not fit."""

    step_s: float | None


class StepPricer:
    """Prices strategies for one graph on one cluster; keeps the quickest one's step, to be compiled next."""

    def __init__(
        self,
        analysis: Analysis,
        facts: tuple[SyncFacts, ...],
        cluster: Cluster,
        options: Options,
    ) -> None:
        self._analysis = analysis
        self._facts = facts
        self._cluster = cluster
        self._options = options
        self._quickest: tuple[float, Strategy, OrderedStep | None] | None = None
        self._expected: list[tuple[Strategy, Ahead[_Seconds]]] = []

    @property
    def evaluations(self) -> int:
        """Return how many strategies may be priced: from sizes alone, so that it is always the same."""
        if len(ranks_of(self._cluster)) >= MANY_RANKS:
            return 0
        nodes = max(1, len(self._analysis.training.graph.nodes))
        evaluations = min(MAX_EVALUATIONS, MIN_EVALUATIONS + NODES_PER_EVALUATION // nodes)
        return evaluations - SENSITIVITY_EVALUATIONS * any(fact.rows_are_assumed for fact in self._facts)

    @property
    def doubt(self) -> float:
        """Return by how much a mix of methods must be predicted quicker than a simple way."""
        return REQUIRED_GAIN_OVERSUBSCRIBED if self._is_oversubscribed else REQUIRED_GAIN

    @property
    def _is_oversubscribed(self) -> bool:
        return shares_places(self._cluster)

    def __call__(self, strategy: Strategy) -> float:
        """Return the simulated seconds of a step. Raises NoPlacement where it does not fit."""
        if (found_s := self._found_ahead(strategy)) is not None:
            step_s, ordered = found_s, None
        else:
            step_s, ordered = self._simulate(strategy, self._facts)
        if self._quickest is None or step_s < self._quickest[0]:
            self._quickest = (step_s, strategy, ordered)
        return step_s

    def expect(self, strategy: Strategy) -> None:
        """Begin to price what will be asked after the next, if there is a core for it."""
        if any(expected == strategy for expected, _ in self._expected):
            return
        if is_worthwhile(len(self._analysis.training.graph.nodes)):
            self._expected.append((strategy, Ahead(partial(self._seconds, strategy), _Seconds)))

    def end(self) -> None:
        """Give up what was expected: nothing more is asked."""
        for _, ahead in self._expected:
            ahead.end()
        self._expected.clear()

    def _seconds(self, strategy: Strategy) -> "_Seconds":
        try:
            return _Seconds(self._simulate(strategy, self._facts)[0])
        except NoPlacement:
            return _Seconds(None)

    def _found_ahead(self, strategy: Strategy) -> float | None:
        """Return what another process found, None if nothing, or that it does not fit."""
        places = [place for place, (expected, _) in enumerate(self._expected) if expected == strategy]
        if not places:
            return None
        _, ahead = self._expected.pop(places[0])
        return ahead.result().step_s

    def with_fewer_rows(self, strategy: Strategy, share: float) -> float:
        """Return the seconds if a step touched only a share of the rows that are assumed, not measured."""
        facts = tuple(
            replace(fact, touched_rows=fact.touched_rows * share) if fact.rows_are_assumed else fact
            for fact in self._facts
        )
        return self._simulate(strategy, facts)[0]

    def ordered(self, strategy: Strategy) -> OrderedStep | None:
        """Return the distributed step of a strategy if it is at hand as it was priced."""
        if self._quickest is None or self._quickest[1].parameters != strategy.parameters:
            return None
        return self._quickest[2]

    @paused_collection()
    def _simulate(self, strategy: Strategy, facts: tuple[SyncFacts, ...]) -> tuple[float, OrderedStep]:
        strategy = self._options.complete(strategy)
        expected = expect_rows(facts, strategy, self._cluster)
        lowered = lower_step(self._analysis, strategy, expected, self._options.asynchronous)
        ordered = order_step(self._analysis, lowered, strategy, self._cluster)
        sizes, times = self._options.sizes, self._options.times
        ordered, plan, _ = plan_in_memory(
            self._analysis, ordered, strategy, self._cluster, sizes, None, times
        )
        return simulate(plan, self._cluster, Measured(kernels=times)).step_s, ordered
