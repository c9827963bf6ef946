"""Say what the choice of a strategy needs to know about every parameter."""

import numpy as np

from partc.cost.strategy import SyncFacts
from partc.passes.distribute import Analysis


def describe_parameters(analysis: Analysis) -> tuple[SyncFacts, ...]:
    """Return the facts of all parameters, in the graph's order."""
    return tuple(_describe(analysis, name) for name in analysis.training.gradients)


def _describe(analysis: Analysis, name: str) -> SyncFacts:
    variable = analysis.training.variables[name]
    rows = variable.shape[0] if variable.shape else 1
    row_bytes = int(np.prod(variable.shape[1:], dtype=np.int64)) * variable.dtype.itemsize
    followers = [v for v, p in analysis.followers.items() if p == name and v != name]
    slots = sum(_nbytes(analysis, follower) for follower in followers)
    gradient = analysis.training.gradients[name]
    return SyncFacts(
        name,
        rows,
        row_bytes,
        slots // max(rows, 1),
        gradient.is_sparse,
        _touched_rows(analysis, gradient.ids, rows) if gradient.ids is not None else rows,
        name in analysis.servable,
    )


def _nbytes(analysis: Analysis, name: str) -> int:
    variable = analysis.training.variables[name]
    return int(np.prod(variable.shape, dtype=np.int64)) * variable.dtype.itemsize


def _touched_rows(analysis: Analysis, ids: str, rows: int) -> float:
    """Expected number of distinct ids that one replica draws, all rows being equally likely.

        rows (1 - (1 - 1 / rows) ** n)

    An upper bound for real data, where few rows take most of the draws.
    """
    drawn = analysis.facts.shape(ids)[0]
    own = drawn / analysis.replicas if _differs(analysis, ids) else drawn
    return float(rows * -np.expm1(own * np.log1p(-1.0 / rows))) if rows > 1 else 1.0


def _differs(analysis: Analysis, ids: str) -> bool:
    """Tell whether replicas' ids stand one behind the other in the tensor."""
    return analysis.facts.shape(ids)[0] % analysis.replicas == 0
