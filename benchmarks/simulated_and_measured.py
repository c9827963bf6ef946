"""Predicted against measured steps of many strategies: FlexFlow's figure 11 (flexflow.txt, section 8.3.2).

    python benchmarks/simulated_and_measured.py ROWS.jsonl [--works lm ...] [--clusters 2-ranks ...]
        [--strategies 12] [--rounds 2] [--plot FILE.svg]
    python benchmarks/simulated_and_measured.py ROWS.jsonl --summary [--plot FILE.svg]

Of every work on every cluster (compared_clusters.py): strategies that have a name, then random ones of the
search's space, each of another step. Two predictions of each: by rates alone, and with segments that were
measured. Then each is run, all in turn; the median of its rounds counts. A work on a cluster is written when
it is complete, and not run again when it is in the file; clusters are as measured first (ROWS.CLUSTER.json).
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import onnx
from agreement import Agreement, agreement
from compared_clusters import CLUSTERS, SHARED, compared_cluster, name_of
from mesh_strategies import TOKENS_256, transformer
from scatter_plot import scatter_plot

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.kernel_times.measure_segments import CACHE, measure_segments
from partc.compiler.options import Options
from partc.compiler.search.operators.own_space import OwnSpace
from partc.compiler.search.operators.walk_tasks import random_state
from partc.compiler.search.whole_steps import names_for
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.timeline import simulate
from partc.cost.strategy import Strategy
from partc.models.catalogue import build_model
from partc.passes.search.operators.operator_space import data_parallel_config
from partc.runtime.errors import PartcError, Stopped
from partc.runtime.jobs.runner import Runner
from partc.runtime.log import silent_log
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder

MODES = ("allreduce", "ps", "hybrid", "auto")
NAMED_SHARE = 0.75  # of the strategies, at most; the others are random
MOST_DRAWN = 60  # random states, until enough of them have plans of their own
MOST_MOVES = 4  # away from data parallelism
# A run is so many steps, or what is predicted to last so long. Its first quarter does not count.
LEAST_STEPS, MOST_STEPS, RUN_S = 8, 40, 1.0
TIMEOUT_S = 90.0
BAND = 0.25  # around the plot's diagonal


def _classifier(model: str, **sizes: object) -> onnx.ModelProto:
    forward = build_model(model, **sizes)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.01))


def _words(model: str, **sizes: int) -> onnx.ModelProto:
    return build_training_graph(build_model(model, **sizes), loss="loss", optimizer=Adagrad(0.1))


LM = {"vocab": 4_000, "embedding": 256, "cells": 512, "projection": 256, "steps": 8, "samples": 512}
NMT = {
    "source_vocab": 2_000,
    "target_vocab": 2_000,
    "embedding": 256,
    "cells": 256,
    "source_steps": 3,
    "target_steps": 3,
}
WORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": partial(_classifier, "mlp", sizes=(512, 4096, 1024, 64), batch=128),
    "lm": partial(_words, "lm", batch=32, **LM),
    "nmt": partial(_words, "nmt", batch=32, **NMT),
    "transformer": partial(transformer, TOKENS_256, 3),
    "alexnet": partial(_classifier, "alexnet", batch=16, width=32, cells=1024, image=96, classes=100),
}


@dataclass(frozen=True)
class Row:
    """A strategy of a work on a cluster: seconds of a step, predicted and measured.

    rates_s     predicted from devices' rates
    segments_s  predicted with measured segments
    rounds_s    the median step of every run; empty where one failed
    failed      why
    """

    cluster: str
    work: str
    strategy: str
    rates_s: float
    segments_s: float
    rounds_s: tuple[float, ...]
    failed: str = ""

    @property
    def measured_s(self) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.rounds_s)


@dataclass
class Candidate:
    """A strategy that has a plan."""

    name: str
    plan: PlanFolder
    rates_s: float
    segments_s: float


class Candidates:
    """Strategies of a work on a cluster, each of another plan."""

    def __init__(self, train: onnx.ModelProto, cluster: Cluster, folder: Path) -> None:
        self._train, self._cluster, self._folder = train, cluster, folder
        self._plans: set[object] = set()
        self._tried = 0

    def take(self, count: int) -> Iterator[Candidate]:
        """Yield up to so many: those with a name, the smallest degrees first, then random ones."""
        hosts = [host.name for host in self._cluster.hosts for _ in host.devices]
        names = [*MODES, *sorted(names_for(hosts), key=_largest_degree)]
        named = list(islice(self._planned((name, name) for name in names), round(NAMED_SHARE * count)))
        yield from named
        yield from islice(self._planned(self._drawn()), count - len(named))

    def _planned(self, strategies: Iterator[tuple[str, str | Strategy]]) -> Iterator[Candidate]:
        for name, strategy in strategies:
            self._tried += 1
            path = self._folder / f"{self._tried}"
            options = Options(strategy=strategy, batch="global")
            try:
                with silent_log():
                    timeline = compile_step(self._train, self._cluster, path, options).timeline
            except PartcError:
                continue  # a name that this step or cluster has no use for
            plan = read_plan_folder(path)
            # What takes as long, and sends as much, is the same by another name.
            key = f"{timeline.step_s:.3e}", tuple(timeline.sent_bytes.values())
            if key not in self._plans:
                self._plans.add(key)
                segments_s = simulate(plan.plan, self._cluster, measure_segments(plan)).step_s
                yield Candidate(name, plan, timeline.step_s, segments_s)

    def _drawn(self) -> Iterator[tuple[str, Strategy]]:
        """Yield strategies some random moves away from data parallelism."""
        with silent_log():
            options = Options(strategy="allreduce", batch="global")
            first = compile_step(self._train, self._cluster, self._folder / "first", options)
        own = OwnSpace.of(first)
        assert own is not None, "a global batch, and operators that divide"
        start = (data_parallel_config(own.space.workers),) * len(own.groups)
        rng = np.random.default_rng(0)
        for number in range(1, MOST_DRAWN + 1):
            moves = int(rng.integers(1, MOST_MOVES + 1))
            state = random_state(own.tasks, own.space, start, rng, moves)
            yield f"random {number}, {moves} moves", own.strategy(state)


def _largest_degree(name: str) -> int:
    return max([int(word.partition("=")[2] or 0) for word in name.split(",")])


def compare(work: str, name: str, cluster: Cluster, strategies: int, rounds: int) -> list[Row]:
    """Predict and run strategies of a work on a cluster."""
    with tempfile.TemporaryDirectory() as folder:
        candidates = list(Candidates(WORKS[work](), cluster, Path(folder)).take(strategies))
        times_s: list[list[float]] = [[] for _ in candidates]
        failed = [""] * len(candidates)
        for _ in range(rounds):
            for number, candidate in enumerate(candidates):
                try:
                    times_s[number].append(_step_s(candidate))
                except Stopped:
                    raise
                except PartcError as error:
                    failed[number] = str(error).partition("\n")[0]
    return [
        Row(name, work, c.name, c.rates_s, c.segments_s, () if why else tuple(own_s), why)
        for c, own_s, why in zip(candidates, times_s, failed, strict=True)
    ]


def _step_s(candidate: Candidate) -> float:
    """Return the median step of a run, its first quarter left out."""
    steps = max(LEAST_STEPS, min(MOST_STEPS, round(RUN_S / candidate.segments_s)))
    traced = steps - steps // 4
    times = (
        Runner(candidate.plan)
        .train("synthetic", steps, save=False, traced_steps=traced, timeout_s=TIMEOUT_S)
        .times
    )
    begun = [step.begin_s[0] for step in times[0].steps]
    return statistics.median(later - earlier for earlier, later in pairwise(begun))


def main() -> None:
    """Measure what is not in the file yet, print the tables, plot."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # namespaces and quotas are removed
    if not options.summary:
        with tempfile.TemporaryDirectory() as cache:
            os.environ[CACHE] = cache  # segments are measured in this run
            _measure(options)
    rows = _read(options.rows)
    print(summary(rows))
    if options.plot:
        options.plot.write_text(_plot(rows))


