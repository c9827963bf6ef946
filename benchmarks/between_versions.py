"""Data-parallel steps of this version of partc over those of an earlier one: has anything become slower?

    pip install --no-deps --target OLD CHECKOUT       the earlier version, from a checkout of it
    python benchmarks/between_versions.py OLD [--works mlp lm resnet50] [--strategies allreduce ps]
        [--batch per-replica] [--workers 2] [--steps 100] [--pairs 5] [--over-mpi] [--json FILE]

This version writes a work's training graph; each compiles it for two replicas on one machine and trains all
ranks in one process, one thread. A pair of processes takes its steps in turns, of which processor seconds
count; where memory lies makes some per cent from one process to the next, so that the median of pairs
counts. With `--over-mpi` both run `partc run` in turns instead: a step takes what so many steps add to ten.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rows import write_rows

WARM_UP_STEPS = 3
FEW_STEPS = 10


def cluster_of(workers: int) -> dict[str, object]:
    """Return a machine of so many workers, as a cluster file has it."""
    devices = [{"name": f"host0/cpu{n}", "kind": "cpu", "profile": "cpu-core"} for n in range(workers)]
    host = {"name": "host0", "address": "localhost", "devices": devices, "memory_bytes": 2**34}
    return {"format": "partc-cluster/1", "name": "one machine", "hosts": [host]}


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of a step, medians, and the median of the steps' ratios: the processor's, or over MPI."""

    work: str
    before_s: float
    after_s: float
    ratio: float


def write_work(work: str, folder: Path) -> None:
    """Write a work's training graph."""
    from partc.compiler.differentiation.build import build_training_graph
    from partc.compiler.differentiation.updates.optimizers import Adagrad, Adam, Momentum
    from partc.models.catalogue import build_model

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
    onnx.save(build_training_graph(forward, loss=loss, optimizer=optimizer), folder / "train.onnx")


