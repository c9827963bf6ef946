"""Write a training BatchNormalization out whose running statistics ONNX Runtime would overwrite.

    before   y, m', v' = BatchNormalization <training_mode = 1> (x, scale, bias, m, v)
    after    mean, variance of x; y = BatchNormalization (x - mean, scale, bias, 0, variance); m' and v'

ONNX Runtime's kernel writes m' over m and v' over v, whoever reads them besides, and its optimiser makes one
of constants that are equal: the variance 1 of a layer that tracks nothing is then its scale. Left as they are
those nodes whose statistics are inputs of the graph that nothing else reads.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set

import onnx

from partc.compiler.differentiation.forward.expand_ops import names_in
from partc.compiler.differentiation.forward.widen_mixed_types import widen_mixed_types
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.rules.normalization import expand_training_batch_normalization
from partc.compiler.differentiation.tensor_types import Types, infer_types
from partc.passes.graph.bodies import nodes_of, subgraphs_of
from partc.passes.graph.inline_functions import inline_local_functions
from partc.runtime.errors import UnsupportedModel

FIRST_STATISTIC = 3  # of the inputs: the running mean, and behind it the variance


def expand_normalizations(
    model: onnx.ModelProto, opset: int, upgrade: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the model with those nodes written out; the model itself if there are none.

    `upgrade` brings a model to `opset`, and raises what it raises. Raises UnsupportedModel for such a node in
    the body of an If, Loop or Scan.
    """
    if any(_trains(node) for function in model.functions for node in nodes_of(function)):
        model = inline_local_functions(model)
    if not _overwriting(model.graph):
        return model
    model = upgrade(model)
    types = infer_types(model)
    if widen_mixed_types(model.graph, types):
        types = infer_types(model)
    _expand(model.graph, types, opset)
    return model


def _trains(node: onnx.NodeProto) -> bool:
    """Tell whether a node normalises by its batch: before opset 14, several outputs say so."""
    is_normalization = node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx")
    return is_normalization and (
        any(node.output[1:]) or any(a.i for a in node.attribute if a.name == "training_mode")
    )


def _overwriting(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes whose running statistics are no inputs of the graph, or that others read as well.

    Raises UnsupportedModel for one in a body, where nothing is written out.
    """
    if not any(_trains(node) for node in nodes_of(graph)):
        return []
    readers = Counter(_read_names(graph))
    inputs = {info.name for info in graph.input} - {tensor.name for tensor in graph.initializer}
    once = {name for name in inputs if readers[name] == 1}
    for node in graph.node:
        for body in subgraphs_of(node):
            _check_body(node, body, once, readers)
    return _overwriting_others(graph, once)


def _overwriting_others(graph: onnx.GraphProto, once: Set[str]) -> list[onnx.NodeProto]:
    return [node for node in graph.node if _trains(node) and not once >= {*node.input[FIRST_STATISTIC:]}]


def _check_body(
    owner: onnx.NodeProto, body: onnx.GraphProto, once: Set[str], readers: Mapping[str, int]
) -> None:
    own = {info.name for info in body.input if readers.get(info.name) == 1}
    for node in _overwriting_others(body, once | own):
        raise UnsupportedModel(
            f"a normalisation that trains in the body of {owner.op_type}, whose running statistics ONNX "
            "Runtime would overwrite",
            at=f"node {node.name or node.output[0]!r} ({node.op_type})",
            fix="normalise outside of it, or give it statistics that are variables which nothing else reads",
        )
    for node in body.node:
        for inner in subgraphs_of(node):
            _check_body(node, inner, once | own, readers)


def _read_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for body in subgraphs_of(node):
            yield from _read_names(body)


def _expand(graph: onnx.GraphProto, types: Types, opset: int) -> None:
    outputs = {node.output[0] for node in _overwriting(graph)}
    build = NodeBuilder(names_in(graph))
    for node in graph.node:
        if node.output[0] in outputs:
            build.scope = f"{node.name or node.output[0]}/"
            view = ForwardNode(build, node, types, {}, frozenset(), frozenset(), opset)
            expand_training_batch_normalization(view)
        else:
            build.copy(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in build.nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(build.constants)
