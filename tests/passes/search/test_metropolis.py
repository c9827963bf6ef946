"""A walk by the rule visits states as often as its distribution says."""

from collections import Counter
from math import exp

import numpy as np

from partc.passes.search.metropolis import COLDEST, HOTTEST, cooled, highest_accepted

TEMPERATURE = 0.02
COSTS = {0: 1.0, 1: 1.01, 2: 1.03}


def test_states_are_visited_as_often_as_the_distribution_says() -> None:
    rng = np.random.default_rng(0)
    counted: Counter[int] = Counter()
    state = 0
    for _ in range(30_000):
        proposal = int(rng.choice([other for other in COSTS if other != state]))
        if COSTS[proposal] <= highest_accepted(COSTS[state], min(COSTS.values()), TEMPERATURE, rng):
            state = proposal
        counted[state] += 1

    weights = {state: exp(-cost / TEMPERATURE) for state, cost in COSTS.items()}
    for state, weight in weights.items():
        assert abs(counted[state] / 30_000 - weight / sum(weights.values())) < 0.02


def test_what_is_quicker_is_always_taken() -> None:
    rng = np.random.default_rng(1)

    assert all(highest_accepted(1.0, 0.5, HOTTEST, rng) >= 1.0 for _ in range(1000))


def test_walks_end_cold() -> None:
    assert (cooled(0.0), cooled(1.0)) == (HOTTEST, COLDEST)
    assert cooled(0.25) / cooled(0.5) == cooled(0.5) / cooled(0.75)
