"""Emit one node of the training graph for one site, as its decision says.

Sizes are always the single device's: `Shape` of a piece is scaled up, and an op that spells a shape
(Reshape, Expand, ConstantOfShape) gets it divided, factor by factor, on a copy of its own.

An op's lengths, starts and pads are said for a rank's part of what it cuts: of a Slice of [B, 3 H] from H to
2 H, split in two behind 3 blocks, a rank slices [B, 3 H / 2] from H / 2 to H.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.operation_builder import onnx_number
from partc.passes.indexed_rows.exchange_rows import needs_exchange, push_slices, reduce_slices
from partc.passes.indexed_rows.request_rows import request_rows, run_on_requested_rows
from partc.passes.layouts.decide_on_servers import slices_rows
from partc.passes.layouts.decisions import Decision
from partc.passes.layouts.layouts import (
    REPLICAS,
    Layout,
    PerReplica,
    Replicate,
    RequestedRows,
    served_rows,
)
from partc.passes.lowering.gather_owned import slice_owned_rows
from partc.passes.lowering.local_sizes import uneven_parts
from partc.passes.lowering.local_windows import finish_part, local_node, operands_of
from partc.passes.lowering.lower_table import cuts_table, lower_table
from partc.passes.lowering.lowered_graph import FactorPart, Number, PartNumber, constant
from partc.passes.lowering.lowering import INT64, Lowering, tag
from partc.passes.replicas import average_replicas
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import is_sum_rows, rule_of
from partc.runtime.plan.program import Site


def lower_node(lowering: Lowering, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
    """Return the node's outputs as lowered values."""
    if node.domain == average_replicas.REPLICA_DOMAIN:
        return [_lower_replica_average(lowering, node, decision)]
    if cuts_table(decision):
        return [lower_table(lowering, node, decision)]
    if node.op in ("Shape", "Size") and decision.site != "server":
        return [_lower_shape(lowering, node, decision)]
    if decision.site != "server" and needs_exchange(lowering, node, decision.site):
        return reduce_slices(lowering, node, decision.site)
    if isinstance(decision.outputs[0].along(REPLICAS), RequestedRows):
        is_first = not isinstance(decision.inputs[0].along(REPLICAS), RequestedRows)
        return [(request_rows if is_first else run_on_requested_rows)(lowering, node, decision)]
    if slices_rows(node, lowering.facts) and (parameter := decision.inputs[0].rows_of):
        return [slice_owned_rows(lowering, node, parameter)]
    if decision.site == "server" and _routes_slices(node, decision):
        return _lower_routed(lowering, node, decision)
    return _emit(lowering, node, decision, _operands(lowering, node, decision))


