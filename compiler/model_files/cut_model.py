"""Parts of a model: what some outputs need, with some tensors given instead of computed."""

from collections.abc import Collection, Iterable, Mapping

import onnx
from onnx import helper

from partc.compiler.model_files.model_file import subgraphs_of


def leaves_of(graph: onnx.GraphProto, outputs: Iterable[str], cut: Collection[str]) -> set[str]:
    """Return the graph inputs and the tensors of `cut` that the outputs are computed from."""
    needed, _ = _needed(graph, outputs, cut)
    return needed & ({info.name for info in graph.input} | set(cut))


def reached_from(graph: onnx.GraphProto, tensors: Iterable[str], cut: Collection[str]) -> set[str]:
    """Return the tensors and all that is computed from them, not looking beyond `cut`."""
    reached = set(tensors)
    for node in graph.node:
        if reached & reads_of(node):
            reached.update(name for name in node.output if name not in cut)
    return reached


def needed_for(graph: onnx.GraphProto, outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that the outputs are computed by, in the graph's order."""
    return _needed(graph, outputs, ())[1]


def reads_of(node: onnx.NodeProto) -> set[str]:
    """Return what a node reads, its bodies included."""
    names = {name for name in node.input if name}
    for graph in subgraphs_of(node):
        for inner in graph.node:
            names |= reads_of(inner)
        names |= {info.name for info in graph.output}
    return names


def cut_model(model: onnx.ModelProto, given: Mapping[str, int], outputs: Collection[str]) -> onnx.ModelProto:
    """Return the part of a model that makes `outputs` from its inputs and `given`.

    `given` maps a tensor to its element type; its shape is left open, as are all inner shapes.
    """
    graph = model.graph
    needed, nodes = _needed(graph, outputs, given)
    inputs = [info for info in graph.input if info.name in needed and info.name not in given]
    inputs += [
        helper.make_tensor_value_info(name, kind, None) for name, kind in given.items() if name in needed
    ]
    known = {info.name: info for info in graph.output}
    results = [known.get(name) or helper.make_empty_tensor_value_info(name) for name in outputs]
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    part = helper.make_graph(nodes, f"{graph.name}_part", inputs, results, constants)
    made = helper.make_model(part, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    made.functions.extend(model.functions)
    return made


def _needed(
    graph: onnx.GraphProto, outputs: Iterable[str], cut: Collection[str]
) -> tuple[set[str], list[onnx.NodeProto]]:
    wanted, given = set(outputs), set(cut)
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output) - given:
            nodes.append(node)
            wanted.update(reads_of(node))
    return wanted, nodes[::-1]
