"""Is `--strategy auto` the quickest of all modes when it runs? Step times of every mode's plan, in turn.

    python benchmarks/default_plan.py --out default_plan.json [--clusters 2x2 namespaces] [--works mlp ...]

    2x2         two hosts of two workers on this machine, its links measured first
    namespaces  three hosts of one worker, network namespaces joined at 1 Gbit/s (needs root and iproute2)

Rounds go through all modes in turn, so that a machine's slow moments hit all alike; a mode counts the median
of its rounds. Modes whose strategies are equal are one plan, which runs once a round. Every run is written to
--out at once: started again, the benchmark goes on where it stopped, and ends with a table in Markdown.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import onnx
from namespaces import namespace_hosts

from partc.compiler.api import compile_step
from partc.compiler.commands.cluster import measure_cluster
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.models.catalogue import build_model
from partc.runtime.jobs.runner import Runner

MODES = ("auto", "hybrid", "allreduce", "ps")
EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster-2x2.json"
WITHIN = 1.05  # of the best mode
Train = Callable[[], onnx.ModelProto]


def _mlp(*sizes: int, batch: int) -> Train:
    def build() -> onnx.ModelProto:
        forward = build_model("mlp", sizes=sizes, batch=batch)
        return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))

    return build


def _words(model: str, **sizes: int) -> Train:
    def build() -> onnx.ModelProto:
        return build_training_graph(build_model(model, **sizes), loss="loss", optimizer=Adagrad(0.1))

    return build


def _images() -> onnx.ModelProto:
    forward = build_model("resnet50", batch=2, width=16, image=64, classes=100)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


WORKS: dict[str, Train] = {
    "mlp": _mlp(512, 1024, 1024, 64, batch=64),
    "wide mlp": _mlp(512, 4096, 1024, 64, batch=128),
    "small resnet50": _images,
    "demo lm": _words(
        "lm", vocab=50_000, embedding=64, cells=128, projection=64, batch=16, steps=8, samples=256
    ),
    "small lm": _words(
        "lm", vocab=20_000, embedding=128, cells=256, projection=128, batch=16, steps=10, samples=1024
    ),
    "large lm": _words(
        "lm", vocab=40_000, embedding=256, cells=512, projection=256, batch=32, steps=10, samples=2048
    ),
    "small nmt": _words(
        "nmt", source_vocab=8_000, target_vocab=8_000, embedding=64, cells=64, batch=8, source_steps=8,
        target_steps=8,
    ),
}  # fmt: skip


def main() -> None:
    """Compile, run what is missing, and print the table."""
    options = _options()
    found = _Found(options.out)
    for name in options.clusters:
        with tempfile.TemporaryDirectory() as folder, _cluster(name, Path(folder)) as cluster:
            for work in options.works:
                _measure(found, name, work, cluster, Path(folder) / work, options)
    print(_table(found.entries))


class _Found:
    """What was measured so far: (cluster, work) -> per mode its plan, prediction and rounds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, dict[str, object]]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    def save(self) -> None:
        self.path.write_text(json.dumps(self.entries, indent=1) + "\n")


def _measure(
    found: _Found, cluster_name: str, work: str, cluster: Cluster, folder: Path, options: argparse.Namespace
) -> None:
    entry = found.entries.setdefault(f"{cluster_name}: {work}", {})
    if entry and all(len(_rounds(entry, mode)) >= options.rounds for mode in MODES):
        return
    print(f"{cluster_name}: {work}", flush=True)
    train = WORKS[work]()
    plans: dict[str, str] = {}  # strategy -> the first mode that has it
    for mode in MODES:
        made = compile_step(train, cluster, folder / mode, Options(strategy=mode, batch="per-replica"))
        same = plans.setdefault((folder / mode / "strategy.json").read_text(), mode)
        known = entry.setdefault(mode, {"rounds_ms": []})
        known |= {"plan": same, "predicted_ms": made.timeline.step_s * 1e3}
    for number in range(options.rounds):
        for mode in plans.values():
            if len(_rounds(entry, mode)) <= number:
                _rounds(entry, mode).append(_step_ms(folder / mode, options.steps))
                found.save()


def _rounds(entry: dict[str, dict[str, object]], mode: str) -> list[float]:
    """Return the rounds of a mode's plan."""
    plan = str(entry[mode].get("plan", mode)) if mode in entry else mode
    rounds = entry[plan]["rounds_ms"] if plan in entry else []
    assert isinstance(rounds, list)
    return rounds


def _step_ms(plan: Path, steps: int) -> float:
    """Return the median step of a run, its first quarter left out."""
    times = Runner(plan).train("synthetic", steps, save=False, traced_steps=steps - steps // 4).times
    begun = [step.begin_s[0] for step in times[0].steps]
    return 1e3 * statistics.median(later - earlier for earlier, later in pairwise(begun))


@contextmanager
def _cluster(name: str, folder: Path) -> Iterator[Cluster]:
    if name == "2x2":
        yield _on_this_machine(measure_cluster(_on_this_machine(read_cluster(EXAMPLE)), folder).cluster)
        return
    with namespace_hosts(3, workers=1, bits_per_s=1e9) as cluster:
        yield _on_this_machine(cluster)


def _on_this_machine(cluster: Cluster) -> Cluster:
    """Share this machine's cores and memory among the hosts."""
    hosts = len(cluster.hosts)
    cores = len(os.sched_getaffinity(0)) / hosts
    rate = read_cluster(EXAMPLE).hosts[0].memory_bytes_per_s / hosts
    shared = tuple(
        msgspec.structs.replace(host, cores=cores, memory_bytes_per_s=rate) for host in cluster.hosts
    )
    return msgspec.structs.replace(cluster, hosts=shared)


def _table(entries: dict[str, dict[str, dict[str, object]]]) -> str:
    lines = [
        "| work | " + " | ".join(f"{mode}, ms" for mode in MODES) + " | auto is | auto, to the best |",
        "|---|" + "---|" * (len(MODES) + 2),
    ]
    close = 0
    for name, entry in entries.items():
        if any(not _rounds(entry, mode) for mode in MODES):
            continue
        took = {mode: statistics.median(_rounds(entry, mode)) for mode in MODES}
        ratio = took["auto"] / min(took.values())
        close += ratio <= WITHIN
        cells = [f"{took[mode]:.1f} ({entry[mode]['predicted_ms']:.1f})" for mode in MODES]
        same = [mode for mode in MODES[1:] if entry[mode]["plan"] == entry["auto"]["plan"]]
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(same) or 'its own'} | {ratio:.2f}x |")
    of = len(lines) - 2
    return "\n".join([*lines, "", f"auto is within {WITHIN - 1:.0%} of the best mode in {close} of {of}"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clusters", nargs="+", default=["2x2", "namespaces"], choices=["2x2", "namespaces"])
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    return parser.parse_args()


if __name__ == "__main__":
    main()