def _measure(options: argparse.Namespace) -> None:
    there = {(row.cluster, row.work) for row in _read(options.rows)}
    for name in map(name_of, options.clusters):
        works = [work for work in options.works if (name, work) not in there]
        if not works:
            continue
        with compared_cluster(name, options.rows.with_suffix(f".{name}.json")) as cluster:
            for work in works:
                begun_s = time.monotonic()
                rows = compare(work, name, cluster, options.strategies, options.rounds)
                with options.rows.open("ab") as stream:
                    stream.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
                print(f"{name} {work}: {len(rows)} in {time.monotonic() - begun_s:.0f} s", flush=True)


def _read(path: Path) -> list[Row]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Row) for line in lines]


# ---------------------------------------------------------------- tables


def summary(rows: Sequence[Row]) -> str:
    """Return tables in Markdown: of works on clusters, of all together, of every run, and what failed."""
    ran = [row for row in rows if not row.failed]
    lines = [
        "| cluster | work | strategies | median error | worst | rank correlation | in order "
        "| by rates: median | worst | rank correlation |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lowest = {False: 1.0, True: 1.0}
    for (cluster, work), group in groupby(ran, key=lambda row: (row.cluster, row.work)):
        own = list(group)
        lines.append(f"| {cluster} | {work} {_cells(own)}")
        shared = cluster.endswith(SHARED)
        lowest[shared] = min(lowest[shared], _agreements(own)[0].correlation)
    lines.append("")
    for shared, cores in ((False, "of their own"), (True, "that others share")):
        some = [row for row in ran if row.cluster.endswith(SHARED) == shared]
        if some:
            segments, rates = _agreements(some)
            lines.append(
                f"{len(some)} strategies on cores {cores}: median error {segments.median_error:.1%}, worst "
                f"{segments.worst_error:.0%}, lowest rank correlation {lowest[shared]:.2f}; by rates "
                f"{rates.median_error:.1%}, {rates.worst_error:.0%}"
            )
    lines += [
        f"failed: {row.cluster}, {row.work}, {row.strategy}: {row.failed}" for row in rows if row.failed
    ]
    lines += ["", "| cluster | work | strategy | measured, ms | predicted, ms | ratio | by rates, ms |"]
    lines.append("|---|---|---|---|---|---|---|")
    return "\n".join([*lines, *map(_line, ran)])


def _agreements(rows: Sequence[Row]) -> tuple[Agreement, Agreement]:
    """Return how well predictions with measured segments agree, and those by rates."""
    measured = [row.measured_s for row in rows]
    return (
        agreement([row.segments_s for row in rows], measured),
        agreement([row.rates_s for row in rows], measured),
    )


def _cells(rows: Sequence[Row]) -> str:
    own, rates = _agreements(rows)
    return (
        f"| {own.count} | {own.median_error:.0%} | {own.worst_error:.0%} | {own.correlation:.2f} "
        f"| {own.ordered} of {own.pairs} "
        f"| {rates.median_error:.0%} | {rates.worst_error:.0%} | {rates.correlation:.2f} |"
    )


def _line(row: Row) -> str:
    measured_ms, predicted_ms = row.measured_s * 1e3, row.segments_s * 1e3
    return (
        f"| {row.cluster} | {row.work} | {row.strategy} | {measured_ms:.1f} | {predicted_ms:.1f} "
        f"| {predicted_ms / measured_ms:.2f} | {row.rates_s * 1e3:.1f} |"
    )


def _plot(rows: Sequence[Row]) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not row.failed:
            points.setdefault(row.work, []).append((row.measured_s * 1e3, row.segments_s * 1e3))
    return scatter_plot(
        points,
        title="A step of every strategy on every cluster",
        x="measured, ms",
        y="predicted, ms",
        band=BAND,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--strategies", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
