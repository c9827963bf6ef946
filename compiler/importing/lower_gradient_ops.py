"""The standard's Gradient op, which no onnxruntime runs, written out by partc's own differentiation.

    before   dW, dE = ai.onnx.preview.training.Gradient <xs = ["W", "E"], y = "loss"> (W, E)
    after    the backward nodes of the loss; dE = ScatterND of rows into zeros where E is read by rows

Source: the operator's documentation in the ONNX specification, ai.onnx.preview.training version 1.
"""

from collections.abc import Sequence

import onnx
from onnx import helper

from partc.compiler.differentiation.differentiate import differentiate
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.parameters.find_parameters import trace
from partc.compiler.differentiation.tensor_types import Types, infer_types
from partc.compiler.importing.bindings import GradientTensors
from partc.compiler.importing.lower_optimizer_ops import PREVIEW_DOMAIN
from partc.compiler.model_files.cut_model import needed_for
from partc.passes.graph.training_graph import Gradient
from partc.runtime.errors import BadModel, UnsupportedModel


def lower_gradient_ops(model: onnx.ModelProto, opset: int) -> dict[str, GradientTensors]:
    """Replace every Gradient op by standard ops; return the gradients by differentiated tensor."""
    gradient_tensors: dict[str, GradientTensors] = {}
    while node := next(filter(_is_gradient, model.graph.node), None):
        if repeated := gradient_tensors.keys() & set(_names(node, "xs")):
            raise UnsupportedModel(
                f"{min(repeated)!r} is differentiated by two Gradient ops",
                at=f"node {node.name or node.output[0]!r}",
                fix="add the losses first, and differentiate their sum once",
            )
        gradient_tensors |= _lower(model, node, opset)
    return gradient_tensors


def _is_gradient(node: onnx.NodeProto) -> bool:
    return node.domain == PREVIEW_DOMAIN and node.op_type == "Gradient"


def _names(node: onnx.NodeProto, attribute: str) -> list[str]:
    return [name.decode() for a in node.attribute if a.name == attribute for name in a.strings]


def _lower(model: onnx.ModelProto, gradient: onnx.NodeProto, opset: int) -> dict[str, GradientTensors]:
    graph = model.graph
    xs, loss = _names(gradient, "xs"), next(a.s.decode() for a in gradient.attribute if a.name == "y")
    _check_inputs(gradient, xs)
    forward_nodes = needed_for(graph, [loss])
    if not forward_nodes:
        raise BadModel(
            f"the Gradient op differentiates {loss!r}, which no node makes",
            at=f"node {gradient.name or gradient.output[0]!r}, attribute y",
            fix="name the output of the loss node",
        )
    types = infer_types(model)
    forward = helper.make_graph(forward_nodes, "forward", graph.input, [], graph.initializer)
    build = NodeBuilder(_used_names(graph))
    flow = trace(forward, types, loss, xs)
    gradients = differentiate(build, forward, types, flow, loss=loss, opset=opset)
    bound_gradients = _bind(build, gradients, dict(zip(xs, gradient.output, strict=False)), types)
    in_forward = {id(node) for node in forward_nodes}
    rest = [node for node in graph.node if id(node) not in in_forward and node is not gradient]
    nodes = [*build.nodes, *rest]
    functions = [f for f in build.functions.values() if f.name not in {g.name for g in model.functions}]
    model.functions.extend(functions)
    if functions and not any(o.domain == functions[0].domain for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(functions[0].domain, 1))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    graph.initializer.extend(build.constants)
    return bound_gradients


def _check_inputs(gradient: onnx.NodeProto, xs: Sequence[str]) -> None:
    for name, actual in zip([*xs, *_names(gradient, "zs")], gradient.input, strict=False):
        if name != actual:
            raise UnsupportedModel(
                f"the gradient with respect to {name!r} is asked for at another value, {actual!r}",
                at=f"node {gradient.name or gradient.output[0]!r} (Gradient)",
                fix=f"give the node {name!r} itself as its input",
            )


def _used_names(graph: onnx.GraphProto) -> set[str]:
    names = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        names.update(node.output)
        names.add(node.name)
    return names


def _bind(
    build: NodeBuilder, gradients: Sequence[Gradient], outputs: dict[str, str], types: Types
) -> dict[str, GradientTensors]:
    """Give every gradient the name that the Gradient op's output had."""
    gradient_of = {gradient.parameter: gradient for gradient in gradients}
    tensors_of: dict[str, GradientTensors] = {}
    for name, output in outputs.items():
        if not output:
            continue
        if name not in gradient_of:
            raise UnsupportedModel(
                f"the loss does not depend on {name!r}",
                at=f"gradient {output!r}",
                fix=f"drop {name!r} from the Gradient op's xs",
            )
        gradient = gradient_of[name]
        if gradient.dense is not None:
            build.call("Identity", [gradient.dense], [output])
        else:
            _scatter(build, gradient, output, types)
        tensors_of[name] = GradientTensors(dense=output, ids=gradient.ids, rows=gradient.rows)
    return tensors_of


def _scatter(build: NodeBuilder, gradient: Gradient, output: str, types: Types) -> None:
    assert gradient.ids is not None
    assert gradient.rows is not None
    shape = build.op("Shape", gradient.parameter)
    zero = helper.make_tensor("value", types[gradient.parameter].element, [1], [0])
    zeros = build.op("ConstantOfShape", shape, value=zero)
    positions = build.op("Unsqueeze", gradient.ids, build.ints(-1))
    build.call("ScatterND", [zeros, positions, gradient.rows], [output], reduction="add")
