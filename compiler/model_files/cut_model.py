"""Parts of a model: what some outputs need, with some tensors given instead of computed."""

from collections.abc import Collection, Iterable, Mapping

import onnx
from onnx import helper

from partc.passes.graph.bodies import subgraphs_of


def leaves_of(graph: onnx.GraphProto, outputs: Iterable[str], boundary: Collection[str]) -> set[str]:
    """Return the graph inputs and the tensors of `cut` that the outputs are computed from."""
    names, _ = _needed_part(graph, outputs, boundary)
    return names & ({info.name for info in graph.input} | set(boundary))


def reached_from(graph: onnx.GraphProto, tensors: Iterable[str], boundary: Collection[str]) -> set[str]:
    """Return the tensors and all that is computed from them, not looking beyond `cut`."""
    reachable = set(tensors)
    for node in graph.node:
        if reachable & reads_of(node):
            reachable.update(name for name in node.output if name not in boundary)
    return reachable


def needed_for(graph: onnx.GraphProto, outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that the outputs are computed by, in the graph's order."""
    return _needed_part(graph, outputs, ())[1]


def reads_of(node: onnx.NodeProto) -> set[str]:
    """Return what a node reads, its bodies included."""
    names = {name for name in node.input if name}
    for graph in subgraphs_of(node):
        for inner in graph.node:
            names |= reads_of(inner)
        names |= {info.name for info in graph.output}
    return names


def cut_model(
    model: onnx.ModelProto, boundary_types: Mapping[str, int], outputs: Collection[str]
) -> onnx.ModelProto:
    """Return the part of a model that makes `outputs` from its inputs and `given`.

    `given` maps a tensor to its element type; its shape is left open, as are all inner shapes.
    """
    graph = model.graph
    names, nodes = _needed_part(graph, outputs, boundary_types)
    inputs = [info for info in graph.input if info.name in names and info.name not in boundary_types]
    inputs += [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in boundary_types.items()
        if name in names
    ]
    declared = {info.name: info for info in graph.output}
    results = [declared.get(name) or helper.make_empty_tensor_value_info(name) for name in outputs]
    constants = [tensor for tensor in graph.initializer if tensor.name in names]
    part = helper.make_graph(nodes, f"{graph.name}_part", inputs, results, constants)
    result = helper.make_model(part, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    result.functions.extend(model.functions)
    return result


def _needed_part(
    graph: onnx.GraphProto, outputs: Iterable[str], boundary: Collection[str]
) -> tuple[set[str], list[onnx.NodeProto]]:
    needed, boundary_names = set(outputs), set(boundary)
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if needed.intersection(node.output) - boundary_names:
            nodes.append(node)
            needed.update(reads_of(node))
    return needed, nodes[::-1]
