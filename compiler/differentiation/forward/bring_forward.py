"""Bring a forward model, however old, to one form.

Opset 21, no model-local functions, inference Dropout gone, no initializer listed as an input, every
node with a name of its own.
"""

from collections.abc import Callable
from functools import partial

import onnx
from onnx import helper

from partc.compiler.differentiation.expansions.table import EXPANSIONS
from partc.compiler.differentiation.forward.control_flow import unroll_control_flow
from partc.compiler.differentiation.forward.expand_ops import (
    expand_ops,
    has_function,
    inline_functions,
    rename_reads,
)
from partc.compiler.differentiation.forward.unpack_sequences import unpack_sequences
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.parameters.find_parameters import data_inputs
from partc.compiler.differentiation.sizes.fold_sizes import fold_sizes
from partc.compiler.differentiation.tensor_types import (
    SMALL_ELEMENTS,
    TensorType,
    element_count,
    small_constants,
    value_info,
    without_initializers,
)
from partc.compiler.model_files.convert_opset import convert_opset
from partc.compiler.model_files.model_file import onnx_transforming
from partc.passes.graph.inline_functions import inline_local_functions
from partc.passes.graph.training_graph import IR_VERSION
from partc.runtime.errors import UnsupportedModel

OPSET = 21
UNROLLABLE = 13  # the first opset whose Split, Squeeze and Unsqueeze are today's


def normalise_forward(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in the form that differentiation expects; the argument stays as it is."""
    normal = _transform(model, _to_our_opset)
    normal.ir_version = IR_VERSION
    graph = normal.graph
    inputs = data_inputs(graph)
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    _settle_dropouts(graph)
    name_nodes(graph)
    normal.metadata_props.extend(model.metadata_props)
    return normal


def expand_ops_without_rule(model: onnx.ModelProto, op_types: set[str]) -> onnx.ModelProto:
    """Write ops as others: by partc's expansions, else by the functions that ONNX defines them as.

    What an expansion reads may need one too. An op that has neither stays.
    """
    functions = {op_type for op_type in op_types - EXPANSIONS.keys() if has_function(op_type, OPSET)}
    expanded = model
    if functions:
        expanded = _transform(model, partial(inline_functions, op_types=functions, opset=OPSET))
    expand_ops(expanded, op_types, OPSET)
    name_nodes(expanded.graph)
    return expanded


def _transform(
    model: onnx.ModelProto, transformation: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Apply a transformation of ONNX's own, large initializers set aside: it would copy or lose them."""
    light = without_initializers(model)
    input_names = {value.name for value in light.graph.input}
    aside = []
    for tensor in model.graph.initializer:
        if element_count(tensor.dims) <= SMALL_ELEMENTS and not tensor.external_data:
            light.graph.initializer.append(tensor)
            continue
        aside.append(tensor)
        if tensor.name not in input_names:
            light.graph.input.append(
                value_info(tensor.name, TensorType(tensor.data_type, tuple(tensor.dims)))
            )
    result = transformation(light)
    names = {tensor.name for tensor in aside}
    inputs = [value for value in result.graph.input if value.name not in names]
    del result.graph.input[:]
    result.graph.input.extend(inputs)
    result.graph.initializer.extend(aside)
    result.ir_version = max(result.ir_version, IR_VERSION)
    return result


def _to_our_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    if model.functions:
        with onnx_transforming(
            model, "ONNX cannot inline the model's functions", fix="export the model without functions"
        ):
            model = inline_local_functions(model, convert_version=True)
    versions = {opset.domain: opset.version for opset in model.opset_import}
    version = versions.get("", versions.get("ai.onnx", 1))
    foreign = next((n for n in model.graph.node if n.domain not in ("", "ai.onnx")), None)
    if foreign is not None:
        raise UnsupportedModel(
            f"op {foreign.op_type!r} of domain {foreign.domain!r} is not standard ONNX",
            at=f"node {foreign.name or foreign.output[0]!r}",
            fix="export the model without operators of a particular runtime",
        )
    if version >= UNROLLABLE:
        unroll_control_flow(model, version)
        unpack_sequences(model)
    if version == OPSET:
        return model
    if version > OPSET:
        fold_sizes(model, shapes=False)
        return _lower_opset(model, version)
    # ONNX's converter leaves a scale per group as it is, where our opset wants one per channel.
    expand_ops(model, {"GroupNormalization"}, version)
    with onnx_transforming(
        model,
        f"ONNX cannot bring opset {version} to {OPSET}",
        fix=f"export the model with opset {OPSET}, or the highest that its exporter writes",
    ):
        converted = convert_opset(model, version, OPSET)
    if version < UNROLLABLE:
        unroll_control_flow(converted, OPSET)
        unpack_sequences(converted)
    return converted


def _lower_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Write ops that our opset lacks as ops that it has. The others only came to take more types.

    (ONNX's own converter lacks half of the adapters for this way.)
    """
    newer = {node.op_type for node in model.graph.node if not onnx.defs.has(node.op_type, OPSET)}
    expand_ops(model, newer, version)
    functions = {op_type for op_type in newer - EXPANSIONS.keys() if has_function(op_type, version)}
    if functions:
        model = inline_functions(model, functions, version)
    for node in model.graph.node:
        _lower_node(node, version)
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = OPSET
    return model


def _lower_node(node: onnx.NodeProto, version: int) -> None:
    """Drop attributes that our opset does not know: they say how to treat types that it does not know."""
    if not onnx.defs.has(node.op_type, OPSET):
        raise UnsupportedModel(
            f"op {node.op_type!r} of opset {version} cannot be written in opset {OPSET}",
            at=f"node {node.name or node.output[0]!r}",
            fix=f"export the model with opset {OPSET}",
        )
    schema_attributes = onnx.defs.get_schema(node.op_type, OPSET).attributes
    attributes = [attribute for attribute in node.attribute if attribute.name in schema_attributes]
    del node.attribute[:]
    node.attribute.extend(attributes)


# ---------------------------------------------------------------- dropout and names


def _settle_dropouts(graph: onnx.GraphProto) -> None:
    """Remove a Dropout that does nothing; give one that drops the mask its gradient needs."""
    constants = small_constants(graph)
    names = NodeBuilder(name for node in graph.node for name in node.output)
    outputs = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        rename_reads(node, renamed)
        if node.op_type != "Dropout":
            nodes.append(node)
        elif len(node.input) > 2 and bool(constants.get(node.input[2], True)):
            if len(node.output) == 1:
                node.output.append(names.fresh(f"{node.output[0]}.mask"))
            nodes.append(node)
        elif node.output[0] in outputs:
            nodes.append(helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name))
        else:
            renamed[node.output[0]] = node.input[0]
        if node.op_type == "Dropout" and node.output[1:] and (not nodes or nodes[-1] is not node):
            nodes += _full_mask(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _full_mask(dropout: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes that make the mask of a Dropout that drops nothing."""
    true = helper.make_tensor("true", onnx.TensorProto.BOOL, [1], [True])
    shape = f"{dropout.output[1]}.shape"
    return [
        helper.make_node("Shape", [dropout.input[0]], [shape]),
        helper.make_node("ConstantOfShape", [shape], [dropout.output[1]], value=true),
    ]


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name of its own; good names stay."""
    names = NodeBuilder()
    for node in graph.node:
        hint = node.name or next((f"{node.op_type}:{name}" for name in node.output if name), node.op_type)
        node.name = names.fresh(hint)
