"""Step times that `partc simulate --measure` predicts, beside those of real runs on this machine.

    python benchmarks/prediction.py MEASURED.json [--steps 60] [--works mlp ...] [--json FILE]

MEASURED.json is what `partc cluster measure examples/cluster-2x2.json -o MEASURED.json` wrote: two hosts of
two CPU workers, all on this machine. Its parts are used as clusters of their own.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import onnx
from rows import Row, write_rows

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.kernel_times.measure_segments import CACHE, measure_segments
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.simulation.timeline import simulate
from partc.models.catalogue import build_model
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder

SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))
STRATEGIES = ("allreduce", "ps", "hybrid")
APART = 1.1  # strategies whose measured times differ by more must be ordered right


def _mlp() -> onnx.ModelProto:
    forward = build_model("mlp", sizes=(512, 1024, 1024, 64), batch=64)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


def _wide_mlp() -> onnx.ModelProto:
    forward = build_model("mlp", sizes=(512, 4096, 1024, 64), batch=128)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


def _lm(**sizes: int) -> onnx.ModelProto:
    return build_training_graph(build_model("lm", **sizes), loss="loss", optimizer=Adagrad(0.1))


def _small_lm() -> onnx.ModelProto:
    return _lm(vocab=20_000, embedding=128, cells=256, projection=128, batch=16, steps=10, samples=1024)


def _large_lm() -> onnx.ModelProto:
    return _lm(vocab=40_000, embedding=256, cells=512, projection=256, batch=32, steps=10, samples=2048)


WORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": _mlp,
    "wide mlp": _wide_mlp,
    "small lm": _small_lm,
    "large lm": _large_lm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    whole, rows = read_cluster(args.cluster), []
    print("| work | hosts x workers | strategy | measured, ms | predicted, ms | ratio | roofline, ms |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        os.environ[CACHE] = name  # measured in this run
        for work in args.works:
            train = WORKS[work]()
            for hosts, workers in SHAPES:
                cluster = _part(whole, hosts, workers)
                for strategy in STRATEGIES:
                    rows.append(_compare(work, train, cluster, strategy, args.steps, Path(name)))
    print(_summary(rows))
    write_rows(rows, args.json)


def _part(whole: Cluster, hosts: int, workers: int) -> Cluster:
    """Return the first hosts with their first workers, which share this machine's cores and memory."""
    cores = sum(host.cores or len(host.devices) for host in whole.hosts) / hosts
    kept = tuple(
        msgspec.structs.replace(
            host,
            devices=host.devices[:workers],
            cores=cores,
            memory_bytes_per_s=host.memory_bytes_per_s / hosts,
        )
        for host in whole.hosts[:hosts]
    )
    ends = {host.name for host in kept} | set(whole.switches)
    links = tuple(link for link in whole.links if set(link.ends) <= ends)
    return msgspec.structs.replace(whole, name=f"{hosts} x {workers}", hosts=kept, links=links)


def _compare(
    work: str, train: onnx.ModelProto, cluster: Cluster, strategy: str, steps: int, folder: Path
) -> Row:
    out = folder / f"{work}, {cluster.name}, {strategy}"
    made = compile_step(train, cluster, out, Options(strategy=strategy))
    plan = read_plan_folder(out)
    predicted_s = simulate(plan.plan, cluster, measure_segments(plan)).step_s
    took_s = statistics.median(_step_s(plan, steps) for _ in range(3))
    ratio = predicted_s / took_s
    print(
        f"| {work} | {cluster.name} | {strategy} | {took_s * 1e3:.1f} | {predicted_s * 1e3:.1f} "
        f"| {ratio:.2f}x | {made.timeline.step_s * 1e3:.1f} |",
        flush=True,
    )
    return Row(work, f"{cluster.name}, {strategy}", took_s, "s/step", ratio)


def _step_s(plan: PlanFolder, steps: int) -> float:
    """Return the median step of a run, its first quarter left out."""
    times = Runner(plan).train("synthetic", steps, save=False, traced_steps=steps - steps // 4).times
    begun = [step.begin_s[0] for step in times[0].steps]
    return statistics.median(later - earlier for earlier, later in pairwise(begun))


def _summary(rows: list[Row]) -> str:
    errors = [abs(row.ratio - 1) for row in rows]
    pairs = [
        (one, other)
        for one, other in combinations(rows, 2)
        if (one.work, one.system.split(",")[0]) == (other.work, other.system.split(",")[0])
        and max(one.value, other.value) > APART * min(one.value, other.value)
    ]
    right = sum(
        (one.value < other.value) == (one.value * one.ratio < other.value * other.ratio)
        for one, other in pairs
    )
    return (
        f"{len(rows)} runs: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}; "
        f"{right} of {len(pairs)} pairs of strategies that differ by 10 % ordered right"
    )


if __name__ == "__main__":
    main()