def partc(*arguments: str) -> None:
    """Run a command of the version that is imported: modules are named as on 2026-11-22, or as today."""
    try:
        from partc.compiler.commands.cli import main
    except ImportError:
        from partc.compiler.cli import main  # type: ignore[import-not-found, no-redef]
    said, sys.argv = io.StringIO(), ["partc"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code
    if code:
        raise SystemExit(f"partc {' '.join(arguments)}: {said.getvalue()}")


def train(out: Path) -> None:
    """Serve steps of a plan: a line in, processor seconds out."""
    try:
        from partc.runtime.execution.in_process import RanksInProcess
    except ImportError:
        from partc.runtime.in_process import RanksInProcess  # type: ignore[import-not-found, no-redef]

    ranks = RanksInProcess(out)
    batch = _batch(json.loads((out / "plan.json").read_bytes()))
    for _ in range(WARM_UP_STEPS):
        ranks.step(batch)
    print("ready", flush=True)
    for _ in sys.stdin:
        begun_s = time.process_time()
        ranks.step(batch)
        print(time.process_time() - begun_s, flush=True)


def _batch(plan: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    batch = {}
    for fed in plan["data_inputs"]:
        shape = [plan["sizes"][size] if isinstance(size, str) else size for size in fed["shape"]]
        if fed["sample_axis"] is not None and plan["batch"] == "per-replica":
            shape[fed["sample_axis"]] *= plan["replicas"]
        is_whole = np.dtype(fed["dtype"]).kind in "iu"
        drawn = rng.integers(0, fed["high"] or 3, shape) if is_whole else rng.normal(size=shape)
        batch[fed["name"]] = drawn.astype(fed["dtype"])
    return batch


def call_of(command: str, version: Path | None, *arguments: str) -> dict[str, Any]:
    """Return what starts this file with a hidden command, by a version: None is this one."""
    path = {} if version is None else {"PYTHONPATH": str(version.resolve())}
    return {
        "args": [sys.executable, __file__, "--as", command, *arguments],
        "text": True,
        "cwd": tempfile.gettempdir(),  # a checkout would be imported before the version
        "env": os.environ | path | {"OMP_NUM_THREADS": "1"},
    }


class Ranks:
    """A process that trains a plan's ranks by a version."""

    def __init__(self, version: Path | None, plan: Path) -> None:
        call = call_of("train", version, str(plan))
        self._process = subprocess.Popen(stdin=subprocess.PIPE, stdout=subprocess.PIPE, **call)
        assert self.line() == "ready", "it trains"

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


Timed = Callable[[], float]


def in_turns(name: str, before: Timed, after: Timed, count: int) -> Pair:
    """Return what both take, timed so often, each as often first."""
    taken = []
    for number in range(count):
        first, second = (before, after) if number % 2 else (after, before)
        times = {first: first(), second: second()}
        taken.append((times[before], times[after]))
    befores, afters = zip(*taken, strict=True)
    ratio = statistics.median(new / old for old, new in taken)
    return Pair(name, statistics.median(befores), statistics.median(afters), ratio)


def pair_of_processes(name: str, old: Path, plans: tuple[Path, Path], steps: int) -> Pair:
    """Return what steps of both versions take of two processes."""
    before, after = Ranks(old, plans[0]), Ranks(None, plans[1])
    pair = in_turns(name, before.step_s, after.step_s, steps)
    for ranks in (before, after):
        ranks.end()
    return pair


def step_over_mpi_s(version: Path | None, plan: Path, steps: int) -> float:
    """Return the seconds of a step of `partc run`, without those of beginning."""

    def run_s(count: int) -> float:
        begun_s = time.perf_counter()
        subprocess.run(check=True, **call_of("partc", version, "run", str(plan), "--steps", str(count)))
        return time.perf_counter() - begun_s

    return (run_s(FEW_STEPS + steps) - run_s(FEW_STEPS)) / steps


def compare(work: str, strategy: str, asked: argparse.Namespace) -> list[Pair]:
    """Return the pairs of a work under a strategy."""
    name = f"{work}, {strategy}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_work(work, folder)
        (folder / "cluster.json").write_text(json.dumps(cluster_of(asked.workers)))
        plans = (folder / "before", folder / "after")
        for version, out in zip((asked.old, None), plans, strict=True):
            how = ("--strategy", strategy, "--batch", asked.batch, "-o", str(out))
            command = ("compile", str(folder / "train.onnx"), "-c", str(folder / "cluster.json"), *how)
            subprocess.run(check=True, **call_of("partc", version, *command))
        if not asked.over_mpi:
            return [pair_of_processes(name, asked.old, plans, asked.steps) for _ in range(asked.pairs)]
        before, after = (
            partial(step_over_mpi_s, version, plan, asked.steps)
            for version, plan in zip((asked.old, None), plans, strict=True)
        )
        return [in_turns(name, before, after, 2) for _ in range(asked.pairs)]


def main() -> None:
    """Time, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path, help="a folder with the earlier version")
    parser.add_argument("--works", nargs="+", default=["mlp", "lm", "resnet50"])
    parser.add_argument("--strategies", nargs="+", default=["allreduce"])
    parser.add_argument("--batch", choices=("per-replica", "global"), default="per-replica")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--over-mpi", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not (asked.old / "partc").is_dir():
        parser.error("OLD: a folder with the earlier version's package, as `pip install --target` makes it")
    pairs: list[Pair] = []
    print("| work, strategy | before, ms | after, ms | after / before, median | least | most |")
    print("|---|---|---|---|---|---|")
    for work, strategy in product(asked.works, asked.strategies):
        own = compare(work, strategy, asked)
        ratios = [pair.ratio for pair in own]
        before, after = (1e3 * statistics.median(getattr(p, n) for p in own) for n in ("before_s", "after_s"))
        print(
            f"| {own[0].work} | {before:.2f} | {after:.2f} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} | {max(ratios):.3f} |",
            flush=True,
        )
        pairs += own
    write_rows(pairs, asked.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:  # a version's own process
        run = {"partc": partc, "train": lambda plan: train(Path(plan))}[sys.argv[2]]
        run(*sys.argv[3:])
    else:
        main()
