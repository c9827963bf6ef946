"""What each mechanism of the Parallax paper brings, on hosts joined by a real, shaped network.

    sudo python benchmarks/ablation.py --hosts 3 --workers 3 --mbit 1000 --json ablation.json

    BASE    servers for everything, each worker for itself
    +HYB    dense parameters AllReduced
    +LA     rows merged on their host before they cross the network
    +OPAU   ops between aggregation and update beside their rows
    +OPSW   light ops between servers and workers where they save bytes

Words are drawn by Zipf's law. Words/s come from the steps' own clock, bytes from the hosts' interfaces.
Beside them stand the paper's figures (table 4 of arXiv:1808.02621: 8 machines, 48 GPUs) and those that the
simulator predicts for this network. AllGatherv alone is the paper's MPI (36 GPUs: 6.3 times slower).
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import onnx
from namespaces import interface_bytes, namespace_hosts
from onnx import TensorProto, helper
from rows import Row, write_rows

from partc.compiler.api import compile_step
from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad
from partc.compiler.options import GraphOptions, Options, Sample
from partc.compiler.report.measure_traffic import host_traffic
from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import Mechanism
from partc.models.catalogue import build_model
from partc.runtime.data.npz import write_npz
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.runner import Runner

OFF = ("local-aggregation", "post-aggregation", "boundary-ops")
STAGES = {
    "BASE": ("ps", OFF),
    "+HYB": ("hybrid", OFF),
    "+LA": ("hybrid", OFF[1:]),
    "+OPAU": ("hybrid", OFF[2:]),
    "+OPSW": ("hybrid", ()),
    "AllGatherv": ("allreduce", ()),
}
PAPER_WORDS_PER_S = {
    "lm": {"BASE": 101e3, "+HYB": 112e3, "+LA": 251e3, "+OPAU": 259e3, "+OPSW": 276e3},
    "nmt": {"BASE": 87e3, "+HYB": 117e3, "+LA": 188e3, "+OPAU": 188e3, "+OPSW": 191e3},
}
SIZES: dict[str, dict[str, int]] = {
    "lm": {
        "vocab": 40_000, "embedding": 512, "cells": 64, "projection": 512,
        "batch": 4, "steps": 8, "samples": 8_192,
    },
    "nmt": {
        "source_vocab": 24_000, "target_vocab": 1_000, "embedding": 4_096, "cells": 16,
        "batch": 128, "source_steps": 16, "target_steps": 1,
    },
}  # fmt: skip
TABLES = ("embedding", "softmax.weight", "source.embedding", "target.embedding")
ZIPF_EXPONENT = 1.0
WARM_UP = 2
SAMPLE_STEPS = 4
SAMPLE_SEED = 1  # other batches than those trained on


@dataclass
class Measured:
    """What one stage did: bytes are those that left all hosts in a step."""

    words_per_s: float
    bytes_per_step: float
    predicted_words_per_s: float
    predicted_bytes: float


def main() -> None:
    """Measure every stage of every work, and print the table."""
    options = _options()
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as name,
        namespace_hosts(options.hosts, options.workers, options.mbit * 1e6) as cluster,
    ):
        for work in options.works:
            train = _training_step(work, Path(name))
            sample = _write_sample(work, train, cluster, Path(name))
            measured = {
                stage: _measure(work, train, stage, cluster, sample, Path(name), options)
                for stage in options.stages
            }
            rows += _report(work, measured)
    write_rows(rows, options.json)


def _training_step(work: str, folder: Path) -> onnx.ModelProto:
    forward = _round_tables(build_model(work, **SIZES[work]))
    return build_training_graph(
        forward, loss="loss", optimizer=Adagrad(0.1), clip_global_norm=1.0, folder=folder
    )


def _round_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """Read tables in 16 bits: float32 masters, as in mixed precision, rounded behind each Gather."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type == "Gather" and node.input[0] in TABLES:
            exact, short = f"{node.output[0]}.exact", f"{node.output[0]}.short"
            rounded = node.output[0]
            node.output[0] = exact
            nodes.append(helper.make_node("Cast", [exact], [short], f"{short}.node", to=TensorProto.FLOAT16))
            nodes.append(
                helper.make_node("Cast", [short], [rounded], f"{rounded}.node", to=TensorProto.FLOAT)
            )
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _options_of(
    work: str, strategy: str, sample: Sample | None = None, without: Sequence[Mechanism] = ()
) -> Options:
    # Every replica has a batch, and draws negatives, of its own, as every GPU does in the paper.
    graph = GraphOptions(sample_axes={"sampled": 0} if work == "lm" else None)
    return Options(strategy=strategy, batch="per-replica", sample=sample, without=without, options=graph)


