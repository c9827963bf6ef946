"""The walk visits states as often as its distribution says, and depends on its seed alone."""

from collections import Counter
from itertools import islice
from math import exp

import numpy as np

from partc.passes.search.metropolis import TEMPERATURE, walk

COSTS = {0: 1.0, 1: 1.01, 2: 1.03, 3: None}


def propose(state: int, rng: np.random.Generator) -> int:
    return int(rng.choice([other for other in COSTS if other != state]))


def test_states_are_visited_as_often_as_the_distribution_says() -> None:
    seen: list[int] = []

    def propose_from(state: int, rng: np.random.Generator) -> int:
        seen.append(state)
        return propose(state, rng)

    for _ in islice(walk(0, 1.0, propose_from, COSTS.get, np.random.default_rng(0)), 30_000):
        pass

    weights = {state: exp(-cost / TEMPERATURE) for state, cost in COSTS.items() if cost is not None}
    expected = {state: weight / sum(weights.values()) for state, weight in weights.items()}
    counted = Counter(seen)
    assert counted.keys() == expected.keys(), "what cannot be is never entered"
    for state, share in expected.items():
        assert abs(counted[state] / len(seen) - share) < 0.02


def test_equal_seeds_walk_alike() -> None:
    walks = [list(islice(walk(0, 1.0, propose, COSTS.get, np.random.default_rng(5)), 50)) for _ in range(2)]

    assert walks[0] == walks[1]
