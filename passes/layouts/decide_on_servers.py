"""Decide how one node runs on servers, which own rows of variables: of an update, or where rows are read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.layouts.decide_layouts import Decision, decide_one_axis, keep_partial
from partc.passes.layouts.layouts import (
    REPLICAS,
    Gathered,
    Layout,
    Owned,
    Partial,
    PerReplica,
    Placement,
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
    node: gs.Node,
    rule: ShardingRule | None,
    layouts: Sequence[Layout],
    owners: set[str],
    pushed: Mapping[str, str],
) -> Decision:
    """Run a node of an update where the rows are. Raises NotServable."""
    parameter = min(owners)
    if len(owners) > 1 or rule is None:
        raise NotServable(parameter, node)
    owned = [
        isinstance(layout.along(REPLICAS), Owned | Gathered) or tensor.name in pushed
        for layout, tensor in zip(layouts, node.inputs, strict=True)
    ]
    if _indexes_rows(node, owned):
        return _index_owned_rows(node, owned, parameter)
    return _split_owned(node, rule, owned, parameter)


def _indexes_rows(node: gs.Node, owned: Sequence[bool]) -> bool:
    if node.op == "Gather":
        return bool(owned[0]) and node.attrs.get("axis", 0) == 0
    return node.op == "ScatterND" and bool(owned[0])


def _index_owned_rows(node: gs.Node, owned: Sequence[bool], parameter: str) -> Decision:
    """Gather or ScatterND on owned rows, by ids that were routed to their owner."""
    if not all(owned):
        raise NotServable(parameter, node)
    placement = Owned(parameter)
    return decide_one_axis("server", [placement for _ in owned], [placement], offset_ids=True)


def _split_owned(node: gs.Node, rule: ShardingRule, owned: Sequence[bool], parameter: str) -> Decision:
    """Split the factor that owned operands have on axis 0."""
    factors = {
        dims[0][0] if dims is not None and dims and len(dims[0]) == 1 else None
        for dims, is_owned in zip(rule.inputs, owned, strict=True)
        if is_owned
    }
    factor = min((f for f in factors if f is not None), default=None)
    if len(factors) != 1 or factor is None or factor in rule.whole:
        raise NotServable(parameter, node)
    inputs: list[Placement] = []
    for dims in rule.inputs:
        position = None if dims is None else rule.position_of(dims, factor)
        if position not in (None, (0, 1)) or (position and dims and len(dims[0]) != 1):
            raise NotServable(parameter, node)
        inputs.append(Owned(parameter) if position else Replicate())
    return decide_one_axis("server", inputs, _owned_outputs(node, rule, factor, parameter), factor)


def _owned_outputs(node: gs.Node, rule: ShardingRule, factor: str, parameter: str) -> tuple[Placement, ...]:
    outputs: list[Placement] = []
    for dims in rule.outputs:
        if dims and dims[0] == (factor,):
            outputs.append(Owned(parameter))
        elif rule.combine.get(factor) == "sum" and not any(factor in axis for axis in dims):
            outputs.append(Partial("sum"))
        else:
            raise NotServable(parameter, node)
    return tuple(outputs)


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
    return decide_one_axis("server", [Owned(parameter), ids], [requested])


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
    return decide_one_axis("server", [Owned(parameter), *rest], [Owned(parameter)])


def run_on_workers(decision: Decision) -> Decision:
    """Move a node that was decided for the servers to the workers, which gather what servers own."""

    def on_workers(layout: Layout) -> Placement:
        owned = layout.along(REPLICAS)
        return Gathered(owned.parameter) if isinstance(owned, Owned) else Replicate()

    inputs, outputs = (map(on_workers, layouts) for layouts in (decision.inputs, decision.outputs))
    return decide_one_axis("worker", tuple(inputs), tuple(outputs))
