"""The rule of a Metropolis-Hastings walk over strategies (flexflow.txt, section 6.2; Hastings 1970)."""

from math import log

import numpy as np

TEMPERATURE = 0.02  # of the quickest step


def highest_accepted(cost: float, best: float, rng: np.random.Generator) -> float:
    """Return the highest cost at which a proposal is taken: one dearer by d with probability exp(-d / T).

    The temperature T is a share of the quickest step that is known, so that it means the same for any model.
    """
    return cost - TEMPERATURE * best * log(1.0 - rng.random())