def _write_sample(work: str, train: onnx.ModelProto, cluster: Cluster, folder: Path) -> Sample:
    """Write a few batches, from which sparsity is measured."""
    made = compile_step(train, cluster, folder / "sampled", _options_of(work, strategy="ps"))
    batches = list(_batches(made, SAMPLE_STEPS, SAMPLE_SEED))
    arrays = {
        entry.name: np.stack([batch[entry.name] for batch in batches])
        if entry.sample_axis is None
        else np.concatenate([batch[entry.name] for batch in batches], entry.sample_axis)
        for entry in made.plan.data_inputs
    }
    path = folder / f"{work}.npz"
    write_npz(path, arrays)
    return Sample(str(path), SAMPLE_STEPS)


def _measure(
    work: str,
    train: onnx.ModelProto,
    stage: str,
    cluster: Cluster,
    sample: Sample,
    folder: Path,
    options: argparse.Namespace,
) -> Measured:
    strategy, without = STAGES[stage]
    made = compile_step(
        train,
        cluster,
        folder / "out",
        _options_of(work, strategy=strategy, without=without, sample=sample),
    )
    replicas = made.plan.replicas
    words = _words_of(work) * replicas
    clock = _Clock(options.hosts)
    steps = options.steps + WARM_UP
    Runner(folder / "out").train(_batches(made, steps), steps, on_progress=clock, save=False)
    step_bytes = (clock.bytes[-1] - clock.bytes[WARM_UP]) / (len(clock.bytes) - 1 - WARM_UP)
    sent = sum(out for _, out in host_traffic(made.plan, cluster).values())
    return Measured(words / clock.step_s(), step_bytes, words / made.timeline.step_s, sent)


def _words_of(work: str) -> int:
    """Return the words of one replica's step: of an LM those read, of a translation both sides'."""
    sizes = SIZES[work]
    return sizes["batch"] * sum(size for name, size in sizes.items() if name.endswith("steps"))


class _Clock:
    """Notes when each step ends, and what has left the hosts by then."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    def __call__(self, progress: Progress) -> None:
        self.seconds.append(progress.step / progress.steps_per_s)
        self.bytes.append(interface_bytes(self.hosts))

    def step_s(self) -> float:
        """Return the median step after the warm-up."""
        return median(np.diff(self.seconds)[WARM_UP - 1 :])


def _batches(made: Compilation, steps: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Draw total batches: words by Zipf's law, negatives distinct."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        batch: dict[str, np.ndarray] = {}
        for entry in made.plan.data_inputs:
            shape = [made.plan.sizes[s] if isinstance(s, str) else s for s in entry.shape]
            if entry.sample_axis is not None:
                shape[entry.sample_axis] *= made.plan.replicas
            batch[entry.name] = _draw(rng, entry.name, shape, entry.high or 2, made.plan.replicas)
        yield batch


def _draw(
    rng: np.random.Generator, name: str, shape: list[int], vocabulary: int, replicas: int
) -> np.ndarray:
    """Draw words; a replica's negatives are distinct."""
    weights = 1.0 / np.arange(1, vocabulary + 1) ** ZIPF_EXPONENT
    weights /= weights.sum()
    if name != "sampled":
        return rng.choice(vocabulary, shape, p=weights)
    size = shape[0] // replicas
    return np.concatenate([rng.choice(vocabulary, size, replace=False, p=weights) for _ in range(replicas)])


def _report(work: str, measured: dict[str, Measured]) -> list[Row]:
    base = measured["BASE"]
    paper = PAPER_WORDS_PER_S[work]
    print(f"\n{work}: words/s and bytes that leave the hosts in a step, against BASE")
    print("stage        words/s          predicted   paper   MB/step         predicted MB")
    rows: list[Row] = []
    for stage, found in measured.items():
        speed, less = found.words_per_s / base.words_per_s, base.bytes_per_step / found.bytes_per_step
        theirs = f"{paper[stage] / paper['BASE']:.2f}x" if stage in paper else "     "
        print(
            f"{stage:11s} {found.words_per_s:8.0f} {speed:5.2f}x  "
            f"{found.predicted_words_per_s / base.predicted_words_per_s:8.2f}x   {theirs}  "
            f"{found.bytes_per_step / 1e6:8.1f} {less:5.2f}x   {found.predicted_bytes / 1e6:8.1f}"
        )
        rows.append(Row(work, stage, found.words_per_s, "words/s", speed))
        rows.append(Row(work, stage, found.bytes_per_step, "bytes/step", 1 / less))
    if measured.keys() >= {"AllGatherv", "+OPSW"}:
        gain = measured["+OPSW"].words_per_s / measured["AllGatherv"].words_per_s
        print(f"against AllGatherv alone: {gain:.2f}x")
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3, help="of each host")
    parser.add_argument("--mbit", type=float, default=1000, help="of each host's link, in both directions")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--works", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
