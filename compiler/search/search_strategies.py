"""Find a quick strategy: named ones, and operators' own configurations by one of several methods.

    names        data parallelism as `auto` has it, then experts and products of them: by every method
    pipelines    climbs from names over stages, cuts, micro-batches, and what a stage's workers divide
    mcmc         pipelines; walks from data parallelism, the best so far, fewer replicas and one worker
    ilp, dp      the least sum of what operators and transfers take alone: its own answer, or a walk's start
    exhaustive   the quickest of all states by the task graph, where these are few
    auto         pipelines; walks, from the answers of ilp and dp as well; exhaustion where possible
    all          as long as there is time, changes of one operator, or kind, of the quickest, as whole plans

Configurations are priced by the task graph; the quickest states are then priced as whole plans. What counts
is the simulated step of the whole plan, as compiling would lower and schedule it: so nothing is returned that
does not compile, that does not fit, or that is slower than anything else that was priced.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import inf

import numpy as np

from partc.compiler.options import Options, SearchMethod, SearchOptions
from partc.compiler.search.name_what_fits import names_by_need
from partc.compiler.search.operators.climb_plans import GroupChange, all_changes, climb_plans
from partc.compiler.search.operators.exhaust import Exhaustion, check_states, exhaust
from partc.compiler.search.operators.own_space import OwnSpace
from partc.compiler.search.operators.search_additively import solve_additively
from partc.compiler.search.operators.walk_chains import walk_rounds
from partc.compiler.search.operators.walk_tasks import (
    BestStates,
    StepConfigs,
    climb,
    fewer_replicas,
)
from partc.compiler.search.pipelines.climb_pipelines import climb_pipelines
from partc.compiler.search.pipelines.estimate_pipelines import PipelineEstimate
from partc.compiler.search.pipelines.step_pipelines import StepPipelines
from partc.compiler.search.rank_names import rank_names
from partc.compiler.search.search_limit import BudgetSpent, SearchLimit, interrupted_at
from partc.compiler.search.search_result import SearchResult, Show
from partc.compiler.search.whole_steps import Priced, WholeSteps, names_beside, names_for
from partc.compiler.task_graphs.step_tasks import compile_kernels
from partc.cost.assignment.search_strategy import DATA_PARALLEL
from partc.cost.cluster.cluster import Cluster
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.search.stages.pipeline_space import Pipeline
from partc.runtime.errors import BadUsage, DoesNotFit, NoPlacement

NAMED_SHARE = 0.5  # of the budget: what named strategies may take
PIPELINE_SHARE = 0.4  # of what is left: what pipelines may take
ESTIMATE_SHARE = 0.3  # of that: what estimates may take to find where climbs are to begin
PIPELINE_PROPOSALS = 0.05  # of proposals: whole plans of pipelines, which take longer than the task graph's
PLAN_PROPOSALS = 0.05  # of proposals: single changes that are priced as whole plans
ADDITIVE_SHARE = 0.2  # of what is left: what the additive starts of walks may take
EXHAUSTED_SHARE = 0.5  # of what is left then: what exhaustion may take, where `auto` tries it
OPERATORS_OWN = "operators' own"
WALKED_PROPOSALS = 0.5  # of proposals: what walks have
CLIMB_SHARE = 0.1  # of what is left: what the climb behind them has
RESERVE = 1.5  # of what a plan usually takes to price: what is left for pricing
PRICED_SHARE = 0.02  # of what is left: what a plan may take, if each round is priced
TRIED = 3  # states that are priced of a round
MOST_TRIED_STATES = 5_000_000  # that `auto` exhausts


def search_strategies(
    read: Callable[[], TrainingGraph],
    cluster: Cluster,
    options: Options,
    search_options: SearchOptions,
    show: Show,
) -> SearchResult:
    """Return the quickest strategy found within a budget. Raises what data parallelism is refused with, for
    lack of memory only if no named strategy fits; and BadUsage where a method cannot be used.

    `show` is told of each improvement, and of data parallelism. Ctrl-C, SIGTERM and SIGHUP end the search
    with the best so far, and so does the budget, whatever is under way. Beyond it go data parallelism, which
    is priced whatever it takes, and one plan of what walks have found.
    """
    limit = SearchLimit(search_options.budget_s, search_options.proposals)
    price = WholeSteps(read, cluster, options)
    start = price(DATA_PARALLEL, "auto")
    if start is not None and price.first is not None:  # it was as many plans, and the analysis
        price.taken_s = [taken_s / (1 + len(price.first.compared)) for taken_s in price.taken_s]
    search = _Search(price, start or _first_that_fits(price), start, search_options, limit, show)
    try:
        with interrupted_at(lambda: limit.until_s):
            search.run()
    except BudgetSpent:
        search.remarks.append("what was under way when the budget was spent was given up")
    except KeyboardInterrupt:
        search.remarks.append("it was interrupted")
    return SearchResult(
        search.best,
        start,
        search.proposals,
        price.priced,
        price.refused,
        limit.elapsed_s,
        tuple(dict.fromkeys(search.remarks)),
    )


def _first_that_fits(price: WholeSteps) -> Priced:
    """Return a named strategy, where data parallelism does not fit. Raises what that was refused with."""
    if isinstance(price.failure, DoesNotFit) and price.first is not None:
        hosts = price.first.worker_hosts
        if (priced := price.first_of(chain(names_for(hosts), names_by_need(len(hosts))))) is not None:
            return priced
    assert price.failure is not None
    raise price.failure


class _Search:
    """The best so far, and what makes it better. `data_parallel`: None where it does not fit in memory."""

    def __init__(
        self,
        price: WholeSteps,
        start: Priced,
        data_parallel: Priced | None,
        options: SearchOptions,
        limit: SearchLimit,
        show: Show,
    ) -> None:
        assert price.first is not None, "it has priced the start"
        self._first = price.first_of_fixed_sizes
        self.best, self._data_parallel = start, data_parallel
        self.proposals = 0
        self.remarks: list[str] = []
        self._price, self._asked, self._limit, self._show = price, options, limit, show
        self._named = [start]
        self._state: StepConfigs | None = None  # of the best, if it is operators' own
        self._optimal: set[StepConfigs] = set()  # no single change of them is quicker
        self._rng = np.random.default_rng(options.drawn_seed)
        show(start, data_parallel)

    def run(self) -> None:
        """Search by the method that was asked for."""
        method, own = self._asked.method, OwnSpace.of(self._first, self._asked.together)
        if own is None:
            self._refuse_without_choice()
        self._try_names(self._limit.early_until_s(NAMED_SHARE))
        if method in ("auto", "mcmc"):
            self._climb_pipelines()
        if own is None:
            return
        if self._limit.left_s > self._price.usual_s:
            with self._limit.stopped():
                compile_kernels()
        self._search_own(own, method)
        self._tell_local_optimum(own)
        self._climb_plans(own)

    def _search_own(self, own: OwnSpace, method: SearchMethod) -> None:
        """Search among operators' own configurations."""
        if method == "exhaustive":
            check_states(own.kinds)
            begin, _ = self._climb(own, fewer_replicas(own.tasks, own.space), self._limit.until_s, inf)
            self._exhaust(own, begin, 1.0)
        elif method in ("ilp", "dp"):
            solved = solve_additively(own, method, self._limit, self._asked.drawn_seed)
            self.remarks += solved.remarks
            self._see_state(own, solved.state, method)
        elif self._limit.left_s > RESERVE * self._price.usual_s:
            self._walk(own)

    def _refuse_without_choice(self) -> None:
        if self._asked.method in ("auto", "mcmc"):
            return
        if self._first.analysis.per_replica:
            raise BadUsage(
                "a batch of each replica's own leaves operators nothing to choose: all have all workers",
                at=f"--method {self._asked.method}",
                fix="add --batch global, or leave --method out",
            )
        raise BadUsage(
            "the step has nothing that could have devices of its own: no operator sums products",
            at=f"--method {self._asked.method}",
            fix="leave --method out",
        )

    def _see(self, priced: Priced | None) -> bool:
        """Note a price; tell whether it is the best."""
        if priced is None or priced.step_s >= self.best.step_s:
            return False
        self.best, self._state = priced, None
        self._show(priced, self._data_parallel)
        return True

    def _see_state(self, own: OwnSpace, state: StepConfigs, how: str) -> None:
        """Price a state as a whole plan, and note it."""
        before = self._state
        name = f"{how}: {own.describe(state, before)}"
        if self._see(self._price(name, own.strategy(state))):
            self._state = state

    def _try_names(self, until_s: float) -> None:
        """Price named strategies, as many as there is time for, what promises most first if that is known.

        Those that are estimated to be far slower are left out.
        """
        names: Iterable[str] = names_for(self._first.worker_hosts)
        if not self._first.analysis.per_replica:
            data_parallel_s = self._data_parallel.step_s if self._data_parallel else None
            ranked = rank_names(self._first, names, data_parallel_s)
            names = (promise.name for promise in ranked if promise.least_s <= self.best.step_s)
        for name in chain(names, self._names_beside()):
            if time.monotonic() + self._price.usual_s > until_s:
                return
            if (priced := self._price(name, name)) is not None:
                self._named.append(priced)
                self._see(priced)

    def _names_beside(self) -> Iterator[str]:
        """Yield what is to be tried beside the quickest, where that is a name by then."""
        yield from names_beside(self.best.name, self._first.worker_hosts)

    def _climb_pipelines(self) -> None:
        """Climb among pipelines, from the names that are some."""
        pipelines, limit = StepPipelines(self._first), self._limit
        until_s, most = limit.part_until_s(PIPELINE_SHARE), limit.part(PIPELINE_PROPOSALS)
        estimated_until_s = limit.part_until_s(ESTIMATE_SHARE * PIPELINE_SHARE)
        best: list[Pipeline] = []

        def goes_on(priced: int) -> bool:
            return priced < most and time.monotonic() + self._price.usual_s < until_s

        def estimates_on() -> bool:
            return time.monotonic() < estimated_until_s

        def price_s(pipeline: Pipeline) -> float:
            description = pipelines.describe(pipeline, best[-1] if best else None)
            priced = self._price(f"pipeline: {description}", pipelines.strategy(pipeline))
            if self._see(priced):
                best.append(pipeline)
            return inf if priced is None else priced.step_s

        if not goes_on(0):
            return
        read = {pipelines.read(priced.strategy): priced.step_s for priced in self._named}
        named = {pipeline: step_s for pipeline, step_s in read.items() if pipeline is not None}
        estimate = PipelineEstimate(pipelines).step_s
        climb = climb_pipelines(pipelines.space, named, price_s, estimate, goes_on, estimates_on, self._rng)
        are_tried = any(pipeline in climb.optimal for pipeline in climb.in_order[:1])
        self.remarks.append(
            f"{climb.priced} pipelines priced; single changes of the quickest, of a cut, of micro-batches or "
            "of what a stage's workers divide, were "
            + ("all tried: none is quicker" if are_tried else "not all tried")
        )

    def _walk(self, own: OwnSpace) -> None:
        """Walk and climb in rounds: what tasks say is quick is priced. `auto` exhausts small spaces first."""
        starts = own.starts(self.best.strategy)
        if self._asked.method == "auto":
            starts += self._additive_starts(own)
            if own.states <= MOST_TRIED_STATES:
                exhausted = self._exhaust(own, own.quickest(starts), EXHAUSTED_SHARE)
                is_alike = own.space.is_alike or all(len(groups) == 1 for groups in own.kinds.groups)
                if exhausted.is_proven and is_alike:
                    return  # walks have no other states
                starts.append(exhausted.state)
        best = BestStates()
        try:
            self._walk_rounds(own, starts, best)
        except KeyboardInterrupt:
            if best.seconds:
                self._see_state(own, best.in_order()[0], OPERATORS_OWN)
            raise

    def _walk_rounds(self, own: OwnSpace, starts: Sequence[StepConfigs], best: BestStates) -> None:
        limit, is_priced = self._limit, True
        for proposals in walk_rounds(
            own.tasks,
            own.space,
            starts,
            best,
            self._rng,
            lambda share: limit.part_until_s((1 - CLIMB_SHARE) * share, RESERVE * self._price.usual_s),
            most=limit.part(WALKED_PROPOSALS),
            chains=1 if limit.proposals is not None else 0,  # as many on every machine
        ):
            self.proposals += proposals
            is_priced = self._price.usual_s < PRICED_SHARE * limit.left_s
            if is_priced:
                self._price_best(own, best)
        if not is_priced:
            self._price_best(own, best)

    def _additive_starts(self, own: OwnSpace) -> list[StepConfigs]:
        """Return the answers of the additive methods, as far as there are any in a share of the time."""
        limit = self._limit
        part = SearchLimit(max(0.0, ADDITIVE_SHARE * limit.left_s), limit.proposals)
        starts = []
        for method in ("dp", "ilp"):
            try:
                starts.append(solve_additively(own, method, part, self._asked.drawn_seed).state)
            except (BadUsage, NoPlacement):
                continue  # the graph does not reduce, or there was no time: walks have other starts
        return starts

    def _price_best(self, own: OwnSpace, best: BestStates) -> None:
        for state in best.in_order()[:TRIED]:
            self._see_state(own, state, OPERATORS_OWN)
            if self._limit.left_s < RESERVE * self._price.usual_s:
                return

    def _tell_local_optimum(self, own: OwnSpace) -> None:
        """Say whether every single change of the answer was tried: where there is time, they are now."""
        limit, state = self._limit, self._state_of_best(own)
        if state is not None and state not in self._optimal and limit.left_s > self._price.usual_s:
            until_s = limit.part_until_s(1.0, self._price.usual_s)
            climbed, _ = self._climb(own, state, until_s, limit.part(1 / 2))
            if climbed != state and climbed in self._optimal:
                self._see_state(own, climbed, "climb")
                if self._state != climbed:
                    self.remarks.append(
                        "changes of one operator, or kind, are quicker by the task graph, but no quicker plan"
                    )
                    return
                state = climbed
        if state in self._optimal:
            self.remarks.append(
                "every change of one operator, or kind, was tried: none is quicker by the task graph"
            )
        else:
            self.remarks.append("changes of one operator, or kind, were not all tried")

    def _climb_plans(self, own: OwnSpace) -> None:
        """Take single changes that are quicker as whole plans, from what the task graph calls quickest on."""
        most, state = self._limit.part(PLAN_PROPOSALS), self._state_of_best(own)

        def is_quicker(changed: StepConfigs) -> bool:
            self._see_state(own, changed, "climb")
            return self._state == changed

        def goes_on(priced: int) -> bool:
            return priced < most and self._limit.left_s >= RESERVE * self._price.usual_s

        def changes() -> Iterator[GroupChange]:
            return all_changes(own.space)

        if state is None:
            return
        if climb_plans(own.tasks, changes, state, is_quicker, goes_on, self._limit.until_s):
            self.remarks.append("each such change was priced as a whole plan, too: none is quicker")

    def _state_of_best(self, own: OwnSpace) -> StepConfigs | None:
        """Return the quickest plan as a state, where it is one, or close to one."""
        strategy = self.best.strategy
        if self._state is None and strategy.has_meshes and strategy.stages == 1:
            return own.read(strategy)
        return self._state

    def _climb(
        self, own: OwnSpace, start: StepConfigs, until_s: float, most: float
    ) -> tuple[StepConfigs, float]:
        climbed, step_s, is_optimal = climb(own.tasks, own.space, start, until_s, most)
        if is_optimal:
            self._optimal.add(climbed)
        return climbed, step_s

    def _exhaust(self, own: OwnSpace, begin: StepConfigs, share: float) -> Exhaustion:
        """Look at all states, and price each that is quicker than those before."""
        until_s = self._limit.part_until_s(share, self._price.usual_s)

        def show(result: Exhaustion) -> None:
            self._see_state(own, result.state, "exhaustive")

        result = exhaust(own.tasks, own.kinds, begin, lambda: time.monotonic() < until_s, show)
        self.proposals += result.priced
        self._see_state(own, result.state, "exhaustive")
        how = "all" if result.is_proven else "there was no time for all"
        self.remarks.append(
            f"{how} {own.states:,} states of kinds of operators: {result.priced:,} priced by the task graph, "
            + ("the others proven to be no quicker" if result.is_proven else "the quickest so far is taken")
        )
        return result
