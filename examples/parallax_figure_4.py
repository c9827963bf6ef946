"""Figure 4 of the Parallax paper (arXiv 1808.02621): training on one device, here with onnxruntime.

python examples/parallax_figure_4.py
"""

import numpy as np
import onnx
import onnxruntime

import partc

ITERATIONS = 40


def input_batches():
    """Yield batches without end: points, and on which side of a curve they lie."""
    random = np.random.default_rng(0)
    while True:
        x = random.normal(size=(32, 2)).astype(np.float32)
        yield {"x": x, "labels": (x[:, 1] > x[:, 0] ** 2).astype(np.int64)}


def build_graph():
    """Return one training step on one device: forward pass, loss, gradients, update."""
    forward = partc.build_model("mlp", sizes=(2, 32, 2), batch=32)
    return partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.Momentum(0.2))


class SingleDeviceRunner:
    """Runs a training graph with onnxruntime and keeps its variables."""

    def __init__(self, graph, data):
        self.data = iter(data)
        self.step = onnxruntime.InferenceSession(graph.SerializeToString())
        start = onnx.ModelProto(ir_version=graph.ir_version, opset_import=graph.opset_import)
        start.graph.CopyFrom(graph.training_info[0].initialization)
        made = onnxruntime.InferenceSession(start.SerializeToString()).run(None, {})
        bindings = {b.value: b.key for b in graph.training_info[0].initialization_binding}
        names = [output.name for output in start.graph.output]
        self.variables = {bindings[name]: value for name, value in zip(names, made, strict=True)}

    def run(self, fetch):
        """Train one step and return an output."""
        outputs = [output.name for output in self.step.get_outputs()]
        values = self.step.run(outputs, {**next(self.data), **self.variables})
        results = dict(zip(outputs, values, strict=True))
        self.variables = {name: results[f"{name}_next"] for name in self.variables}
        return results[fetch]


def main():
    """Train."""
    batches = input_batches()

    graph = build_graph()

    graph_runner = SingleDeviceRunner(graph, batches)
    for i in range(ITERATIONS):
        loss = graph_runner.run("loss")
        print(f"step {i + 1}: loss {float(np.mean(loss)):.4f}")


if __name__ == "__main__":
    main()
