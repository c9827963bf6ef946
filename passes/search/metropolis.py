"""A Metropolis-Hastings walk over strategies (flexflow.txt, section 6.2; Hastings 1970).

A proposal that is quicker is taken; one slower by d with probability exp(-d / T). The temperature T is
is a share of the quickest step that is known, so that it means the same for every model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp
from typing import Generic, TypeVar

import numpy as np

TEMPERATURE = 0.02  # of the quickest step

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Walked(Generic[State]):
    """Where a walk is after a proposal. `cost`: of the proposal, None where it cannot be."""

    proposal: State
    cost: float | None


def walk(
    start: State,
    start_cost: float,
    propose: Callable[[State, np.random.Generator], State],
    price: Callable[[State], float | None],
    rng: np.random.Generator,
) -> Iterator[Walked[State]]:
    """Yield proposals without end. `price` returns None for what cannot be."""
    state, cost, best = start, start_cost, start_cost
    while True:
        proposal = propose(state, rng)
        proposed = price(proposal)
        chance = rng.random()  # drawn in any case, so that a walk depends on its seed alone
        if proposed is not None:
            best = min(best, proposed)
            if proposed <= cost or chance < exp((cost - proposed) / (TEMPERATURE * best)):
                state, cost = proposal, proposed
        yield Walked(proposal, proposed)
