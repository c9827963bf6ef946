"""Figure 5 of the Parallax paper (arXiv 1808.02621): figure 4, changed to train on a cluster.

python examples/parallax_figure_5.py [RESOURCE_INFO_FILE]
"""

import sys
from pathlib import Path

import numpy as np

import partc

ITERATIONS = 40
RESOURCE_INFO_FILE = Path(__file__).parent / "cluster-2x2.json"


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


def main():
    """Train."""
    batches = input_batches()
    batches = partc.shard(batches)

    graph = build_graph()

    resource_info_file = sys.argv[1] if len(sys.argv) > 1 else RESOURCE_INFO_FILE
    graph_runner = partc.get_runner(graph, resource_info_file, partc.ParallaxConfig(), data=batches)
    for i in range(ITERATIONS):
        loss = graph_runner.run("loss")
        print(f"step {i + 1}: loss {float(np.mean(loss)):.4f}")


if __name__ == "__main__":
    main()
