"""Write half of a value as a quotient, where ONNX Runtime would take it from those who read it besides.

before   h = Mul(x, 0.5)   y = Mul(h, Add(Tanh(..), 1))   z = Reshape(h)          after   h = Div(x, 2)   ...

ONNX Runtime (1.31.1) makes one op of Gelu by tanh, FastGeluFusion. Of all that it takes for that it asks
whether others read it, but not of the half: where another node does, as when a rank computes an activation
whole and sends on a part of its half, the half is gone and the segment is refused. A quotient by two is the
same number to the last bit, and no such pattern; Gelu whose half nobody else reads stays one op.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from partc.passes.cpu_kernels.segment_values import FreshNames, is_node, read_names


def halve_by_quotient(model: onnx.ModelProto) -> int:
    """Rewrite the halves of a segment in place; return how many."""
    graph = model.graph
    halves = {tensor.name: tensor for tensor in graph.initializer if _is_half(tensor)}
    if not halves:
        return 0
    readers, names = Counter(read_names(graph)), FreshNames(graph)
    twos: dict[str, str] = {}  # a half -> the two of its type and shape
    taken = {node.output[0]: node for node in _halves_of_gelus(graph, halves, readers)}
    for node in taken.values():
        value, half = node.input if node.input[1] in halves else reversed(node.input)
        if half not in twos:
            twos[half] = names.fresh(f"{half}/two")
            whole = np.full_like(numpy_helper.to_array(halves[half]), 2)
            graph.initializer.append(numpy_helper.from_array(whole, twos[half]))
        node.op_type = "Div"
        node.input[:] = [value, twos[half]]
    return len(taken)


def _halves_of_gelus(
    graph: onnx.GraphProto, halves: Mapping[str, onnx.TensorProto], readers: Mapping[str, int]
) -> Iterator[onnx.NodeProto]:
    """Yield the halves that several nodes read, one of which is a product with 1 + tanh that it alone reads.

    What is an output of the segment, ONNX Runtime leaves.
    """
    makers = {name: node for node in graph.node for name in node.output if name}
    outputs = {output.name for output in graph.output}
    for node in graph.node:
        if not is_node(node, "Mul") or node.output[0] in outputs:
            continue
        for factor, other in (node.input, reversed(node.input)):
            half = _behind_cast(makers.get(other), makers)
            if half is None or not is_node(half, "Mul") or not halves.keys() & set(half.input):
                continue
            is_taken = readers[half.output[0]] > 1 and half.output[0] not in outputs
            if is_taken and _is_shifted_tanh(factor, makers, readers):
                yield half


def _is_shifted_tanh(name: str, makers: Mapping[str, onnx.NodeProto], readers: Mapping[str, int]) -> bool:
    """Tell whether a value is a Tanh with something added, and each is read once."""
    total = makers.get(name)
    if total is None or not is_node(total, "Add") or readers[name] > 1:
        return False
    return any(
        term in makers and is_node(makers[term], "Tanh") and readers[term] == 1 for term in total.input
    )


def _behind_cast(node: onnx.NodeProto | None, makers: Mapping[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    """Return the node, or what makes the operand of a Cast."""
    return makers.get(node.input[0]) if node is not None and is_node(node, "Cast") else node


def _is_half(tensor: onnx.TensorProto) -> bool:
    """Tell whether a constant is the number 1/2, with no axis or with one of size 1, as ONNX Runtime does."""
    return tuple(tensor.dims) in ((), (1,)) and bool(np.all(numpy_helper.to_array(tensor) == 0.5))
