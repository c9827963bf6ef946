"""Data-parallel steps of this version of partc over those of an earlier one: has anything become slower?

    pip install --no-deps --target OLD CHECKOUT       the earlier version, from a checkout of it
    python benchmarks/between_versions.py OLD [--works mlp lm resnet50] [--steps 100] [--pairs 5]
                                           [--json FILE]

Each version compiles the work for two replicas on one machine (`--strategy allreduce`, a batch per replica)
and trains both ranks in one process, one thread. A pair of processes takes its steps in turns; where memory
lies makes some per cent from one process to the next, so that the median of pairs counts.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rows import write_rows

WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """Processor seconds of a step, medians, and the median of the steps' ratios."""

    work: str
    before_s: float
    after_s: float
    ratio: float


def train(work: str) -> None:
    """Serve steps of a work, compiled by the version that is imported: a line in, processor seconds out."""
    with tempfile.TemporaryDirectory() as folder:
        step = _step_of(work, Path(folder) / "plan")
        for _ in range(WARM_UP_STEPS):
            step()
        print("ready", flush=True)
        for _ in sys.stdin:
            begun_s = time.process_time()
            step()
            print(time.process_time() - begun_s, flush=True)


def _step_of(work: str, out: Path) -> Callable[[], object]:
    from partc.compiler.differentiation.build import build_training_graph
    from partc.compiler.differentiation.updates.optimizers import Adagrad, Adam, Momentum
    from partc.compiler.importing.import_training import import_training_graph
    from partc.compiler.options import Options
    from partc.compiler.pipeline import compile_graph
    from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
    from partc.cost.cluster.machines import Device, Host
    from partc.models.catalogue import build_model
    from partc.runtime.execution.in_process import RanksInProcess

    sizes, loss, optimizer = {
        "mlp": ({"sizes": (512, 1024, 1024, 64), "batch": 64}, "softmax_cross_entropy", Adam(0.01)),
        "lm": (
            {
                "vocab": 5000,
                "embedding": 128,
                "cells": 256,
                "projection": 128,
                "steps": 8,
                "samples": 256,
                "batch": 16,
            },
            "loss",
            Adagrad(0.1),
        ),
        "resnet50": (
            {"width": 16, "image": 64, "classes": 10, "batch": 4},
            "softmax_cross_entropy",
            Momentum(0.01),
        ),
    }[work]
    forward = build_model(work, **sizes)
    training = import_training_graph(build_training_graph(forward, loss=loss, optimizer=optimizer))
    devices = tuple(Device(f"host0/cpu{n}", "cpu", "cpu-core") for n in range(2))
    cluster = Cluster(CLUSTER_FORMAT, "two", (Host("host0", devices, memory_bytes=2**34),))
    plan = compile_graph(training, cluster, out, Options(strategy="allreduce", batch="per-replica")).plan
    ranks, batch = RanksInProcess(out), _batch(plan)
    return lambda: ranks.step(batch)


def _batch(plan: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    batch = {}
    for fed in plan.data_inputs:
        shape = [plan.sizes[size] if isinstance(size, str) else size for size in fed.shape]
        if fed.sample_axis is not None:
            shape[fed.sample_axis] *= plan.replicas
        is_whole = np.dtype(fed.dtype).kind in "iu"
        drawn = rng.integers(0, fed.high or 3, shape) if is_whole else rng.normal(size=shape)
        batch[fed.name] = drawn.astype(fed.dtype)
    return batch


class Version:
    """A process that trains a work by one version."""

    def __init__(self, work: str, old: Path | None) -> None:
        path = {} if old is None else {"PYTHONPATH": str(old.resolve())}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--train", work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | path | {"OMP_NUM_THREADS": "1"},
        )

    def line(self) -> str:
        """Return the next line that the process says."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def step_s(self) -> float:
        """Train a step; return its processor seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self.line())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def pair_of(work: str, old: Path, steps: int) -> Pair:
    """Return what steps of both versions take, in turns."""
    before, after = Version(work, old), Version(work, None)
    assert before.line() == after.line() == "ready", "both compile"
    taken = []
    for number in range(steps):
        first, second = (before, after) if number % 2 else (after, before)
        times = {first: first.step_s(), second: second.step_s()}
        taken.append((times[before], times[after]))
    for version in (before, after):
        version.end()
    befores, afters = zip(*taken, strict=True)
    ratio = statistics.median(new / old for old, new in taken)
    return Pair(work, statistics.median(befores), statistics.median(afters), ratio)


def main() -> None:
    """Time, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="a folder with the earlier version")
    parser.add_argument("--works", nargs="+", default=["mlp", "lm", "resnet50"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train)
        return
    if asked.old is None or not (asked.old / "partc").is_dir():
        parser.error("OLD: a folder with the earlier version's package, as `pip install --target` makes it")
    pairs: list[Pair] = []
    print("| work | before, ms | after, ms | after / before, median | least | most |")
    print("|---|---|---|---|---|---|")
    for work in asked.works:
        own = [pair_of(work, asked.old, asked.steps) for _ in range(asked.pairs)]
        ratios = [pair.ratio for pair in own]
        before, after = (1e3 * statistics.median(getattr(p, n) for p in own) for n in ("before_s", "after_s"))
        print(
            f"| {work} | {before:.2f} | {after:.2f} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} | {max(ratios):.3f} |",
            flush=True,
        )
        pairs += own
    write_rows(pairs, asked.json)


if __name__ == "__main__":
    main()
