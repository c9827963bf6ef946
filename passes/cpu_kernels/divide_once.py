"""Write a product with a reciprocal as a quotient, as ONNX Runtime does when it opens a segment.

before   Mul(Div(1, a), b)           after   Div(b, a)

ONNX Runtime (1.31.1, its issue 32413) forgets in its own rewriting, DivMulFusion, that b is read: where b is
copied to an output as well (what a message sends, a gradient that is fetched), it takes the copy for b's
only reader, renames b, and refuses the segment. Executors open segments without that rewriting; here it is
done before, so that any ONNX Runtime opens them, and no rank computes a reciprocal that it multiplies with.
"""

from collections import Counter

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.cpu_kernels.segment_values import is_node, read_names


def divide_once(model: onnx.ModelProto) -> int:
    """Rewrite the products of a segment in place; return how many."""
    graph = model.graph
    ones = {tensor.name for tensor in graph.initializer if _is_one(tensor)}
    readers = Counter(read_names(graph))
    reciprocals = {
        node.output[0]: node
        for node in graph.node
        if is_node(node, "Div") and node.input[0] in ones and readers[node.output[0]] == 1
    }
    merged: set[str] = set()
    for node in graph.node:
        name = (
            next((name for name in node.input if name in reciprocals), None) if is_node(node, "Mul") else None
        )
        if name is not None:
            factor = node.input[1] if node.input[0] == name else node.input[0]
            node.op_type = "Div"
            node.input[:] = [factor, reciprocals[name].input[1]]
            merged.add(name)
    nodes = [node for node in graph.node if not merged.intersection(node.output)]
    del graph.node[:]
    graph.node.extend(nodes)
    return len(merged)


def _is_one(tensor: onnx.TensorProto) -> bool:
    """Tell whether a constant is the number 1: without axes, so that the quotient has its divisor's."""
    is_number = np.issubdtype(helper.tensor_dtype_to_np_dtype(tensor.data_type), np.inexact)
    return bool(is_number and not tensor.dims and numpy_helper.to_array(tensor) == 1)
