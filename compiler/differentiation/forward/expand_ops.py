"""Write ops as others that have gradient rules: by partc's own expansion, else by ONNX's function.

LSTM, Attention, .. ── expansion ──> MatMul, Sigmoid, ..      readers of the node's outputs read those
"""

from collections.abc import Collection, Mapping

import onnx
from onnx import helper, inliner

from partc.compiler.differentiation.expansions.table import EXPANSIONS
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.node_builder import BodyBuilder
from partc.compiler.differentiation.tensor_types import Types, infer_types, small_constants
from partc.passes.graph.inline_functions import spell_out_defaults


def is_expandable(op_type: str, opset: int) -> bool:
    """Tell whether an op can be written as others."""
    return op_type in EXPANSIONS or has_function(op_type, opset)


def has_function(op_type: str, opset: int) -> bool:
    """Tell whether ONNX defines an op as a function of others."""
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return False
    # onnx's type stubs lack both.
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- partc's expansions


def expand_ops(model: onnx.ModelProto, op_types: Collection[str], opset: int) -> None:
    """Expand, in place, the nodes of the given types that partc has expansions for."""
    graph = model.graph
    if not any(_is_ours(node, op_types) for node in graph.node):
        return
    types, constants = infer_types(model), small_constants(graph)
    build = BodyBuilder(names_in(graph))
    renamed: dict[str, str] = {}
    read_by_name = {value.name for value in graph.output}.union(*map(reads_of_subgraphs, graph.node))
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        if not _is_ours(node, op_types):
            build.copy(node)
            continue
        view = ForwardNode(build, node, types, constants, frozenset(), frozenset(), opset)
        results = _expand(view, types)
        renamed |= results
        for name in sorted(read_by_name & results.keys()):
            build.nodes.append(helper.make_node("Identity", [results[name]], [name], name=build.fresh(name)))
    del graph.node[:]
    graph.node.extend(build.nodes)


def _is_ours(node: onnx.NodeProto, op_types: Collection[str]) -> bool:
    return node.op_type in op_types and node.op_type in EXPANSIONS and node.domain in ("", "ai.onnx")


def _expand(view: ForwardNode, types: Types) -> dict[str, str]:
    """Emit a node's expansion; return what now stands for each of its outputs.

    An input that an earlier expansion made has the type of what it stands for.
    """
    view.build.scope = f"{view.node.name or view.y()}/"
    results = EXPANSIONS[view.node.op_type](view)
    results_by_output = dict(zip(view.node.output, results, strict=False))
    assert isinstance(types, dict)
    types.update(
        {
            results_by_output[name]: types[name]
            for name in results_by_output
            if name in types and results_by_output[name]
        }
    )
    return {name: result for name, result in results_by_output.items() if name}


def reads_of(node: onnx.NodeProto) -> set[str]:
    """Return what a node reads: its inputs, and what its subgraphs read of the graphs around them."""
    return {name for name in node.input if name} | reads_of_subgraphs(node)


def reads_of_subgraphs(node: onnx.NodeProto) -> set[str]:
    """Return what a node's subgraphs read of the graphs around them."""
    return set().union(*(_reads_of_graph(a.g) for a in node.attribute if a.HasField("g")))


def _reads_of_graph(graph: onnx.GraphProto) -> set[str]:
    own = {value.name for value in (*graph.input, *graph.initializer)}
    own |= {name for node in graph.node for name in node.output}
    names = {value.name for value in graph.output}
    return names.union(*map(reads_of, graph.node)) - own


def rename_reads(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename what a node and its subgraphs read of the graphs around them."""
    for index, name in enumerate(node.input):
        node.input[index] = names.get(name, name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            own = {value.name for value in (*attribute.g.input, *attribute.g.initializer)}
            own |= {name for inner in attribute.g.node for name in inner.output}
            outer = {name: new for name, new in names.items() if name not in own}
            for inner in attribute.g.node:
                rename_reads(inner, outer)


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names that the tensors and nodes of a graph and its subgraphs bear."""
    return outer_names_in(graph).union(*map(names_in_subgraphs, graph.node))


def outer_names_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names that a graph's own tensors and nodes bear."""
    values = (*graph.input, *graph.output, *graph.initializer)
    names = {value.name for value in values}
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
    return names


def names_in_subgraphs(node: onnx.NodeProto) -> set[str]:
    """Return the names within a node."""
    return set().union(*(names_in(a.g) for a in node.attribute if a.HasField("g")))


# ---------------------------------------------------------------- ONNX's functions


def inline_functions(model: onnx.ModelProto, op_types: Collection[str], opset: int) -> onnx.ModelProto:
    """Replace the nodes of the given types by the bodies that ONNX defines."""
    defaults = {("", op_type, ""): _defaults_of(op_type, opset) for op_type in op_types}
    spell_out_defaults(model.graph.node, defaults)  # ONNX's inliner leaves out what the body reads of them
    ids = [("", op_type) for op_type in sorted(op_types)]
    return inliner.inline_selected_functions(model, ids, inline_schema_functions=True)


def _defaults_of(op_type: str, opset: int) -> list[onnx.AttributeProto]:
    if not has_function(op_type, opset):
        return []
    attributes = onnx.defs.get_schema(op_type, opset).attributes
    return [
        attribute.default_value for _, attribute in sorted(attributes.items()) if attribute.default_value.name
    ]
