"""Reverse-mode differentiation of a standard ONNX graph into standard ONNX.

nodes in reverse      gradients of a node's outputs ── its rule ──> gradients of its inputs
a tensor read twice   its gradient is the Sum of what its readers contribute
a table of rows       read by Gathers alone: (ids, rows) of all Gathers, never a dense gradient
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.parameters.find_parameters import (
    Dataflow,
    differentiable_inputs,
    path_from_parameter,
    tables_of_rows,
)
from partc.compiler.differentiation.rules.indexing import indexed_slices
from partc.compiler.differentiation.rules.normalization import expand_training_batch_normalization
from partc.compiler.differentiation.rules.table import RULES
from partc.compiler.differentiation.sum_contributions import sum_contributions
from partc.compiler.differentiation.tensor_types import Types, small_constants, static_shape
from partc.passes.graph.training_graph import Gradient
from partc.runtime.errors import UnsupportedModel


@dataclass
class _Backward:
    """The gradients found so far."""

    build: NodeBuilder
    graph: onnx.GraphProto
    types: Types
    flow: Dataflow
    opset: int
    constants: Mapping[str, np.ndarray]
    tables: frozenset[str]
    parameters: frozenset[str]
    contributions: dict[str, list[str]] = field(default_factory=dict)
    slices: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def view(self, node: onnx.NodeProto) -> ForwardNode:
        input_indices = frozenset(
            index
            for index in differentiable_inputs(node, self.types)
            if node.input[index] in self.flow.active
        )
        return ForwardNode(
            self.build, node, self.types, self.constants, self.parameters, input_indices, self.opset
        )

    def total(self, tensor: str) -> str | None:
        """Return the sum of a tensor's contributions."""
        parts = self.contributions.get(tensor)
        if not parts:
            return None
        if len(parts) > 1:
            self.build.scope = f"{tensor}/gradient/"
            parts[:] = [sum_contributions(self.build, self.types, tensor, parts)]
        return parts[0]


def ops_without_rule(graph: onnx.GraphProto, types: Types, flow: Dataflow) -> set[str]:
    """Return the op types that the gradient must pass but that no rule treats."""
    return {node.op_type for node in _nodes_to_differentiate(graph, types, flow)} - RULES.keys()


def differentiate(
    build: NodeBuilder,
    graph: onnx.GraphProto,
    types: Types,
    flow: Dataflow,
    *,
    loss: str,
    opset: int,
    seed: str = "",
) -> tuple[Gradient, ...]:
    """Emit the forward nodes and their gradients; return the parameters' gradients, in their order.

    `seed` is the gradient of the loss, a tensor of its type; empty: 1.
    Raises UnsupportedModel for an op without a rule.
    """
    tables, parameters = tables_of_rows(graph, flow.parameters), frozenset(flow.parameters)
    backward = _Backward(build, graph, types, flow, opset, small_constants(graph), tables, parameters)
    for constant in graph.initializer:
        if constant.name in backward.constants and constant.name not in parameters:
            build.adopt(constant)
    for node in graph.node:
        _emit_forward(backward, node)
    shape = static_shape(types, loss, needed_by="the loss")
    backward.contributions[loss] = [seed or build.constant(np.ones(shape, types[loss].dtype))]
    for node in reversed(_nodes_to_differentiate(graph, types, flow)):
        _differentiate_node(backward, node)
    build.scope = ""
    return tuple(_gradient(backward, parameter) for parameter in flow.parameters)


def _nodes_to_differentiate(graph: onnx.GraphProto, types: Types, flow: Dataflow) -> list[onnx.NodeProto]:
    return [
        node
        for node in graph.node
        if flow.active.intersection(node.output)
        and any(node.input[index] in flow.active for index in differentiable_inputs(node, types))
    ]


def _emit_forward(backward: _Backward, node: onnx.NodeProto) -> None:
    if node.op_type == "BatchNormalization" and (view := backward.view(node)).integer("training_mode", 0):
        backward.build.scope = f"{node.name}/"
        expand_training_batch_normalization(view)
    else:
        backward.build.copy(node)


def _differentiate_node(backward: _Backward, node: onnx.NodeProto) -> None:
    gradients = [backward.total(name) if name else None for name in node.output]
    if not any(gradients):
        return
    view = backward.view(node)
    backward.build.scope = f"{node.name}/gradient/"
    if node.op_type == "Gather" and node.input[0] in backward.tables and gradients[0]:
        backward.slices.setdefault(node.input[0], []).append(indexed_slices(view, gradients[0]))
        return
    for index, gradient in sorted(_apply_rule(backward, view, gradients).items()):
        if index in view.gradient_inputs:
            backward.contributions.setdefault(node.input[index], []).append(gradient)


def _apply_rule(backward: _Backward, view: ForwardNode, gradients: Sequence[str | None]) -> Mapping[int, str]:
    rule = RULES.get(view.node.op_type)
    if rule is not None:
        return rule(view, gradients)
    way = path_from_parameter(backward.graph, backward.types, backward.flow.parameters, view.node)
    raise UnsupportedModel(
        f"no gradient rule for op {view.node.op_type!r} (opset {backward.opset})",
        at=f"node {view.node.name!r}, needed by {way}",
        fix="replace the op, or add a rule to compiler/differentiation/rules/table.py",
    )


def _gradient(backward: _Backward, parameter: str) -> Gradient:
    build = backward.build
    if parameter not in backward.tables:
        dense = backward.total(parameter)
        assert dense is not None, f"no gradient reached {parameter}"
        return Gradient(parameter, dense=dense)
    slices = backward.slices[parameter]
    if len(slices) == 1:
        return Gradient(parameter, ids=slices[0][0], rows=slices[0][1])
    build.scope = f"{parameter}/gradient/"
    ids = build.op("Concat", *(ids for ids, _ in slices), axis=0)
    rows = build.op("Concat", *(rows for _, rows in slices), axis=0)
    build.scope = ""
    return Gradient(parameter, ids=ids, rows=rows)
