"""Time the compilation of a deep transformer for a large cluster, and measure what it takes.

    python benchmarks/large_compile.py [--layers 96] [--hosts 128] [--json FILE]
        [--strategy data=8,tensor=8,pipeline=16,microbatches=8]

Hosts have 8 devices each, on one switch. Tensors are small, so that nodes and ranks count and no file's
size. Memory: this process and its greatest child together. Ratios are to what is allowed.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import msgspec
from deep_transformer import DeepTransformer, Sizes
from rows import Row, print_allowed, write_rows

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.options import Options
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster

ALLOWED_S, ALLOWED_GB, ALLOWED_MB = 60.0, 2.0, 50.0
SIZES = Sizes(batch=64, time=8, heads=8, width=64, hidden=128, vocabulary=64)


def cluster_of(hosts: int) -> Cluster:
    """Hosts of 8 GPUs each, with 100 Gbit/s to one switch."""
    names = [f"host{index}" for index in range(hosts)]
    description = {
        "format": CLUSTER_FORMAT,
        "name": f"{hosts} hosts of 8",
        "hosts": [
            {
                "name": host,
                "memory_bytes": 2**38,
                "devices": [
                    {"name": f"{host}/gpu{index}", "kind": "gpu", "profile": "titan-xp", "index": index}
                    for index in range(8)
                ],
            }
            for host in names
        ],
        "switches": ["switch"],
        "links": [{"ends": [host, "switch"], "bytes_per_s": 12.5e9, "latency_s": 5e-6} for host in names],
    }
    return msgspec.convert(description, Cluster)


def measure(layers: int, hosts: int, strategy: str) -> list[Row]:
    body = DeepTransformer(SIZES)
    for _ in range(layers):
        body.append_block()
    with tempfile.TemporaryDirectory() as folder:
        train = build_training_graph(body.model(), loss="loss", optimizer=SGD(0.1), folder=Path(folder))
        out = Path(folder) / "out"
        begun_s = time.perf_counter()
        made = compile_step(train, cluster_of(hosts), out, Options(strategy=strategy, batch="global"))
        seconds = time.perf_counter() - begun_s
        plan_mb = (out / "plan.json").stat().st_size / 1e6
        segments = len(list(out.rglob("*.onnx")))
    processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN  # of children the greatest
    peak_gb = sum(resource.getrusage(each).ru_maxrss for each in processes) / 1e6
    work = f"{len(train.graph.node)} nodes on {8 * hosts} devices"
    return [
        Row(work, "partc", seconds, "s", seconds / ALLOWED_S),
        *(Row(f"{work}: {name}", "partc", took_s, "s", None) for name, took_s in made.watch.seconds.items()),
        Row(f"{work}: memory", "partc", peak_gb, "GB", peak_gb / ALLOWED_GB),
        Row(f"{work}: plan.json", "partc", plan_mb, "MB", plan_mb / ALLOWED_MB),
        Row(f"{work}: files of segments", "partc", segments, "files", None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--strategy", default="data=8,tensor=8,pipeline=16,microbatches=8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.layers, options.hosts, options.strategy)
    print_allowed(rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
