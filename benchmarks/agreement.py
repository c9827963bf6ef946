"""How well predicted times agree with measured ones: errors, and the order.

The order counts by pairs of strategies whose measured times differ by more than APART. With r the ranks of
measured and s those of predicted times, equal ones sharing the mean of theirs, the rank correlation is

    sum a b / sqrt(sum a^2 sum b^2)        a = r_j - r_i, b = s_j - s_i, over those pairs i < j

Over all pairs that is Spearman's coefficient (Daniels, Biometrika 33 (1944) 129-135, gives the general form).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import nan, sqrt
from statistics import median

APART = 1.05


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of `count` strategies: relative errors, and of `pairs` apart how many are `ordered` right.

    correlation  of ranks; nan where nothing is apart, or all predictions are equal
    """

    count: int
    median_error: float
    worst_error: float
    correlation: float
    pairs: int
    ordered: int


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> Agreement:
    """Compare times of one or more strategies, in the same unit."""
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    apart = [
        (i, j)
        for i, j in combinations(range(len(measured)), 2)
        if max(measured[i], measured[j]) > APART * min(measured[i], measured[j])
    ]
    return Agreement(
        count=len(errors),
        median_error=median(errors),
        worst_error=max(errors),
        correlation=_correlation(ranks_of(measured), ranks_of(predicted), apart),
        pairs=len(apart),
        ordered=sum((measured[i] < measured[j]) == (predicted[i] < predicted[j]) for i, j in apart),
    )


def ranks_of(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1; equal ones share the mean of theirs."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]


def _correlation(one: Sequence[float], other: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    differences = [(one[j] - one[i], other[j] - other[i]) for i, j in pairs]
    scale = sqrt(sum(a * a for a, _ in differences) * sum(b * b for _, b in differences))
    return sum(a * b for a, b in differences) / scale if scale else nan
