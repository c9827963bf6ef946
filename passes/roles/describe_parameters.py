"""Say what the choice of a strategy needs to know about every parameter."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from partc.cost.strategy import SyncFacts, Synchronisation
from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out
from partc.passes.graph.training_graph import Gradient
from partc.passes.indexed_rows.indexed_slices import pairs_of
from partc.passes.layouts.layouts import REPLICAS, WORKER, Layout, Split
from partc.passes.roles.find_boundary_ops import BoundaryOps, find_boundary_ops
from partc.passes.roles.prove_zero_rows import ignores_zero_rows


def describe_parameters(analysis: Analysis) -> tuple[SyncFacts, ...]:
    """Return the facts of all parameters, in the graph's order."""
    layouts = lay_out(analysis, {}).layouts
    followed = _with_post_aggregation(analysis)
    slots = _slot_bytes(analysis)
    boundary = find_boundary_ops(analysis.training, analysis.facts, analysis.main)
    return tuple(
        _describe(analysis, name, layouts, name in followed, slots[name], boundary[name])
        for name in analysis.training.gradients
    )


def _with_post_aggregation(analysis: Analysis) -> set[str]:
    """Return the parameters whose summed gradients are changed before anything reads what owners keep."""
    served = {name: Synchronisation("servers", post_aggregation="worker") for name in analysis.servable}
    graph = lay_out(analysis, served)
    on_workers = [
        node
        for node in analysis.training.graph.nodes
        if node.name not in analysis.main and graph.decisions[node.name].site == WORKER
    ]
    rows_of = {name: layout.rows_of for name, layout in graph.layouts.items() if layout.rows_of}
    rows_of |= graph.pushed
    return {rows_of[t.name] for node in on_workers for t in node.inputs if t.name in rows_of}


def _slot_bytes(analysis: Analysis) -> Mapping[str, int]:
    """Return the bytes of what is kept beside each parameter."""
    slots: dict[str, int] = defaultdict(int)
    for variable, parameter in analysis.followers.items():
        if parameter is not None and variable != parameter:
            slots[parameter] += _nbytes(analysis, variable)
    return slots


def _describe(
    analysis: Analysis,
    name: str,
    layouts: Mapping[str, Layout],
    is_followed: bool,
    slots: int,
    boundary: BoundaryOps,
) -> SyncFacts:
    variable = analysis.training.variables[name]
    rows = variable.shape[0] if variable.shape else 1
    row_bytes = int(np.prod(variable.shape[1:], dtype=np.int64)) * variable.dtype.itemsize
    gradient = analysis.training.gradients[name]
    return SyncFacts(
        name,
        rows,
        row_bytes,
        slots // max(rows, 1),
        gradient.is_sparse,
        _touched_rows(_drawn(analysis, gradient, layouts), rows) if gradient.is_sparse else rows,
        name in analysis.servable,
        not gradient.is_sparse or ignores_zero_rows(analysis.training, name),
        is_followed,
        boundary.nodes,
        boundary.share,
    )


def _nbytes(analysis: Analysis, name: str) -> int:
    variable = analysis.training.variables[name]
    return int(np.prod(variable.shape, dtype=np.int64)) * variable.dtype.itemsize


def _drawn(analysis: Analysis, gradient: Gradient, layouts: Mapping[str, Layout]) -> float:
    """Return how many ids one replica's slices have."""
    assert gradient.ids is not None and gradient.rows is not None
    tensors = analysis.training.graph.tensors()
    drawn = 0.0
    for ids, _ in pairs_of(tensors[gradient.ids], tensors[gradient.rows]):
        is_split = ids in layouts and isinstance(layouts[ids].along(REPLICAS), Split)
        drawn += analysis.facts.shape(ids)[0] / (analysis.replicas if is_split else 1)
    return drawn


def _touched_rows(drawn: float, rows: int) -> float:
    """Expected number of distinct ids among those drawn, all rows being equally likely.

        rows (1 - (1 - 1 / rows) ** drawn)

    An upper bound for real data, where few rows take most of the draws.
    """
    return float(rows * -np.expm1(drawn * np.log1p(-1.0 / rows))) if rows > 1 else 1.0
