"""What a step on one rank is predicted to take: by the roofline, and by kernels that were measured.

    python benchmarks/measured_kernels.py [--works mlp ...] [--budget 60] [--profile FILE] [--json FILE]

Each work is compiled for one CPU worker of one thread. Its kernels are measured, but for those that FILE has
already; then its segments are, in whole steps on synthetic data, as `partc simulate --measure` does it:
medians. What is compared is the time of all segments of a step together; one rank sends nothing.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import onnx
from mesh_strategies import TOKENS_256, transformer
from rows import write_rows

from partc.compiler.api import compile_step, kernels_of
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.kernel_times.measure_kernels import measure_kernels, source_here
from partc.compiler.kernel_times.measure_segments import CACHE, measure_segments
from partc.compiler.kernel_times.read_times import versions_here
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster, ranks_of, read_cluster
from partc.cost.simulation.measured_kernels import (
    NO_TIMES,
    KernelTimes,
    Profile,
    encode_profile,
    read_profile,
    times_for,
)
from partc.cost.simulation.roofline import run_s
from partc.models.catalogue import build_model
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Plan, Run

EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster-2x2.json"
Train = Callable[[], onnx.ModelProto]


def _classifier(model: str, batch: int, **sizes: object) -> Train:
    def build() -> onnx.ModelProto:
        forward = build_model(model, batch=batch, **sizes)
        return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))

    return build


def _words(model: str, batch: int, **sizes: int) -> Train:
    def build() -> onnx.ModelProto:
        return build_training_graph(
            build_model(model, batch=batch, **sizes), loss="loss", optimizer=Adagrad(0.1)
        )

    return build


WORKS: dict[str, Train] = {
    "mlp": _classifier("mlp", 64, sizes=(512, 1024, 1024, 64)),
    "wide mlp": _classifier("mlp", 128, sizes=(512, 4096, 1024, 64)),
    "small lm": _words(
        "lm", 16, vocab=20_000, embedding=128, cells=256, projection=128, steps=10, samples=1024
    ),
    "large lm": _words(
        "lm", 32, vocab=40_000, embedding=256, cells=512, projection=256, steps=10, samples=2048
    ),
    "small resnet50": _classifier("resnet50", 8, width=16, image=64, classes=100),
    "alexnet": _classifier("alexnet", 8, width=16, cells=1024, image=96, classes=100),
    "small nmt": _words(
        "nmt",
        16,
        source_vocab=4_000,
        target_vocab=4_000,
        embedding=128,
        cells=128,
        source_steps=8,
        target_steps=8,
    ),
    "transformer": partial(transformer, TOKENS_256, 4),
}


@dataclass(frozen=True)
class Row:
    """A work's segments, in seconds; and of its kernels, how much of the roofline's time was measured."""

    work: str
    measured_s: float
    roofline_s: float
    profile_s: float
    kernels: int
    share: float


def main() -> None:
    """Measure, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the kernels of a work")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cluster = _alone(read_cluster(EXAMPLE))
    profile = read_profile(asked.profile) if asked.profile and asked.profile.exists() else Profile()
    rows = []
    print("| work | measured, ms | roofline, ms | ratio | profile, ms | ratio | kernels | share |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        for work in asked.works:
            train = WORKS[work]()
            profile, share = _with_kernels(train, cluster, profile, asked.budget)
            if asked.profile:
                asked.profile.write_bytes(encode_profile(profile))
            out = Path(folder) / work
            compile_step(train, cluster, out, Options())
            rows.append(_compare(work, read_plan_folder(out), cluster, profile, share))
    print(_summary(rows))
    write_rows(rows, asked.json)


def _alone(cluster: Cluster) -> Cluster:
    """Return the cluster's first worker."""
    host = cluster.hosts[0]
    host = msgspec.structs.replace(host, devices=host.devices[:1])
    return msgspec.structs.replace(cluster, name="one worker", hosts=(host,), links=())


def _with_kernels(
    train: onnx.ModelProto, cluster: Cluster, profile: Profile, budget_s: float
) -> tuple[Profile, float]:
    """Return the profile with a work's kernels, and what share of the roofline's time they have."""
    step = kernels_of(train, cluster, Options(), with_parts=False)
    source = source_here(("cpu", "cpu-core", 1))
    assert source is not None, "every machine has a CPU"
    before = profile.of_source(source)
    expected_s = step.seconds_on(ranks_of(cluster)[0], cluster)
    missing = [key for key in expected_s if key not in before.seconds and key not in before.unmeasured]
    answers = list(measure_kernels(missing, step, source.device, time.monotonic() + budget_s))
    seconds = {answer.key: answer.seconds for answer in answers if answer.seconds is not None}
    unmeasured = {answer.key: answer.unmeasured for answer in answers if answer.seconds is None}
    profile = profile.added(msgspec.structs.replace(source, seconds=seconds, unmeasured=unmeasured))
    known = profile.of_source(source).seconds
    share = sum(s for key, s in expected_s.items() if key in known) / sum(expected_s.values())
    return profile, share


def _compare(work: str, folder: PlanFolder, cluster: Cluster, profile: Profile, share: float) -> Row:
    plan = folder.plan
    measured = measure_segments(folder)
    measured_s = sum(measured.segments[run.segment] for run in _runs(plan))
    times, _ = times_for(profile, cluster, versions_here())
    kernels = len({kernel.key for run in _runs(plan) for kernel in run.kernels})
    roofline_s, profile_s = (_priced_s(plan, cluster, each) for each in (NO_TIMES, times))
    row = Row(work, measured_s, roofline_s, profile_s, kernels, share)
    print(
        f"| {work} | {measured_s * 1e3:.2f} | {roofline_s * 1e3:.2f} | {roofline_s / measured_s:.2f} "
        f"| {profile_s * 1e3:.2f} | {profile_s / measured_s:.2f} | {kernels} | {share:.0%} |",
        flush=True,
    )
    return row


def _runs(plan: Plan) -> list[Run]:
    return [instruction for instruction in plan.instructions if isinstance(instruction, Run)]


def _priced_s(plan: Plan, cluster: Cluster, times: KernelTimes) -> float:
    return sum(run_s(run, plan.ranks[0], cluster, times) for run in _runs(plan))


def _summary(rows: list[Row]) -> str:
    errors = {
        name: [abs(priced(row) / row.measured_s - 1) for row in rows]
        for name, priced in (("roofline", lambda r: r.roofline_s), ("profile", lambda r: r.profile_s))
    }
    return "; ".join(
        f"{name}: median error {statistics.median(own):.0%}, worst {max(own):.0%}"
        for name, own in errors.items()
    )


if __name__ == "__main__":
    main()