def _operands(lowering: Lowering, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
    operands: list[gs.Tensor] = []
    spelled = _spelled_shapes(lowering, node)
    bounds = _local_bounds(lowering, node, decision)
    for index, (tensor, layout) in enumerate(zip(node.inputs, decision.inputs, strict=True)):
        if not tensor.name:
            operands.append(gs.Variable.empty())
        elif index in bounds:
            operands.append(bounds[index])
        elif index in spelled:
            output = spelled[index]
            whole = lowering.need(tensor.name, _whole(layout))
            shape = _local_sizes(lowering, node, tensor, whole, output, decision)
            operands.append(shape)
        else:
            operands.append(lowering.need(tensor.name, layout))
    return operands + _squeezed_axes(lowering, node)


def _local_bounds(lowering: Lowering, node: gs.Node, decision: Decision) -> dict[int, gs.Tensor]:
    """Return the operands that count entries of what a rank has a part of."""
    rule = rule_of(node, lowering.facts)
    if rule is None or not rule.bounds or not decision.inputs[0].splits():
        return {}
    bounds = local_bounds(rule, partial(lowering.local_number, decision.inputs[0]))
    return {
        index: lowering.numbers(
            f"{node.inputs[index].name}.of.{node.name}.{tag(decision.inputs[0])}",
            numbers,
            decision.site,
            lowering.facts.dtypes[node.inputs[index].name],
        )
        for index, numbers in bounds.items()
    }


def _squeezed_axes(lowering: Lowering, node: gs.Node) -> list[gs.Tensor]:
    """Spell a Squeeze's axes where it names none: a piece may have more of size 1 than the whole."""
    if node.op != "Squeeze" or len(node.inputs) > 1:
        return []
    shape = lowering.facts.shape(node.inputs[0].name)
    return [constant(f"{node.name}.axes", [a for a, size in enumerate(shape) if size == 1], np.int64)]


def _whole(layout: Layout) -> Layout:
    own = [p if isinstance(p, PerReplica) else Replicate() for p in layout.placements]
    return Layout(layout.site, *own)


def _spelled_shapes(lowering: Lowering, node: gs.Node) -> dict[int, int]:
    rule = rule_of(node, lowering.facts)
    return {} if rule is None else dict(rule.shape_inputs)


def _emit(
    lowering: Lowering, node: gs.Node, decision: Decision, operands: list[gs.Tensor]
) -> list[gs.Tensor]:
    values: list[str] = []  # that hold the results
    means = [number for number, axis in enumerate(decision.axes) if axis.is_mean]
    outputs: list[gs.Tensor] = []
    local = local_node(lowering, node, decision)
    for tensor, layout in zip(node.outputs, decision.outputs, strict=True):
        if not tensor.name:
            values.append("")
            outputs.append(gs.Variable.empty())
            continue
        value = lowering.value_name(tensor.name, layout)
        values.append(value)
        name = f"{value}.of_part" if means else value if local.makes_part else f"{value}.wide"
        outputs.append(gs.Variable(name, dtype=lowering.facts.dtypes[tensor.name]))
    name = f"{node.name}@{outputs[0].name}"
    inputs = operands_of(lowering, local, operands, values[0], decision.site)
    copy = gs.Node(local.op, name, local.attributes, inputs, outputs, domain=node.domain)
    lowering.out.append(copy, decision.site)
    _count_flops(lowering, node, copy, decision)
    if means:
        return [_scale(lowering, *pair, means, decision) for pair in zip(outputs, values, strict=True)]
    if local.makes_part:
        return outputs
    return [finish_part(lowering, *pair, local, operands) for pair in zip(outputs, values, strict=True)]


def _count_flops(lowering: Lowering, node: gs.Node, copy: gs.Node, decision: Decision) -> None:
    lowering.out.original[copy.name] = node.name
    flops = lowering.local_flops(node, decision)
    if flops is not None:
        lowering.out.flops[copy.name] = flops


def _scale(
    lowering: Lowering, mean: gs.Tensor, value: str, means: Sequence[int], decision: Decision
) -> gs.Tensor:
    """A mean over a part counts for its share of the whole."""
    mesh = lowering.graph.meshes.of(decision.site)
    uneven = [part for part in uneven_parts(decision) if set(part.mesh_axes) <= set(means)]
    equal = set(means).difference(*(part.mesh_axes for part in uneven))
    share: gs.Tensor = constant(f"{mean.name}.share", 1.0 / prod(map(mesh.size, equal)), mean.dtype)
    for part in uneven:
        share = _weigh(lowering, share, mean, part, decision.site)
    return lowering.out.emit("Mul", [mean, share], value, mean.dtype, decision.site)


def _weigh(lowering: Lowering, share: gs.Tensor, mean: gs.Tensor, part: FactorPart, site: Site) -> gs.Tensor:
    """Return a share by how many entries of a factor a rank has."""
    out, name = lowering.out, f"{mean.name}.share.{'.'.join(map(str, part.mesh_axes))}"
    first = constant(f"{name}.place", 0, np.int64)
    count = out.numbers(site, (PartNumber((part,), 1),))
    own = out.emit("Gather", [count, first], f"{name}.entries", INT64, site)
    counted = out.emit("Cast", [own], f"{name}.counted", mean.dtype, site, to=onnx_number(mean.dtype))
    whole = constant(f"{name}.whole", part.entries, mean.dtype)
    ratio = out.emit("Div", [counted, whole], f"{name}.part", mean.dtype, site)
    return out.emit("Mul", [share, ratio], name, mean.dtype, site)


def _lower_replica_average(lowering: Lowering, node: gs.Node, decision: Decision) -> gs.Tensor:
    source, layout = node.inputs[0], decision.inputs[0]
    tensor = lowering.need(source.name, layout)
    varies = isinstance(layout.along(REPLICAS), PerReplica)
    factor = _factor_of_average(node, varies, lowering.graph.replicas)
    if factor == 1:
        return tensor
    dtype = lowering.facts.dtypes[source.name]
    share = constant(f"{tensor.name}.share", factor, dtype)
    name = lowering.value_name(node.outputs[0].name, decision.outputs[0])
    return lowering.out.emit("Mul", [tensor, share], name, dtype, decision.site)


def _factor_of_average(node: gs.Node, varies: bool, replicas: int) -> float:
    """Return what one replica's tensor counts for: of those that are all alike, only one is averaged."""
    if node.op == average_replicas.SUM:
        return 1 if varies else replicas
    divides = varies if node.op == average_replicas.AVERAGE else node.attrs["divide"]
    return 1 / replicas if divides else 1


def _lower_shape(lowering: Lowering, node: gs.Node, decision: Decision) -> gs.Tensor:
    """Shape or Size of the whole, from a piece's."""
    source, layout = node.inputs[0], decision.inputs[0]
    operand = lowering.need(source.name, layout)
    site = layout.site
    name = lowering.value_name(node.outputs[0].name, Layout(site))
    out = lowering.out
    int64 = np.dtype(np.int64)
    if not layout.splits():
        return out.emit(node.op, [operand], name, int64, site, **node.attrs)
    if layout.uneven() or source.name in lowering.facts.fixed_shapes:
        shape = np.array(lowering.facts.shape(source.name), np.int64)
        start, end = node.attrs.get("start", 0), node.attrs.get("end")
        return gs.Constant(name, shape[start:end] if node.op == "Shape" else np.array(shape.prod()))
    rank = len(lowering.facts.shape(source.name))
    sizes = [lowering.graph.meshes.parts(layout, axis) for axis in range(rank)]
    factors: list[int] | int = prod(sizes)
    if node.op == "Shape":
        factors = sizes[node.attrs.get("start", 0) : node.attrs.get("end", rank)]
    piece = out.emit(node.op, [operand], f"{name}.piece", int64, site, **node.attrs)
    return out.emit("Mul", [piece, constant(f"{name}.ranks", factors, np.int64)], name, int64, site)


def _local_sizes(
    lowering: Lowering,
    node: gs.Node,
    tensor: gs.Tensor,
    whole: gs.Tensor,
    output: int,
    decision: Decision,
) -> gs.Tensor:
    """Return the shape argument for one rank's piece of the output."""
    layout = decision.outputs[output]
    made = node.outputs[output].name
    sizes = lowering.facts.shape(made)
    spelled = lowering.facts.value(tensor.name)
    if spelled is None and made in lowering.facts.fixed_shapes:
        spelled = np.array(sizes, np.int64)
        whole = constant(f"{whole.name}.of.{node.name}.whole", list(sizes), np.int64)
    (entries,) = lowering.facts.shape(tensor.name) if spelled is None else spelled.shape
    offset = len(sizes) - (entries or len(sizes))  # of a list whose length only the data tells, all
    name = f"{whole.name}.of.{node.name}.{decision.site}"
    if decision != lowering.graph.decisions[node.name]:
        name = f"{name}.{tag(layout)}"
    if layout.rows_of:
        is_found = spelled is not None and (offset or spelled[0] != sizes[0])
        return whole if is_found else _owned_sizes(lowering, whole, layout.rows_of, name)
    # -1 or 0: the op finds the size itself. Expand may spell fewer axes than the operand has.
    if spelled is not None and layout.uneven():
        numbers = [
            lowering.local_number(layout, axis, size)
            if spelled[axis - offset] == size
            else spelled[axis - offset]
            for axis, size in enumerate(sizes)
            if axis >= offset
        ]
        return lowering.numbers(
            name, [n if isinstance(n, PartNumber) else int(n) for n in numbers], layout.site
        )
    divisors = [
        1 if spelled is not None and spelled[axis - offset] != sizes[axis] else parts
        for axis, parts in enumerate(lowering.graph.meshes.parts(layout, axis) for axis in range(len(sizes)))
        if axis >= offset
    ]
    if all(parts == 1 for parts in divisors):
        return whole
    if isinstance(whole, gs.Constant):
        return gs.Constant(name, np.array(whole.values) // np.array(divisors))
    parts = constant(f"{name}.ranks", divisors, np.int64)
    if spelled is not None:
        return lowering.out.emit("Div", [whole, parts], name, np.dtype(np.int64), decision.site)
    return _divided_sizes(lowering, whole, parts, name, decision.site)


def _divided_sizes(
    lowering: Lowering, whole: gs.Tensor, parts: gs.Tensor, name: str, site: Site
) -> gs.Tensor:
    """Divide sizes that only a run knows, rounded down: one of -1, which the op finds itself, stays one."""
    int64, emit = np.dtype(np.int64), lowering.out.emit
    above = emit("Add", [whole, parts], f"{name}.above", int64, site)
    quotient = emit("Div", [above, parts], f"{name}.quotient", int64, site)
    one = constant(f"{name}.one", [1], np.int64)
    return emit("Sub", [quotient, one], name, int64, site)


def _owned_sizes(lowering: Lowering, whole: gs.Tensor, parameter: str, name: str) -> gs.Tensor:
    """Put the number of owned rows in the place of axis 0."""
    int64 = np.dtype(np.int64)
    rows = lowering.out.row_count(parameter)
    rest = [
        constant(f"{name}.{bound}", [value], np.int64)
        for bound, value in (("start", 1), ("end", np.iinfo(np.int64).max), ("axis", 0))
    ]
    tail = lowering.out.emit("Slice", [whole, *rest], f"{name}.tail", int64, "server")
    return lowering.out.emit("Concat", [rows, tail], name, int64, "server", axis=0)


def _routes_slices(node: gs.Node, decision: Decision) -> bool:
    are_rows = all(layout.rows_of for layout in decision.inputs)
    return are_rows and (is_sum_rows(node) or node.op in ("Gather", "ScatterND"))


def _lower_routed(lowering: Lowering, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
    """Lower an op on indexed slices where they were routed to: on the server that owns the rows."""
    parameter = decision.inputs[0].rows_of
    here = served_rows(parameter)
    gradient = lowering.graph.training.gradients[parameter]
    if is_sum_rows(node):
        return list(push_slices(lowering, parameter))
    if node.op == "Gather":
        table, ids = (lowering.need(t.name, here) for t in node.inputs)
        return _emit(lowering, node, decision, [table, _offset(lowering, ids, parameter)])
    if node.inputs[2].name == gradient.rows:
        ids, rows = push_slices(lowering, parameter)
        last = constant(f"{node.name}.last", [1], np.int64)
        name = f"{node.name}.positions"
        positions = lowering.out.emit("Unsqueeze", [ids, last], name, ids.dtype, "server")
    else:
        positions, rows = (lowering.need(t.name, here) for t in node.inputs[1:])
    table = lowering.need(node.inputs[0].name, here)
    return _emit(lowering, node, decision, [table, _offset(lowering, positions, parameter), rows])


def _offset(lowering: Lowering, ids: gs.Tensor, parameter: str) -> gs.Tensor:
    """Turn ids of the whole table into positions among a server's rows."""
    first = lowering.out.first_row(parameter)
    return lowering.out.emit("Sub", [ids, first], f"{ids.name}.local", np.dtype(np.int64), "server")


def local_bounds(rule: ShardingRule, local: Callable[[int, int], Number]) -> dict[int, tuple[Number, ...]]:
    """Return input index -> numbers, for the inputs whose numbers differ on a part.

    `local`: of an axis of input 0 and a number of its entries, how many of these a rank has. Those inputs are
    then spelled anew; all others stay as they are.
    """
    bounds: dict[int, tuple[Number, ...]] = {}
    for index, numbers in rule.bounds.items():
        own = tuple(number if axis is None else local(axis, number) for number, axis in numbers)
        if own != tuple(number for number, _ in numbers):
            bounds[index] = own
    return bounds
