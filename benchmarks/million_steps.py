"""Train a million steps: what launcher and rank hold, and what a step takes, tenth by tenth.

python benchmarks/million_steps.py                  some ten minutes on a free core
python benchmarks/million_steps.py --steps 100000

A perceptron of 35 parameters on one rank, of which `partc run` would write metrics.jsonl and
trained.safetensors. Then the file of metrics is read, and gone on with as a resumed run does.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.options import Options
from partc.cost.cluster.cluster import read_cluster
from partc.models.catalogue import build_model
from partc.runtime.jobs.job import JobMessage, Progress
from partc.runtime.jobs.metrics import METRICS_FILE, MetricsLog, read_metrics
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.jobs.runner import Runner

TENTHS = 10
CLUSTER = Path(__file__).parents[1] / "examples" / "cluster-1x4.json"


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as made:
        folder = _compile(Path(made) / "out")
        memory = _train(folder, steps)
        _print_tenths(folder, steps, memory)
        _print_files(folder, steps)


def _compile(folder: Path) -> Path:
    forward = build_model("mlp", sizes=[4, 4, 3], batch=8)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.001))
    cluster = read_cluster(CLUSTER)
    (host,) = cluster.hosts
    one = type(host)(host.name, host.devices[:1], memory_bytes=host.memory_bytes)
    links = tuple(link for link in cluster.links if set(link.ends) <= {host.name, host.devices[0].name})
    compile_step(step, type(cluster)(cluster.format, "one device", (one,), links=links), folder, Options())
    return folder


def _train(folder: Path, steps: int) -> list[dict[str, int]]:
    """Train; return what each process holds at the end of each tenth, in bytes."""
    memory: list[dict[str, int]] = []

    def look(told: JobMessage) -> None:
        if isinstance(told, Progress) and told.step * TENTHS >= steps * (len(memory) + 1):
            memory.append({"launcher": _held_bytes(os.getpid())} | dict(_ranks(folder)))

    # The last look comes when the rank may have gone: one step more than are shown.
    Runner(folder).train(
        "synthetic", steps + 1, outputs="none", on_progress=look, metrics=folder / METRICS_FILE
    )
    return memory


def _ranks(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield what the rank and its keeper hold: the larger is the rank."""
    held = [
        _held_bytes(int(path.parent.name))
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid()
    ]
    yield "rank", max(held, default=0)


def _held_bytes(process: int) -> int:
    lines = (Path(f"/proc/{process}") / "status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def _print_tenths(folder: Path, steps: int, memory: list[dict[str, int]]) -> None:
    lines = read_metrics(folder / METRICS_FILE)
    print("| steps | mean of a step | launcher | rank |\n| --- | --- | --- | --- |")
    for number, held in enumerate(memory, 1):
        mean_s = sum(line.s for line in islice(lines, steps // TENTHS)) / (steps // TENTHS)
        told = " | ".join(f"{held[who] / 1e6:.1f} MB" for who in ("launcher", "rank"))
        print(f"| {steps // TENTHS * number:,} | {mean_s * 1e3:.3f} ms | {told} |")


def _print_files(folder: Path, steps: int) -> None:
    for name in (METRICS_FILE, TRAINED_FILE):
        print(f"{name}: {(folder / name).stat().st_size:,} bytes")
    before = _held_bytes(os.getpid())
    begun_s = time.perf_counter()
    count = sum(1 for _ in read_metrics(folder / METRICS_FILE))
    read_s = time.perf_counter() - begun_s
    training = next(read_metrics(folder / METRICS_FILE)).training
    log = MetricsLog(folder / METRICS_FILE, steps, training, print)
    begun_s = time.perf_counter()
    log.append(steps + 1, 0.0)
    log.close()
    kept_s = time.perf_counter() - begun_s
    grown_bytes = _held_bytes(os.getpid()) - before
    print(f"{count:,} lines read in {read_s:.2f} s, gone on with after {kept_s:.2f} s", end="; ")
    print(f"memory grew by {grown_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
