"""Replace computed sizes by their values, and note the shapes that follow from them.

    before   s = Shape (x)                    after   t = Constant <[2, 48]>
             n = Gather (s, zero)                     y = Reshape (x, t)
             t = Concat (n, k)
             y = Reshape (x, t)

A graph that an exporter did not optimise computes its sizes while it runs. Differentiation, unrolling and
ONNX's shape inference read them from constants. What data or symbolic sizes decide stays computed; of
these the shapes are noted in value_info, with a symbol for every size that is not a number. Initializers
that are floats stay as they are, for they may be parameters: a tied table stays tied.
"""

import onnx
from onnx import helper, numpy_helper

from partc.compiler.differentiation.forward.expand_ops import reads_of
from partc.compiler.differentiation.sizes.knowledge import Knowledge
from partc.compiler.differentiation.tensor_types import infer_types, value_info


def fold_sizes(model: onnx.ModelProto, *, shapes: bool = True) -> None:
    """Fold in place. With `shapes` False what depends on a tensor's shape stays: it may yet change."""
    graph = model.graph
    knowledge = Knowledge(graph, opset_of(model), infer_types(model), shapes=shapes)
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        knowledge.saw(node)
    read_names = _read_names(graph, knowledge) | outputs
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if _is_folded(node, knowledge):
            nodes += [_constant(node, name, knowledge) for name in node.output if name in read_names]
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    if shapes:
        _note_shapes(graph, knowledge)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the standard ops."""
    versions = {entry.domain or "ai.onnx": int(entry.version) for entry in model.opset_import}
    return versions["ai.onnx"]


def _is_folded(node: onnx.NodeProto, knowledge: Knowledge) -> bool:
    return node.op_type != "Constant" and all(name in knowledge.values for name in node.output if name)


def _read_names(graph: onnx.GraphProto, knowledge: Knowledge) -> set[str]:
    """Return what is read when values stand for the nodes that make them."""
    names: set[str] = set()
    for node in graph.node:
        if not _is_folded(node, knowledge):
            names |= reads_of(node)
    return names


def _constant(node: onnx.NodeProto, name: str, knowledge: Knowledge) -> onnx.NodeProto:
    value = numpy_helper.from_array(knowledge.values[name])
    return helper.make_node("Constant", [], [name], name=node.name or name, value=value)


def _note_shapes(graph: onnx.GraphProto, knowledge: Knowledge) -> None:
    """Write down the shapes of what nodes make; the graph's outputs declare their own."""
    declared_names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    node_outputs = {name for node in graph.node for name in node.output if name} - declared_names
    del graph.value_info[:]
    for name in sorted(node_outputs & knowledge.types.keys()):
        if knowledge.types[name].shape is not None:
            graph.value_info.append(value_info(name, knowledge.types[name]))
