"""Say where the choice of a strategy hangs on how many rows a step is assumed to touch.

Without sample data all rows are taken to be drawn alike, which touches the most. Words repeat: of 100 to
100,000 draws by Zipf's law from 10,000 to 800,000 words, 0.39 to 0.9 times as many are distinct (numpy,
2026-11-22). So the choice is held against the next best of the strategies compared, as if 0.4 times as many
rows were touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.planning.price_step import StepPricer
from partc.cost.assignment.search_strategy import TIE, Tried
from partc.cost.strategy import SyncFacts

MIN_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class EstimateSensitivity:
    """A strategy that would be quicker than the one taken, if fewer rows were touched. Whole steps."""

    parameters: tuple[str, ...]  # whose rows are assumed, and which the two treat differently
    rival: str
    own_s: float
    rival_s: float

    def sentence(self) -> str:
        """Return what to tell the user, and what to do."""
        tables = " and ".join(repr(name) for name in self.parameters[:2])
        tables += f" and {len(self.parameters) - 2} more" if len(self.parameters) > 2 else ""
        return (
            f"the estimate of rows touched decides: if a step touched {MIN_SHARE:.0%} of those assumed of "
            f"{tables}, {self.rival!r} would take {self.rival_s * 1e3:.3g} ms and this plan "
            f"{self.own_s * 1e3:.3g} ms; measure them with --sample-data"
        )


def check_estimate(
    compared: Sequence[Tried], facts: Sequence[SyncFacts], price: StepPricer
) -> EstimateSensitivity | None:
    """Return what fewer rows would change, None if nothing. `compared`: the plan's strategy, then rivals."""
    estimated_tables = [fact.name for fact in facts if fact.rows_are_assumed]
    if not compared or not estimated_tables:
        return None
    selected, *rivals = compared
    differing = {
        id(rival): tuple(n for n in estimated_tables if _way(rival, n) != _way(selected, n))
        for rival in rivals
    }
    # Fewer rows make a step shorter by their share at most: whoever is slower than that cannot overtake.
    rivals = [
        rival
        for rival in rivals
        if any(_moves_rows(rival, name) for name in differing[id(rival)])
        and rival.step_s * MIN_SHARE < selected.step_s
    ]
    if not rivals:
        return None
    rival = min(rivals, key=lambda one: one.step_s)
    rival_s = price.with_fewer_rows(rival.strategy, MIN_SHARE)
    if rival_s * (1 + TIE) >= selected.step_s:
        own_s = selected.step_s
    else:
        own_s = price.with_fewer_rows(selected.strategy, MIN_SHARE)
    if own_s <= rival_s * (1 + TIE):
        return None
    return EstimateSensitivity(differing[id(rival)], rival.names[0], own_s, rival_s)


def _way(candidate: Tried, parameter: str) -> object:
    how = candidate.strategy.parameters[parameter]
    return how.method, how.local_aggregation


def _moves_rows(candidate: Tried, parameter: str) -> bool:
    return candidate.strategy.parameters[parameter].method != "all_reduce"
