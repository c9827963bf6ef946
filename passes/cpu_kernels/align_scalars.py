"""Give a scalar the rank of what it is broadcast over, where that ends in axes of size 1.

before   Mul(0.9 [], W [512,2048,1,1])           after   Mul(0.9 [1,1,1,1], W [512,2048,1,1])

ONNX Runtime merges the axes that two operands share before it broadcasts. A scalar has no axis to match
trailing ones of size 1, so that every element becomes a broadcast of its own: 10.6 ms for the product
above, 0.1 ms after (onnxruntime 1.31.1, CPU, one thread). Weights of 1x1 convolutions are such tensors.
"""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.cpu_kernels.segment_values import FreshNames, Shape, known_shapes

BINARY_OPS = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"})


def align_scalars(model: onnx.ModelProto, typed: onnx.ModelProto) -> int:
    """Align the scalars of a segment in place; `typed` is the same with shapes inferred. Return how many."""
    return _Alignment(model.graph, known_shapes(typed.graph)).run()


class _Alignment:
    def __init__(self, graph: onnx.GraphProto, shapes: Mapping[str, Shape]) -> None:
        self.graph = graph
        self.shapes = shapes
        self.names = FreshNames(graph)
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.nodes: list[onnx.NodeProto] = []
        self.aligned: dict[tuple[str, int], str] = {}

    def run(self) -> int:
        for node in self.graph.node:
            if node.op_type in BINARY_OPS and not node.domain and len(node.input) == 2:
                self._align(node)
            self.nodes.append(node)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        return len(self.aligned)

    def _align(self, node: onnx.NodeProto) -> None:
        left, right = (self.shapes.get(name) for name in node.input)
        for index, (scalar, other) in enumerate(((left, right), (right, left))):
            if scalar in ((), (1,)) and other is not None and len(other) > 1 and other[-1] == 1:
                node.input[index] = self._of_rank(node.input[index], len(other))

    def _of_rank(self, scalar: str, rank: int) -> str:
        key = (scalar, rank)
        if key not in self.aligned:
            self.aligned[key] = name = self.names.fresh(f"{scalar}/of_rank_{rank}")
            if scalar in self.constants:
                value = numpy_helper.to_array(self.constants[scalar]).reshape((1,) * rank)
                self.graph.initializer.append(numpy_helper.from_array(value, name))
            else:
                self._expand(scalar, rank, name)
        return self.aligned[key]

    def _expand(self, scalar: str, rank: int, name: str) -> None:
        """Copy the scalar: a Reshape might share the memory of a variable that is written in place."""
        shape = self.names.fresh(f"{name}/shape")
        self.graph.initializer.append(numpy_helper.from_array(np.ones(rank, np.int64), shape))
        self.nodes.append(helper.make_node("Expand", [scalar, shape], [name], name=name))
