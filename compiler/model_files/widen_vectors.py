"""Multiply by a vector as by a matrix of one column.

    before   y = MatMul (A, v)        after   column = Unsqueeze (v)
                                              product = MatMul (A, column)
                                              y = Squeeze (product)

ONNX Runtime puts a Transpose of A into the product, and computes it wrongly if v is a vector (1.31.1,
MatmulTransposeFusion). Of two matrices it saves a copy, so that it is not done without.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.graph.bodies import subgraphs_of
from partc.passes.graph.inline_functions import inline_selected_functions

Types = Mapping[str, onnx.TypeProto]

PRODUCTS = frozenset({("", "MatMul"), ("ai.onnx", "MatMul")})


def inline_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inline functions that multiply, or call one that does: in a function nothing has a number of axes.

    Not those that partc writes, which multiply no vectors.
    """
    called = {
        (function.domain, function.name): set(_ops(function.node))
        for function in model.functions
        if function.domain.partition(".")[0] != "partc"
    }
    multiply = set(PRODUCTS)
    while more := {name for name, ops in called.items() if ops & multiply} - multiply:
        multiply |= more
    products = sorted(multiply - PRODUCTS)
    return inline_selected_functions(model, products) if products else model


def _ops(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    """Yield the domains and types of nodes, of those in bodies too."""
    for node in nodes:
        yield node.domain, node.op_type
        for body in subgraphs_of(node):
            yield from _ops(body.node)


def widen_vectors(graph: onnx.GraphProto, around: Types | None = None) -> bool:
    """Rewrite, in place, products whose second factor has one axis, in bodies too; tell whether any had.

    `around`: types that the graph does not tell itself.
    """
    types = {**(around or {}), **dict(_types(graph))}
    taken = {*types, *(name for node in graph.node for name in (*node.input, *node.output))}
    nodes: list[onnx.NodeProto] = []
    are_widened = False
    for node in graph.node:
        for body in subgraphs_of(node):
            are_widened = widen_vectors(body, types) or are_widened
        if (node.domain, node.op_type) in PRODUCTS and _rank(types, node.input[1]) == 1:
            nodes += _as_column(graph, node, types, taken)
        else:
            nodes.append(node)
    if len(nodes) > len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
        return True
    return are_widened


def _types(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    """Yield what is inferred, then what is declared, which counts."""
    for value in (*graph.value_info, *graph.input, *graph.output):
        yield value.name, value.type
    for tensor in graph.initializer:
        yield tensor.name, helper.make_tensor_type_proto(tensor.data_type, tensor.dims)


def _rank(types: Types, name: str) -> int | None:
    known = types.get(name)
    is_known = known is not None and known.tensor_type.HasField("shape")
    return len(known.tensor_type.shape.dim) if known is not None and is_known else None


def _as_column(
    graph: onnx.GraphProto, node: onnx.NodeProto, types: Types, taken: set[str]
) -> list[onnx.NodeProto]:
    """Return what stands in a product's place, under names that nothing else bears."""
    vector, result = node.input[1], node.output[0]
    column, product, behind, last = (
        _fresh(f"{result}/{hint}", taken) for hint in ("column", "product", "behind", "last")
    )
    for name, axis in ((behind, 1), (last, -1)):
        graph.initializer.append(numpy_helper.from_array(np.array([axis], np.int64), name))
    for name, like in ((column, vector), (product, result)):
        if like in types:
            wide = graph.value_info.add(name=name, type=types[like])
            wide.type.tensor_type.shape.dim.add(dim_value=1)
    widened = onnx.NodeProto()
    widened.CopyFrom(node)
    widened.input[1], widened.output[0] = column, product
    return [
        helper.make_node("Unsqueeze", [vector, behind], [column]),
        widened,
        helper.make_node("Squeeze", [product, last], [result]),
    ]


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
