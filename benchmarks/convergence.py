"""Do N ranks converge as one device does? Training runs on 1, 2 and 4 ranks, on the same batches.

    python benchmarks/convergence.py --out convergence.json --plots docs [--works digits words] [--steps 400]
                                     [--rounded]

    digits   LeNet on scikit-learn's 1,797 images of digits (pip install 'partc[benchmarks]'), 8 x 8 pixels,
             each drawn as 4 x 4; batch 64, momentum
    words    two LSTM layers on the text of Python's own documentation (pydoc_data.topics), the 2,000 most
             frequent words; batch 32 of 20 words, Adagrad

Every rank is a process, MPI between them. The total batch is the same on any number of ranks. On four,
besides Parallax's hybrid on four replicas, two replicas of two workers that share weights (data=2,tensor=2).
"""

import argparse
import json
import platform
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
from line_plot import line_plot

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.models.catalogue import build_model
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.program import Rounding

EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster-2x2.json"
BATCH = {"digits": 64, "words": 32}
VOCAB, WORDS_PER_SAMPLE = 2_000, 20
LAST = 50  # steps whose mean is a run's final loss

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """So many hosts of so many workers under a strategy."""

    hosts: int
    workers: int
    strategy: str
    rounding: Rounding = ""

    @property
    def name(self) -> str:
        """Return what the legend says."""
        ranks = self.hosts * self.workers
        rounded = f", {self.rounding} sums" if self.rounding else ""
        return f"{ranks} rank{'s' * (ranks > 1)}, {self.strategy}{rounded}" if ranks > 1 else "1 rank"


RUNS = (Run(1, 1, "hybrid"), Run(2, 1, "hybrid"), Run(2, 2, "hybrid"), Run(2, 2, "data=2,tensor=2"))
ROUNDED = (Run(2, 2, "hybrid", "bfloat16"), Run(2, 2, "hybrid", "float16"))


def main() -> None:
    """Train, print the final losses, and write the losses and the plots."""
    options = _options()
    found: dict[str, object] = {"python": platform.python_version(), "steps": options.steps}
    for work in options.works:
        step, batches = WORKS[work]
        data = [batch for batch, _ in zip(batches(), range(options.steps), strict=False)]
        runs = (*RUNS, *ROUNDED) if options.rounded else RUNS
        losses = {run.name: _train(step(), run, data) for run in runs}
        found[work] = _summary(losses)
        plot = line_plot(
            {name: _smooth(values) for name, values in losses.items()},
            title=TITLES[work],
            x="step",
            y="loss, mean of ten steps",
        )
        options.plots.mkdir(parents=True, exist_ok=True)
        (options.plots / f"convergence-{work}.svg").write_text(plot)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def _train(step: onnx.ModelProto, run: Run, data: list[Batch]) -> list[float]:
    """Return the loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan"
        options = Options(strategy=run.strategy, batch="global", round_sums=run.rounding)
        compile_step(step, _cluster(run), plan, options)
        result = Runner(plan).train(data, len(data), save=False)
    return [float(next(iter(outputs.values()))) for outputs in result.outputs]


def _cluster(run: Run) -> Cluster:
    cluster = read_cluster(EXAMPLE)
    hosts = tuple(
        msgspec.structs.replace(host, devices=host.devices[: run.workers])
        for host in cluster.hosts[: run.hosts]
    )
    return msgspec.structs.replace(cluster, hosts=hosts, links=cluster.links if run.hosts > 1 else ())


def _summary(losses: dict[str, list[float]]) -> dict[str, object]:
    """Return losses and, beside one rank's, by how much those of any step differ at most."""
    alone = losses[RUNS[0].name]
    rows = {}
    for name, values in losses.items():
        apart = [abs(value - one) / one for value, one in zip(values, alone, strict=True)]
        final = statistics.mean(values[-LAST:])
        rows[name] = {"first": values[0], "final": final, "largest_difference": max(apart), "losses": values}
        print(f"{name}: {values[0]:.4f} -> {final:.6f}, at most {max(apart):.1e} from one rank's", flush=True)
    return rows


def _smooth(values: list[float]) -> list[float]:
    return [statistics.mean(values[max(0, step - 9) : step + 1]) for step in range(len(values))]


# ---------------------------------------------------------------- digits


def _digits_step() -> onnx.ModelProto:
    forward = build_model("lenet", batch=BATCH["digits"])
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.02))


def _digits() -> Iterator[Batch]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.kron(digits.images / 8.0 - 1.0, np.ones((4, 4))).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    for samples in _epochs(len(labels), BATCH["digits"]):
        yield {"x": pixels[samples], "labels": labels[samples]}


# ---------------------------------------------------------------- words


def _words_step() -> onnx.ModelProto:
    sizes = {"vocab": VOCAB, "embedding": 64, "cells": 128, "steps": WORDS_PER_SAMPLE}
    forward = build_model("rnnlm", batch=BATCH["words"], **sizes)
    return build_training_graph(forward, loss="loss", optimizer=Adagrad(0.3))


def _words() -> Iterator[Batch]:
    from pydoc_data.topics import topics

    text = " ".join(topics[name] for name in sorted(topics))
    words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]+", text.lower())
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(VOCAB - 1), 1)}
    ids = np.array([known.get(word, 0) for word in words])
    samples = len(ids) // WORDS_PER_SAMPLE - 1
    starts = WORDS_PER_SAMPLE * np.arange(samples)[:, None] + np.arange(WORDS_PER_SAMPLE)
    for chosen in _epochs(samples, BATCH["words"]):
        yield {"x": ids[starts[chosen]], "y": ids[starts[chosen] + 1]}


def _epochs(samples: int, batch: int) -> Iterator[np.ndarray]:
    """Yield the numbers of each batch's samples, shuffled anew in every epoch, what is left over left out."""
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(samples)
        for start in range(0, samples - batch + 1, batch):
            yield order[start : start + batch]


WORKS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[], Iterator[Batch]]]] = {
    "digits": (_digits_step, _digits),
    "words": (_words_step, _words),
}
TITLES = {
    "digits": "LeNet on scikit-learn's digits",
    "words": "Two LSTM layers on Python's documentation",
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plots", type=Path, required=True)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounded", action="store_true", help="with sums of 16 bits, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
