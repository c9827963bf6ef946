"""A deep pre-norm transformer, node by node, as exporters write it, of any length."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one step: samples, positions of each, heads, channels of the stream and of the feed-forward."""

    batch: int = 2
    time: int = 4
    heads: int = 2
    width: int = 8
    hidden: int = 16
    vocabulary: int | None = None  # None: the stream is the data, and its mean the loss


class DeepTransformer:
    """Blocks appended one after another; `model` tells the graph of what was appended."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._generator = np.random.default_rng(0)
        # Any number of samples: 0 copies the size at its place.
        self._apart = self._store("apart", np.array([0, 0, sizes.heads, -1]))
        self._together = self._store("together", np.array([0, 0, sizes.width]))
        self._scale = self._store("scale", np.array(0.5, np.float32))
        self._stream = "x" if sizes.vocabulary is None else self._embedding(sizes.vocabulary)

    def append_block(self) -> None:
        x = self._stream
        x = self._op("Add", x, self._attention(self._norm(x)))
        self._stream = self._op("Add", x, self._perceptron(self._norm(x)))

    def model(self) -> onnx.ModelProto:
        """Of `x` float32 [batch, time, width], or of `tokens` and `labels` int64 [batch, time]."""
        sizes = self.sizes
        if sizes.vocabulary is None:
            names = {"x": (TensorProto.FLOAT, [sizes.batch, sizes.time, sizes.width])}
            loss = [helper.make_node("ReduceMean", [self._stream], ["loss"], keepdims=0)]
        else:
            names = {name: (TensorProto.INT64, [sizes.batch, sizes.time]) for name in ("tokens", "labels")}
            loss = self._loss(sizes.vocabulary)
        graph = helper.make_graph(
            [*self.nodes, *loss],
            "deep",
            [helper.make_tensor_value_info(name, *kind) for name, kind in names.items()],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
            self.initializers,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def _embedding(self, vocabulary: int) -> str:
        tokens = self._op("Gather", self._weight(vocabulary, self.sizes.width), "tokens")
        return self._op("Add", tokens, self._weight(self.sizes.time, self.sizes.width))

    def _loss(self, vocabulary: int) -> list[onnx.NodeProto]:
        logits = helper.make_node(
            "MatMul", [self._norm(self._stream), self._weight(self.sizes.width, vocabulary)], ["logits"]
        )
        by_class = helper.make_node("Transpose", ["logits"], ["by_class"], perm=[0, 2, 1])
        return [
            logits,
            by_class,
            helper.make_node("SoftmaxCrossEntropyLoss", ["by_class", "labels"], ["loss"]),
        ]

    def _attention(self, x: str) -> str:
        width = self.sizes.width
        query, key, value = (self._heads(x, order) for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        weights = self._op("Softmax", self._op("Mul", self._op("MatMul", query, key), self._scale))
        mixed = self._op("Transpose", self._op("MatMul", weights, value), perm=[0, 2, 1, 3])
        return self._linear(self._op("Reshape", mixed, self._together), width, width)

    def _heads(self, x: str, order: list[int]) -> str:
        projected = self._linear(x, self.sizes.width, self.sizes.width)
        return self._op("Transpose", self._op("Reshape", projected, self._apart), perm=order)

    def _perceptron(self, x: str) -> str:
        width, hidden = self.sizes.width, self.sizes.hidden
        return self._linear(self._op("Gelu", self._linear(x, width, hidden)), hidden, width)

    def _linear(self, x: str, wide: int, narrow: int) -> str:
        return self._op("Add", self._op("MatMul", x, self._weight(wide, narrow)), self._weight(narrow))

    def _norm(self, x: str) -> str:
        return self._op(
            "LayerNormalization", x, self._weight(self.sizes.width), self._weight(self.sizes.width)
        )

    def _weight(self, *shape: int) -> str:
        value = self._generator.normal(scale=0.2, size=shape).astype(np.float32)
        return self._store(f"weight{len(self.initializers)}", value)

    def _store(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def _op(self, op_type: str, *inputs: str, **attributes: list[int]) -> str:
        output = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output
