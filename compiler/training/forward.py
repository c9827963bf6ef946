"""Bring a forward model, however old, to one form.

Opset 21, no model-local functions, inference Dropout gone, no initializer listed as an input, every
node with a name of its own.
"""

from collections.abc import Callable
from functools import partial

import onnx
from onnx import helper, inliner, version_converter

from partc.compiler.training.node_builder import NodeBuilder
from partc.compiler.training.parameters import data_inputs
from partc.compiler.training.rules.table import RULES
from partc.compiler.training.tensor_types import (
    SMALL_ELEMENTS,
    TensorType,
    element_count,
    small_constants,
    value_info,
    without_initializers,
)
from partc.runtime.errors import UnsupportedModel

OPSET = 21
IR_VERSION = 10


def normalise_forward(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in the form that differentiation expects; the argument stays as it is."""
    normal = _transform(model, _to_our_opset)
    normal.ir_version = IR_VERSION
    graph = normal.graph
    kept = data_inputs(graph)
    del graph.input[:]
    graph.input.extend(kept)
    del graph.value_info[:]
    _settle_dropouts(graph)
    name_nodes(graph)
    normal.metadata_props.extend(model.metadata_props)
    return normal


def expand_ops_without_rule(model: onnx.ModelProto, op_types: set[str]) -> onnx.ModelProto:
    """Replace ops by the functions that ONNX defines them as, and those inside by theirs.

    An op that has neither rule nor function stays.
    """
    known = {node.op_type for node in model.graph.node} | RULES.keys()
    unknown = set(op_types)
    expanded = model
    while unknown:
        _spell_out_defaults(expanded.graph, unknown)
        expanded = _transform(expanded, partial(_inline, op_types=sorted(unknown)))
        known |= unknown
        unknown = {node.op_type for node in expanded.graph.node if _has_function(node.op_type)} - known
    name_nodes(expanded.graph)
    return expanded


def _inline(model: onnx.ModelProto, op_types: list[str]) -> onnx.ModelProto:
    ids = [("", op_type) for op_type in op_types]
    return inliner.inline_selected_functions(model, ids, inline_schema_functions=True)


def _spell_out_defaults(graph: onnx.GraphProto, op_types: set[str]) -> None:
    """Give nodes their default attributes: ONNX's inliner leaves out what the body reads of them."""
    for node in graph.node:
        if node.op_type not in op_types or not _has_function(node.op_type):
            continue
        given = {attribute.name for attribute in node.attribute}
        schema = onnx.defs.get_schema(node.op_type, OPSET)
        node.attribute.extend(
            attribute.default_value
            for name, attribute in sorted(schema.attributes.items())
            if name not in given and attribute.default_value.name
        )


def _has_function(op_type: str) -> bool:
    try:
        schema = onnx.defs.get_schema(op_type, OPSET)
    except onnx.defs.SchemaError:
        return False
    # onnx's type stubs lack both.
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _transform(
    model: onnx.ModelProto, transformation: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Apply a transformation of ONNX's own, large initializers set aside: it would copy or lose them."""
    light = without_initializers(model)
    listed = {value.name for value in light.graph.input}
    aside = []
    for tensor in model.graph.initializer:
        if element_count(tensor.dims) <= SMALL_ELEMENTS and not tensor.external_data:
            light.graph.initializer.append(tensor)
            continue
        aside.append(tensor)
        if tensor.name not in listed:
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
        model = inliner.inline_local_functions(model, convert_version=True)
    versions = {opset.domain: opset.version for opset in model.opset_import}
    version = versions.get("", versions.get("ai.onnx", 1))
    foreign = next((n for n in model.graph.node if n.domain not in ("", "ai.onnx")), None)
    if foreign is not None:
        raise UnsupportedModel(
            f"op {foreign.op_type!r} of domain {foreign.domain!r} is not standard ONNX",
            at=f"node {foreign.name or foreign.output[0]!r}",
            fix="export the model without operators of a particular runtime",
        )
    if version == OPSET:
        return model
    try:
        return version_converter.convert_version(model, OPSET)
    except (RuntimeError, version_converter.ConvertError) as error:
        raise UnsupportedModel(
            f"ONNX cannot bring opset {version} to {OPSET}: {str(error).strip()}",
            at="onnx.version_converter",
            fix=f"export the model with opset {OPSET}",
        ) from error


# ---------------------------------------------------------------- dropout and names


def _settle_dropouts(graph: onnx.GraphProto) -> None:
    """Remove a Dropout that does nothing; give one that drops the mask its gradient needs."""
    constants = small_constants(graph)
    names = NodeBuilder(name for node in graph.node for name in node.output)
    outputs = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        if node.op_type != "Dropout":
            kept.append(node)
        elif len(node.input) > 2 and bool(constants.get(node.input[2], True)):
            if len(node.output) == 1:
                node.output.append(names.fresh(f"{node.output[0]}.mask"))
            kept.append(node)
        elif node.output[0] in outputs:
            kept.append(helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name))
        else:
            renamed[node.output[0]] = node.input[0]
    del graph.node[:]
    graph.node.extend(kept)


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name of its own; good names stay."""
    names = NodeBuilder()
    for node in graph.node:
        hint = node.name or next((f"{node.op_type}:{name}" for name in node.output if name), node.op_type)
        node.name = names.fresh(hint)
