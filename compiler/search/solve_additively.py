"""Search by additive costs: the least sum of what operators and transfers take alone, by one of two ways."""

import time
from dataclasses import dataclass
from typing import Literal

from partc.compiler.report.units import seconds
from partc.compiler.search.own_space import OwnSpace
from partc.compiler.search.price_additively import MOST_CONFIGS, AdditivePrices, NoTime, price_additively
from partc.compiler.search.search_limit import SearchLimit
from partc.compiler.search.walk_tasks import State
from partc.passes.search.configuration_program import solve_configurations
from partc.passes.search.eliminate_operators import check_reduces, eliminate_operators
from partc.passes.search.operator_space import data_parallel_config
from partc.runtime.errors import BadUsage, NoPlacement

EFFORT_PER_PROPOSAL = 1e-2  # of CP-SAT's deterministic time, where proposals and not seconds are the limit


@dataclass(frozen=True)
class SolvedSum:
    """The configurations of the least sum that was found, and what is known of it, in sentences."""

    state: State
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
