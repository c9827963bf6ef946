"""Time `partc grad` and the import of its result on a deep transformer of about 10,000 nodes.

    python benchmarks/differentiate_large.py [--nodes 10000] [--repeat 3] [--json FILE]

Tensors are small, so that only the number of nodes counts. One process, one thread; the best of the
repeats. The ratio is the measured time to the time that is allowed.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import onnx
from deep_transformer import DeepTransformer, Sizes
from rows import Row, write_rows

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adam import AdamW
from partc.compiler.importing.import_training import import_training_graph

ALLOWED_S = 5.0


def forward_model(nodes: int) -> onnx.ModelProto:
    body = DeepTransformer(Sizes())
    while len(body.nodes) < nodes - 1:
        body.append_block()
    return body.model()


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
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
