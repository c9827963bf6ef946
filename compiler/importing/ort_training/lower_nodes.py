"""Write out every op that stock onnxruntime lacks, in rounds.

A rule reads the types of its inputs. Inference knows nothing of onnxruntime's ops, so those of what
they make are inferred when they are written out, for the next round.
"""

from collections.abc import Collection

import onnx
from onnx import helper

from partc.compiler.differentiation.expansions.table import Expansion
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.sizes.knowledge import UNINFERABLE
from partc.compiler.differentiation.tensor_types import infer_types, small_constants
from partc.compiler.importing.ort_training.attach_forward import attach_forward
from partc.compiler.importing.ort_training.forward_ops import FORWARD_OPS, STANDARD_OPS
from partc.compiler.importing.ort_training.gradient_ops import GRADIENT_OPS
from partc.compiler.model_files.convert_opset import convert_opset
from partc.runtime.errors import UnsupportedModel

MICROSOFT = "com.microsoft"
_RULES = {**FORWARD_OPS, **GRADIENT_OPS}
# Of onnxruntime in any version, of the standard in later ones, with the same inputs and attributes.
_LATER_STANDARD = frozenset({"LayerNormalization"})
KNOWN_OPS = _RULES.keys() | _LATER_STANDARD


def has_own_ops(model: onnx.ModelProto) -> bool:
    """Tell whether a graph has ops of onnxruntime's own, which no stock onnxruntime or no standard knows."""
    functions = {(function.domain, function.name) for function in model.functions}
    version = _version(model)
    return any(
        (node.domain == MICROSOFT or _is_misplaced(node, version))
        and (node.domain, node.op_type) not in functions
        for node in model.graph.node
    )


def move_misplaced(model: onnx.ModelProto) -> None:
    """Put onnxruntime's own ops into its own domain, so that ONNX's tools pass them by.

    onnxruntime registers some in the standard's domain, where the standard has no such ops, or has them
    in later versions only: LayerNormalization from 17 on.
    """
    version = _version(model)
    for node in model.graph.node:
        if _is_misplaced(node, version):
            node.domain = MICROSOFT
    if not any(opset.domain == MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


def convert_standard_ops(model: onnx.ModelProto, opset: int, at: str) -> onnx.ModelProto:
    """Bring the standard's ops to `opset`; those of onnxruntime's that it has there become the standard's.

    Needs: misplaced ops are moved. Raises UnsupportedModel.
    """
    if _version(model) < opset:
        try:
            model = convert_opset(model, _version(model), opset)
        except (RuntimeError, onnx.version_converter.ConvertError, *UNINFERABLE) as error:
            raise UnsupportedModel(
                f"the training model cannot be converted to opset {opset}: {error}",
                at=at,
                fix="generate it again, from a forward model of a newer opset, such as 17",
            ) from error
    for node in model.graph.node:
        if node.domain == MICROSOFT and node.op_type in _LATER_STANDARD:
            node.domain = ""
    return model


def _version(model: onnx.ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)


def _is_misplaced(node: onnx.NodeProto, version: int) -> bool:
    """Tell whether an op stands in the standard's domain, which has no such op in that version."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in KNOWN_OPS:
        return False
    try:
        onnx.defs.get_schema(node.op_type, version)
    except onnx.defs.SchemaError:
        return True
    return False


def lower_training_nodes(
    model: onnx.ModelProto, opset: int, variables: Collection[str] = ()
) -> dict[str, str]:
    """Replace onnxruntime's ops in place; return what now stands for each of their outputs.

    `variables`: inputs whose sizes are fixed, beside the initializers. Raises UnsupportedModel for an op that
    is not known.
    """
    attach_forward(model.graph)
    _drop_unread_outputs(model.graph)
    renamed: dict[str, str] = {}
    remaining, before = _count(model.graph), None
    while (
        remaining and remaining != before
    ):  # what one round writes out gives the next one's inputs their types
        renamed |= _lower(model, opset, variables)
        remaining, before = _count(model.graph), remaining
    for node in model.graph.node:
        if node.domain == MICROSOFT:
            raise UnsupportedModel(
                f"onnxruntime's op {node.op_type!r} is not known, or the types of its inputs are not",
                at=f"node {node.name or node.output[0]!r}",
                fix="generate the artifacts without that op; known are " + ", ".join(sorted(_RULES)),
            )
    return renamed


def _rule(node: onnx.NodeProto) -> Expansion | None:
    return _RULES.get(node.op_type) if node.domain == MICROSOFT else STANDARD_OPS.get(node.op_type)


def _count(graph: onnx.GraphProto) -> int:
    return sum(_rule(node) is not None for node in graph.node)


def _lower(model: onnx.ModelProto, opset: int, variables: Collection[str]) -> dict[str, str]:
    """Replace the nodes whose inputs' types are known."""
    graph = model.graph
    types, constants = infer_types(model), small_constants(graph)
    trained = frozenset(tensor.name for tensor in graph.initializer) | frozenset(variables)
    build = NodeBuilder(_names(graph))
    renamed: dict[str, str] = {}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        rule = _rule(node)
        if rule is None or not all(name in types for name in node.input if name):
            build.copy(node)
            continue
        build.scope = f"{node.name or next(filter(None, node.output))}/"
        results = rule(ForwardNode(build, node, types, constants, trained, frozenset(), opset))
        for name, result in zip(node.output, results, strict=False):
            if name and result:
                renamed[name] = result
                types |= {result: types[name]} if name in types else {}
    build.nodes += [
        helper.make_node("Identity", [renamed[value.name]], [value.name], name=f"{value.name}/output")
        for value in graph.output
        if value.name in renamed
    ]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in build.nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(build.constants)
    model.functions.extend(build.functions.values())
    domains = {function.domain for function in build.functions.values()}
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in sorted(domains))
    return renamed


def _drop_unread_outputs(graph: onnx.GraphProto) -> None:
    """Drop the trailing outputs that only a gradient op read: statistics, positions of maxima."""
    read_names = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        while node.domain != MICROSOFT and len(node.output) > 1 and node.output[-1] not in read_names:
            node.output.pop()


def _names(graph: onnx.GraphProto) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
    return names
