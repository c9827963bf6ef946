"""Search by additive costs: the least sum of what kinds of operators, and transfers, take alone.

Kinds are what is configured together. Within a kind, what its groups send each other is its own cost. Of many
configurations those that take least alone are kept, of every set of workers the same number.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from partc.compiler.report.units import seconds
from partc.compiler.search.operators.own_space import Kinds, OwnSpace
from partc.compiler.search.operators.walk_tasks import StepConfigs
from partc.compiler.search.search_limit import SearchLimit
from partc.compiler.task_graphs.block_costs import BlockCosts, Reading
from partc.compiler.task_graphs.step_blocks import ParameterOf, UpdateBlock
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.cost.simulation.task_arrays import Floats
from partc.passes.search.additive.additive_costs import AdditiveCosts
from partc.passes.search.additive.configuration_program import solve_configurations
from partc.passes.search.additive.eliminate_operators import check_reduces, eliminate_operators
from partc.passes.search.operators.operator_space import OperatorConfig, data_parallel_config
from partc.runtime.errors import BadUsage, NoPlacement

MOST_CONFIGS = 48  # of a kind: pairs are written one by one


class NoTime(Exception):
    """The time for pricing is over."""


class AdditivePrices:
    """Prices kinds and pairs of them, one at a time. Raises NoTime where it may not go on."""

    def __init__(self, tasks: StepTasks, kinds: Kinds, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._costs, self._tasks, self._goes_on = BlockCosts(tasks), tasks, goes_on
        self.kinds = kinds
        self._kind_of = kinds.of_group

    @property
    def limits_bytes(self) -> Floats:
        """Return what memory each worker has, float64[workers]."""
        return self._tasks.prices.limits_bytes

    def fewer(self, most: int = MOST_CONFIGS, *keep: OperatorConfig) -> "AdditivePrices":
        """Return the prices of kinds of at most so many configurations, and some that stay."""
        chosen = tuple(
            configs if len(configs) <= most else self._least(kind, most, keep)
            for kind, configs in enumerate(self.kinds.configs)
        )
        left_out = sum(map(len, self.kinds.configs)) - sum(map(len, chosen))
        fewer = AdditivePrices(self._tasks, Kinds(self.kinds.groups, chosen, left_out), self._goes_on)
        fewer._costs = self._costs  # what is known of blocks
        return fewer

    def _least(self, kind: int, most: int, keep: tuple[OperatorConfig, ...]) -> tuple[OperatorConfig, ...]:
        """Return the configurations of a kind that take least, on each set of workers as many."""
        configs, (own_s, _) = self.kinds.configs[kind], self.own(kind)
        on_workers: dict[tuple[int, ...], int] = {}
        rank: dict[int, int] = {}
        for number in np.argsort(own_s, kind="stable").tolist():
            workers = configs[number].workers
            rank[number] = on_workers[workers] = on_workers.get(workers, -1) + 1
        order = sorted(rank, key=lambda n: (configs[n] not in keep, rank[n], own_s[n]))
        return tuple(configs[number] for number in sorted(order[:most]))

    def own(self, kind: int) -> tuple[Floats, Floats]:
        """Return a kind's seconds float64[configurations], its variables' bytes [configurations, workers]."""
        prices = [self._own(kind, config) for config in self.kinds.configs[kind]]
        return np.array([seconds for seconds, _ in prices]), np.array([memory for _, memory in prices])

    def _own(self, kind: int, config: OperatorConfig) -> tuple[float, Floats]:
        self._check_time()
        groups = frozenset(self.kinds.groups[kind])
        configs = dict.fromkeys(groups, config)
        costs = self._costs
        seconds, memory = 0.0, np.zeros(len(self._tasks.prices.workers))
        for number, block in costs.computing.items():
            if block.group in groups:
                seconds += costs.compute(number, config).seconds
        for reading in costs.readings:
            if groups.issuperset(reading.groups):
                seconds += costs.send(reading, config, config).once_s(reading)
        for number, update in costs.updates.items():
            own = terms_within(update, groups, groups)
            if own:
                alone = costs.update(number, own, configs)
                seconds += alone.seconds
                memory += alone.memory
        return seconds, memory

    def pairs(self) -> list[tuple[int, int]]:
        """Return the kinds that send each other something, the lower number first."""
        ends = {tuple(sorted(self._kind_of[group] for group in r.groups)) for r in self._costs.readings}
        for update in self._costs.updates.values():
            for parameter in update.parameters:
                homes = self._kind_of[parameter.home]
                ends |= {tuple(sorted((homes, self._kind_of[term.group]))) for term in parameter.terms}
        return sorted((j, k) for j, k in ends if j != k)

    def pair(self, j: int, k: int) -> Floats:
        """Return what two kinds send each other, float64[configurations of j, configurations of k]."""
        return np.array(
            [
                [self._pair(j, k, ours, theirs) for theirs in self.kinds.configs[k]]
                for ours in self.kinds.configs[j]
            ]
        )

    def _pair(self, j: int, k: int, ours: OperatorConfig, theirs: OperatorConfig) -> float:
        self._check_time()
        first, second = frozenset(self.kinds.groups[j]), frozenset(self.kinds.groups[k])
        configs = dict.fromkeys(first, ours) | dict.fromkeys(second, theirs)
        seconds = 0.0
        for reading in self._between.get((j, k), ()):
            having, wanting = reading.groups
            seconds += self._costs.send(reading, configs[having], configs[wanting]).once_s(reading)
        for number, update in self._costs.updates.items():
            for homes, makers in ((first, second), (second, first)):
                if shared := terms_within(update, homes, makers):
                    with_s = self._costs.update(number, shared, configs).seconds
                    without = [ParameterOf(p.name, p.place, p.home, ()) for p in shared]
                    seconds += with_s - self._costs.update(number, without, configs).seconds
        return seconds

    def _check_time(self) -> None:
        if not self._goes_on():
            raise NoTime

    @cached_property
    def _between(self) -> dict[tuple[int, ...], list[Reading]]:
        """Return what goes from group to group, by the kinds of both, the lower number first."""
        between: dict[tuple[int, ...], list[Reading]] = {}
        for reading in self._costs.readings:
            ends = tuple(sorted(self._kind_of[group] for group in reading.groups))
            between.setdefault(ends, []).append(reading)
        return between


def terms_within(update: UpdateBlock, homes: frozenset[int], makers: frozenset[int]) -> list[ParameterOf]:
    """Return the parameters that some groups keep, with those terms of their gradients that some make."""
    parameters = []
    for parameter in update.parameters:
        terms = tuple(term for term in parameter.terms if term.group in makers)
        if parameter.home in homes and (terms or homes == makers):
            parameters.append(ParameterOf(parameter.name, parameter.place, parameter.home, terms))
    return parameters


def price_additively(prices: AdditivePrices, names: Sequence[str]) -> AdditiveCosts:
    """Return the costs of all kinds and pairs. `names`: of kinds. Raises NoTime."""
    own = [prices.own(kind) for kind in range(len(prices.kinds.groups))]
    pair_s = {(j, k): prices.pair(j, k) for j, k in prices.pairs()}
    return AdditiveCosts(names, [s for s, _ in own], pair_s, [m for _, m in own], prices.limits_bytes)


EFFORT_PER_PROPOSAL = 1e-2  # of CP-SAT's deterministic time, where proposals and not seconds are the limit


@dataclass(frozen=True)
class SolvedSum:
    """The configurations of the least sum that was found, and what is known of it, in sentences."""

    state: StepConfigs
    remarks: tuple[str, ...]


def solve_additively(own: OwnSpace, method: Literal["ilp", "dp"], limit: SearchLimit, seed: int) -> SolvedSum:
    """Return the answer of a method. Raises BadUsage where it cannot be used or has no time, NoPlacement."""
    prices = AdditivePrices(own.tasks, own.kinds, lambda: time.monotonic() < limit.until_s)
    if method == "dp":
        check_reduces(own.names, prices.pairs())
    try:
        prices = prices.fewer(MOST_CONFIGS, data_parallel_config(own.space.workers), own.alone[0])
        costs = price_additively(prices, own.names)
    except NoTime:
        raise BadUsage(
            f"no time to price {len(prices.pairs())} pairs of kinds of operators",
            at=f"--method {method}",
            fix="give a larger --budget, or use --method mcmc",
        ) from None
    kinds = prices.kinds
    left_out = f", {kinds.left_out} configurations left out" if kinds.left_out else ""
    if method == "dp":
        choice = eliminate_operators(costs)
        if not costs.fits(choice):
            raise NoPlacement(
                "the variables of the least sum do not fit: this method knows no memory",
                at="--method dp",
                fix="use --method ilp, which does, or mcmc",
            )
        total = seconds(costs.total_s(choice))
        return SolvedSum(
            kinds.state(choice), (f"the least sum of times is {total}{left_out}; it is no step's",)
        )
    effort = None if limit.proposals is None else EFFORT_PER_PROPOSAL * limit.proposals
    proven = solve_configurations(costs, limit.left_s, seed, effort)
    remark = (
        f"sum of times {seconds(proven.total_s)}, none is below {seconds(proven.bound_s)}{left_out}: "
        "a bound of this sum, of no step"
    )
    return SolvedSum(kinds.state(proven.choice), (remark,))
