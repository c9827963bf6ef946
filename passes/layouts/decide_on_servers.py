"""Decide how one node runs on servers, which own rows of variables: of an update, or where rows are read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.layouts.decide_layouts import keep_partial, split_on
from partc.passes.layouts.decisions import AxisDecision, Decision, decide_one_axis
from partc.passes.layouts.layouts import (
    REPLICAS,
    Layout,
    Partial,
    PerReplica,
    Replicate,
    RequestedRows,
    Split,
)
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import NodeFacts
from partc.runtime.errors import UnsupportedModel


class NotServable(UnsupportedModel):
    """An update that cannot run on servers, which own only some rows. Never reaches the user."""

    def __init__(self, parameter: str, node: gs.Node) -> None:
        super().__init__(
            f"the update of {parameter!r} cannot run on a part of its rows",
            at=f"node {node.name!r} ({node.op})",
            fix="keep this parameter on the workers",
        )
        self.parameter = parameter


def keep_partial_on_servers(node: NodeFacts, layouts: Sequence[Layout]) -> Decision | None:
    """Leave a sum over servers partial where the op is linear in it."""
    if not any(layout.site == "server" for layout in layouts):
        return None
    placements = [layout.along(REPLICAS) if layout.site == "server" else Replicate() for layout in layouts]
    decision = keep_partial(node, placements)
    return None if decision is None else Decision("server", (decision,))


def decide_on_servers(
    node: gs.Node, known: NodeFacts, layouts: Sequence[Layout], owners: set[str], pushed: Mapping[str, str]
) -> Decision:
    """Run a node of an update where the rows are. Raises NotServable."""
    parameter = min(owners)
    if len(owners) > 1 or known.rule is None:
        raise NotServable(parameter, node)
    are_rows = [
        bool(layout.rows_of) or tensor.name in pushed
        for layout, tensor in zip(layouts, node.inputs, strict=True)
    ]
    along = (
        _index_rows(node, are_rows, parameter)
        if _indexes_rows(node, are_rows)
        else _split_rows(known, known.rule, are_rows, parameter)
    )
    if along is None:
        raise NotServable(parameter, node)
    return Decision("server", (along,))


def _indexes_rows(node: gs.Node, are_rows: Sequence[bool]) -> bool:
    if node.op == "Gather":
        return are_rows[0] and node.attrs.get("axis", 0) == 0
    return node.op == "ScatterND" and are_rows[0]


def _index_rows(node: gs.Node, are_rows: Sequence[bool], parameter: str) -> AxisDecision | None:
    """Gather or ScatterND on a server's rows, by ids that were routed to it."""
    rows = Split(0, rows_of=parameter)
    return AxisDecision(tuple(rows for _ in node.inputs), (rows,)) if all(are_rows) else None


def _split_rows(
    known: NodeFacts, rule: ShardingRule, are_rows: Sequence[bool], parameter: str
) -> AxisDecision | None:
    """Split the factor that is axis 0 of all that servers have rows of."""
    first = {dims[0] if dims else () for dims, is_rows in zip(rule.inputs, are_rows, strict=True) if is_rows}
    (factors,) = first if len(first) == 1 else ((),)
    if len(factors) != 1 or factors[0] in rule.whole or not _leads(rule, factors[0]):
        return None
    along = split_on(known, rule, factors[0], 1, rows_of=parameter)
    if along is None or along.is_mean:
        return None
    are_sums = all(isinstance(p, Split) or p == Partial("sum") for p in along.outputs)
    return along if are_sums else None


def _leads(rule: ShardingRule, factor: str) -> bool:
    """Tell whether a factor is axis 0, all of it, wherever it is."""
    return all(
        dims[0] == (factor,) and not any(factor in axis for axis in dims[1:])
        for dims in (*rule.inputs, *rule.outputs)
        if dims is not None and any(factor in axis for axis in dims)
    )


def slices_rows(node: gs.Node, facts: Facts) -> bool:
    """Tell whether a node is a Slice of axis 0 alone, one row after the other, by known bounds."""
    if node.op != "Slice":
        return False
    start, end, axes, steps = (*(facts.fixed_value(tensor.name) for tensor in node.inputs[1:]), None, None)[
        :4
    ]
    if start is None or end is None:
        return False
    rank = len(facts.shape(node.inputs[0].name))
    along = [int(axis) % rank for axis in np.ravel(range(len(start)) if axes is None else axes)]
    return along == [0] and (steps is None or np.ravel(steps).tolist() == [1])


def decide_request(node: gs.Node, decision: Decision, parameter: str, facts: Facts) -> Decision:
    """Let a Gather that was decided for the workers request its rows of the table's owners."""
    requested = RequestedRows(
        parameter, node.name, len(facts.shape(node.inputs[1].name)), _returned(decision)
    )
    ids = decision.inputs[1].along(REPLICAS)
    return decide_one_axis("server", [Split(0, rows_of=parameter), ids], [requested])


def run_where_requested(decision: Decision, requested: RequestedRows) -> Decision:
    """Move a node that was decided for the workers to the owners that its rows are requested of."""
    rest = [Replicate() for _ in decision.inputs[1:]]
    moved = replace(requested, returned=_returned(decision))
    return decide_one_axis("server", [requested, *rest], [moved])


def _returned(decision: Decision) -> Replicate | Split | PerReplica:
    placement = decision.outputs[0].along(REPLICAS)
    assert isinstance(placement, Replicate | Split | PerReplica)
    return placement


def slice_on_servers(node: gs.Node, parameter: str) -> Decision:
    """Cut rows out of a variable where its rows are."""
    rest = [Replicate() for _ in node.inputs[1:]]
    rows = Split(0, rows_of=parameter)
    return decide_one_axis("server", [rows, *rest], [rows])
