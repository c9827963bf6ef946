"""Emit one node of the training graph for one site, as its decision says.

Sizes are always the single device's: `Shape` of a piece is scaled up, and an op that spells a shape
(Reshape, Expand, ConstantOfShape) gets it divided, factor by factor, on a copy of its own.
"""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.exchange_rows import needs_exchange, push_slices, reduce_slices
from partc.passes.indexed_rows.request_rows import request_rows, run_on_requested_rows
from partc.passes.layouts.decide_layouts import Decision, slices_rows
from partc.passes.layouts.layouts import (
    Layout,
    Owned,
    PerReplica,
    Placement,
    Replicate,
    RequestedRows,
    Split,
)
from partc.passes.lowering.gather_owned import slice_owned_rows
from partc.passes.lowering.lowered_graph import constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.replicas import average_replicas
from partc.passes.rules.sharding_rules import is_sum_rows, rule_of


def lower_node(lowering: Lowering, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
    """Return the node's outputs as lowered values."""
    if node.domain == average_replicas.REPLICA_DOMAIN:
        return [_lower_replica_average(lowering, node, decision)]
    if node.op in ("Shape", "Size") and decision.site == "worker":
        return [_lower_shape(lowering, node, decision)]
    if decision.site == "worker" and needs_exchange(lowering, node):
        return reduce_slices(lowering, node)
    if isinstance(decision.outputs[0], RequestedRows):
        is_first = not isinstance(decision.inputs[0], RequestedRows)
        return [(request_rows if is_first else run_on_requested_rows)(lowering, node, decision)]
    if slices_rows(node, lowering.facts) and isinstance(decision.inputs[0], Owned):
        return [slice_owned_rows(lowering, node, decision.inputs[0])]
    if decision.site == "server" and _routes_slices(node, decision):
        return _lower_routed(lowering, node, decision)
    return _emit(lowering, node, decision, _operands(lowering, node, decision))


def _operands(lowering: Lowering, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
    operands: list[gs.Tensor] = []
    spelled = _spelled_shapes(lowering, node)
    for index, (tensor, placement) in enumerate(zip(node.inputs, decision.inputs, strict=True)):
        if not tensor.name:
            operands.append(gs.Variable.empty())
        elif index in spelled:
            output = spelled[index]
            whole = lowering.need(tensor.name, Layout(decision.site, _whole(placement)))
            shape = _local_sizes(lowering, node, tensor, whole, output, decision)
            operands.append(shape)
        else:
            operands.append(lowering.need(tensor.name, Layout(decision.site, placement)))
    return operands + _squeezed_axes(lowering, node)


def _squeezed_axes(lowering: Lowering, node: gs.Node) -> list[gs.Tensor]:
    """Spell a Squeeze's axes where it names none: a piece may have more of size 1 than the whole."""
    if node.op != "Squeeze" or len(node.inputs) > 1:
        return []
    shape = lowering.facts.shape(node.inputs[0].name)
    return [constant(f"{node.name}.axes", [a for a, size in enumerate(shape) if size == 1], np.int64)]


def _whole(placement: Placement) -> Placement:
    return placement if isinstance(placement, PerReplica) else Replicate()


def _spelled_shapes(lowering: Lowering, node: gs.Node) -> dict[int, int]:
    rule = rule_of(node, lowering.facts)
    return {} if rule is None else dict(rule.shape_inputs)


def _emit(
    lowering: Lowering, node: gs.Node, decision: Decision, operands: list[gs.Tensor]
) -> list[gs.Tensor]:
    values: list[str] = []  # that hold the results
    outputs: list[gs.Tensor] = []
    for tensor, placement in zip(node.outputs, decision.outputs, strict=True):
        if not tensor.name:
            values.append("")
            outputs.append(gs.Variable.empty())
            continue
        value = lowering.value_name(tensor.name, Layout(decision.site, placement))
        values.append(value)
        name = f"{value}.of_part" if decision.is_mean else value
        outputs.append(gs.Variable(name, dtype=lowering.facts.dtypes[tensor.name]))
    name = f"{node.name}@{outputs[0].name}"
    copy = gs.Node(node.op, name, dict(node.attrs), operands, outputs, domain=node.domain)
    lowering.out.append(copy, decision.site)
    _count_flops(lowering, node, copy, decision)
    if decision.is_mean:
        return [
            _scale(lowering, output, value, decision) for output, value in zip(outputs, values, strict=True)
        ]
    return outputs


def _count_flops(lowering: Lowering, node: gs.Node, copy: gs.Node, decision: Decision) -> None:
    rule = rule_of(node, lowering.facts)
    lowering.out.original[copy.name] = node.name
    if rule is not None:
        share = lowering.graph.replicas if decision.factor is not None else 1
        lowering.out.flops[copy.name] = rule.flops // share


def _scale(lowering: Lowering, mean: gs.Tensor, value: str, decision: Decision) -> gs.Tensor:
    """A mean over a replica's part counts for its share of the whole."""
    share = constant(f"{mean.name}.share", 1.0 / lowering.graph.replicas, mean.dtype)
    return lowering.out.emit("Mul", [mean, share], value, mean.dtype, decision.site)


def _lower_replica_average(lowering: Lowering, node: gs.Node, decision: Decision) -> gs.Tensor:
    source = node.inputs[0]
    tensor = lowering.need(source.name, Layout("worker", decision.inputs[0]))
    factor = _factor_of_average(node, isinstance(decision.inputs[0], PerReplica), lowering.graph.replicas)
    if factor == 1:
        return tensor
    dtype = lowering.facts.dtypes[source.name]
    share = constant(f"{tensor.name}.share", factor, dtype)
    name = lowering.value_name(node.outputs[0].name, Layout("worker", decision.outputs[0]))
    return lowering.out.emit("Mul", [tensor, share], name, dtype, "worker")


def _factor_of_average(node: gs.Node, varies: bool, replicas: int) -> float:
    """Return what one replica's tensor counts for: of those that are all alike, only one is read."""
    if node.op == average_replicas.SUM:
        return 1 if varies else replicas
    divides = node.op == average_replicas.AVERAGE or node.attrs["divide"]
    return 1 / replicas if varies and divides else 1


def _lower_shape(lowering: Lowering, node: gs.Node, decision: Decision) -> gs.Tensor:
    """Shape or Size of the whole, from a piece's."""
    source = node.inputs[0]
    placement = decision.inputs[0]
    operand = lowering.need(source.name, Layout("worker", placement))
    name = lowering.value_name(node.outputs[0].name, Layout("worker", Replicate()))
    out = lowering.out
    int64 = np.dtype(np.int64)
    if not isinstance(placement, Split):
        return out.emit(node.op, [operand], name, int64, "worker", **node.attrs)
    factors: list[int] | int = lowering.graph.replicas
    if node.op == "Shape":
        rank = len(lowering.facts.shape(source.name))
        sizes = [lowering.graph.replicas if axis == placement.axis else 1 for axis in range(rank)]
        factors = sizes[node.attrs.get("start", 0) : node.attrs.get("end", rank)]
    piece = out.emit(node.op, [operand], f"{name}.piece", int64, "worker", **node.attrs)
    return out.emit("Mul", [piece, constant(f"{name}.ranks", factors, np.int64)], name, int64, "worker")


def _local_sizes(
    lowering: Lowering,
    node: gs.Node,
    tensor: gs.Tensor,
    whole: gs.Tensor,
    output: int,
    decision: Decision,
) -> gs.Tensor:
    """Return the shape argument for one rank's piece of the output."""
    placement = decision.outputs[output]
    if not isinstance(placement, Split | Owned):
        return whole
    sizes = lowering.facts.shape(node.outputs[output].name)
    spelled = lowering.facts.value(tensor.name)
    axis = placement.axis if isinstance(placement, Split) else 0
    if spelled is not None and len(spelled) == len(sizes) and spelled[axis] != sizes[axis]:
        return whole  # -1 or 0: the op finds the size itself
    axis -= len(sizes) - (len(spelled) if spelled is not None else len(sizes))
    if axis < 0:
        return whole  # Expand to fewer axes than the operand has
    name = f"{whole.name}.of.{node.name}.{decision.site}"
    if isinstance(placement, Owned):
        return _owned_sizes(lowering, whole, placement, name)
    ranks = lowering.graph.replicas
    if isinstance(whole, gs.Constant):
        values = np.array(whole.values)
        values[axis] //= ranks
        return gs.Constant(name, values)
    divisors = [ranks if index == axis else 1 for index in range(len(sizes))]
    parts = constant(f"{name}.ranks", divisors, np.int64)
    return lowering.out.emit("Div", [whole, parts], name, np.dtype(np.int64), decision.site)


def _owned_sizes(lowering: Lowering, whole: gs.Tensor, placement: Owned, name: str) -> gs.Tensor:
    """Put the number of owned rows in the place of axis 0."""
    int64 = np.dtype(np.int64)
    rows = lowering.out.row_count(placement.parameter)
    rest = [
        constant(f"{name}.{bound}", [value], np.int64)
        for bound, value in (("start", 1), ("end", np.iinfo(np.int64).max), ("axis", 0))
    ]
    tail = lowering.out.emit("Slice", [whole, *rest], f"{name}.tail", int64, "server")
    return lowering.out.emit("Concat", [rows, tail], name, int64, "server", axis=0)


def _routes_slices(node: gs.Node, decision: Decision) -> bool:
    is_owned = all(isinstance(placement, Owned) for placement in decision.inputs)
    return is_owned and (is_sum_rows(node) or decision.offset_ids or node.op == "ScatterND")


def _lower_routed(lowering: Lowering, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
    """Lower an op on indexed slices where they were routed to: on the server that owns the rows."""
    owned = decision.inputs[0]
    assert isinstance(owned, Owned)
    gradient = lowering.graph.training.gradients[owned.parameter]
    if is_sum_rows(node):
        return list(push_slices(lowering, owned))
    if node.op == "Gather":
        table, ids = (lowering.need(t.name, Layout("server", owned)) for t in node.inputs)
        return _emit(lowering, node, decision, [table, _offset(lowering, ids, owned)])
    if node.inputs[2].name == gradient.rows:
        ids, rows = push_slices(lowering, owned)
        last = constant(f"{node.name}.last", [1], np.int64)
        name = f"{node.name}.positions"
        positions = lowering.out.emit("Unsqueeze", [ids, last], name, ids.dtype, "server")
    else:
        positions, rows = (lowering.need(t.name, Layout("server", owned)) for t in node.inputs[1:])
    table = lowering.need(node.inputs[0].name, Layout("server", owned))
    return _emit(lowering, node, decision, [table, _offset(lowering, positions, owned), rows])


def _offset(lowering: Lowering, ids: gs.Tensor, owned: Owned) -> gs.Tensor:
    """Turn ids of the whole table into positions among the owned rows."""
    first = lowering.out.first_row(owned.parameter)
    return lowering.out.emit("Sub", [ids, first], f"{ids.name}.local", np.dtype(np.int64), "server")
