"""The rule of a Metropolis-Hastings walk over strategies (flexflow.txt, section 6.2; Hastings 1970)."""

import math

import numpy as np

# Temperatures, as shares of the quickest step that is known, so that they mean the same for any model.
HOTTEST, COLDEST = 0.03, 0.003


def cooled(progress: float) -> float:
    """Return the temperature after a share of a walk, falling geometrically (Kirkpatrick et al. 1983)."""
    return HOTTEST * math.pow(COLDEST / HOTTEST, progress)


def highest_accepted(cost: float, best: float, temperature: float, rng: np.random.Generator) -> float:
    """Return the highest cost at which a proposal is taken: one dearer by d with probability exp(-d / T).

    T is the temperature's share of the best cost.
    """
    return cost - temperature * best * math.log(1.0 - rng.random())
