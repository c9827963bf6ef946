"""Time `partc grad` and the import of its result on a deep transformer of about 10,000 nodes.

    python benchmarks/differentiate_large.py [--nodes 10000] [--repeat 3] [--json FILE]

Tensors are small, so that only the number of nodes counts. One process, one thread; the best of the
repeats. The ratio is the measured time to the time that is allowed.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adam import AdamW
from partc.compiler.importing.import_training import import_training_graph

ALLOWED_S = 5.0
BATCH, TIME, HEADS, WIDTH, HIDDEN = 2, 4, 2, 8, 16


@dataclass(frozen=True, slots=True)
class Row:
    work: str
    system: str
    value: float
    unit: str
    ratio: float | None  # to the target; None: there is none


class Transformer:
    """A pre-norm transformer, node by node, as exporters write it."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._generator = np.random.default_rng(0)
        self._apart = self._store("apart", np.array([BATCH, TIME, HEADS, -1]))
        self._together = self._store("together", np.array([BATCH, TIME, WIDTH]))
        self._scale = self._store("scale", np.array(0.5, np.float32))

    def grow(self, x: str, nodes: int) -> str:
        """Append blocks until there are so many nodes; return the last output."""
        while len(self.nodes) < nodes:
            x = self._op("Add", x, self._attention(self._norm(x)))
            x = self._op("Add", x, self._perceptron(self._norm(x)))
        return x

    def _attention(self, x: str) -> str:
        query, key, value = (self._heads(x, order) for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        weights = self._op("Softmax", self._op("Mul", self._op("MatMul", query, key), self._scale))
        mixed = self._op("Transpose", self._op("MatMul", weights, value), perm=[0, 2, 1, 3])
        return self._linear(self._op("Reshape", mixed, self._together), WIDTH, WIDTH)

    def _heads(self, x: str, order: list[int]) -> str:
        return self._op(
            "Transpose", self._op("Reshape", self._linear(x, WIDTH, WIDTH), self._apart), perm=order
        )

    def _perceptron(self, x: str) -> str:
        return self._linear(self._op("Gelu", self._linear(x, WIDTH, HIDDEN)), HIDDEN, WIDTH)

    def _linear(self, x: str, wide: int, narrow: int) -> str:
        return self._op("Add", self._op("MatMul", x, self._weight(wide, narrow)), self._weight(narrow))

    def _norm(self, x: str) -> str:
        return self._op("LayerNormalization", x, self._weight(WIDTH), self._weight(WIDTH))

    def _weight(self, *shape: int) -> str:
        value = self._generator.normal(size=shape).astype(np.float32)
        return self._store(f"weight{len(self.initializers)}", value)

    def _store(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def _op(self, op_type: str, *inputs: str, **attributes: list[int]) -> str:
        output = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output


def forward_model(nodes: int) -> onnx.ModelProto:
    body = Transformer()
    last = body.grow("x", nodes - 1)
    body.nodes.append(helper.make_node("ReduceMean", [last], ["loss"], keepdims=0))
    graph = helper.make_graph(
        body.nodes,
        "deep",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [BATCH, TIME, WIDTH])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        body.initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def best_s(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(nodes: int, repeat: int) -> list[Row]:
    forward = forward_model(nodes)
    step = build_training_graph(forward, loss="loss", optimizer=AdamW())
    grad_s = best_s(lambda: build_training_graph(forward, loss="loss", optimizer=AdamW()), repeat)
    import_s = best_s(lambda: import_training_graph(step), repeat)
    size = len(forward.graph.node)
    return [
        Row(f"differentiate {size} nodes", "partc", grad_s, "s", grad_s / ALLOWED_S),
        Row(f"import {len(step.graph.node)} nodes", "partc", import_s, "s", None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.nodes, options.repeat)
    for row in rows:
        print(
            f"{row.work:28}{row.value:8.2f} {row.unit}"
            + (f"   {row.ratio:.2f} of what is allowed" if row.ratio else "")
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
