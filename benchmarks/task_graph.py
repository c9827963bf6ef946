"""How well the task graph of operator groups agrees with compiled plans, and how many proposals it prices.

    python benchmarks/task_graph.py [--works mlp lm ...] [--clusters 2x2 8x6] [--strategies 12] [--json FILE]

Strategies are data parallelism and what some random moves lead to from it; those without a plan are left
out. The error is task graph over plan, both simulated: docs/prediction.md tells how far a plan is from its
run. The rank correlation (Spearman's) is of a work on a cluster. Proposals a second: moves of a random walk,
the building of what they change included, by delta simulation.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.search.operators.own_space import make_tasks, space_of, strategy_of
from partc.compiler.search.operators.walk_tasks import StepConfigs, random_state
from partc.compiler.search.whole_steps import WholeSteps
from partc.cost.cluster.cluster import read_cluster
from partc.models.catalogue import build_model
from partc.passes.search.operators.find_groups import find_groups
from partc.passes.search.operators.operator_space import data_parallel_config

EXAMPLES = Path(__file__).parent.parent / "examples"
CLUSTERS = {"2x2": "cluster-2x2.json", "8x6": "cluster-8x6-titanxp.json"}
BATCH = 48
OPTIONS = Options(batch="global", strategy="allreduce")

Train = Callable[[], onnx.ModelProto]


def _classifier(model: str, **sizes: object) -> Train:
    def build() -> onnx.ModelProto:
        forward = build_model(model, batch=BATCH, **sizes)
        return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))

    return build


def _words(model: str, **sizes: int) -> Train:
    def build() -> onnx.ModelProto:
        forward = build_model(model, batch=BATCH, **sizes)
        return build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1))

    return build


WORKS: dict[str, Train] = {
    "mlp": _classifier("mlp", sizes=(512, 4096, 2048, 2048, 64)),
    "resnet50": _classifier("resnet50", width=32, image=96, classes=100),
    "lm": _words("lm", vocab=20_000, embedding=256, cells=1024, projection=256, steps=10, samples=1024),
    "nmt": _words(
        "nmt",
        source_vocab=8_000,
        target_vocab=8_000,
        embedding=256,
        cells=256,
        source_steps=8,
        target_steps=8,
    ),
}


@dataclass(frozen=True)
class Pair:
    """A strategy's step by the task graph and by its plan, in seconds."""

    work: str
    cluster: str
    strategy: str
    tasks_s: float
    plan_s: float


class Work:
    """A step on a cluster."""

    def __init__(self, name: str, cluster: str) -> None:
        self.name, self.cluster = name, cluster
        model = WORKS[name]()
        self._whole = WholeSteps(
            lambda: import_training_graph(model), read_cluster(EXAMPLES / CLUSTERS[cluster]), OPTIONS
        )
        self._whole("allreduce", "allreduce")
        self._first = self._whole.first
        analysis = self._first.analysis
        self._groups = find_groups(analysis.training, analysis.facts, analysis.main)
        self.tasks = make_tasks(self._first, self._groups)
        self.space = space_of(self._first, self._groups)
        self.start = (data_parallel_config(len(self._first.worker_names)),) * len(self._groups)

    def pairs(self, count: int) -> Iterator[Pair]:
        """Yield data parallelism and strategies some random moves away."""
        rng = np.random.default_rng(0)
        yield from self._pair("data", self.start)
        while count:
            moves = int(rng.integers(1, 5))
            state = random_state(self.tasks, self.space, self.start, rng, moves)
            found = list(self._pair(f"{moves} moves", state))
            count -= len(found)
            yield from found

    def _pair(self, name: str, state: StepConfigs) -> Iterator[Pair]:
        strategy = strategy_of(state, self._groups, self._first.worker_names, "global")
        plan = self._whole(name, strategy)
        tasks_s = self.tasks.begin(state)
        if plan is not None and tasks_s is not None:
            yield Pair(self.name, self.cluster, name, tasks_s, plan.step_s)

    def proposals_per_s(self, seconds: float = 10.0) -> float:
        """Return how many moves of a random walk are priced in a second, once the first are through."""
        rng = np.random.default_rng(1)
        self.tasks.begin(self.start)
        begun_s, count = time.monotonic(), 0
        while time.monotonic() < begun_s + seconds:
            kind, config = self.space.draw(rng)
            if self.tasks.move(dict.fromkeys(self.space.kinds[kind].groups, config)) is not None:
                self.tasks.undo()
            count += 1
        return count / (time.monotonic() - begun_s)


def main() -> None:
    """Measure, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--strategies", type=int, default=12)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pairs: list[Pair] = []
    print("| work, cluster | strategies | median error | worst | rank correlation | tasks | proposals/s |")
    print("|---|---|---|---|---|---|---|")
    for name in asked.works:
        for cluster in asked.clusters:
            work = Work(name, cluster)
            own = list(work.pairs(asked.strategies))
            pairs += own
            work.tasks.begin(work.start)
            ranks = [
                np.argsort(np.argsort(times))
                for times in zip(*((p.tasks_s, p.plan_s) for p in own), strict=True)
            ]
            correlation = float(np.corrcoef(ranks)[0, 1])
            errors = [abs(p.tasks_s / p.plan_s - 1) for p in own]
            print(
                f"| {name}, {cluster} | {len(own)} | {statistics.median(errors):.0%} | {max(errors):.0%} "
                f"| {correlation:.2f} | {work.tasks.graph.tasks} | {work.proposals_per_s():.0f} |",
                flush=True,
            )
    errors = [abs(p.tasks_s / p.plan_s - 1) for p in pairs]
    print(f"\n{len(pairs)} strategies: median {statistics.median(errors):.1%}, worst {max(errors):.0%}")
    if asked.json:
        rows = [
            {
                "work": f"{p.work}/{p.cluster}/{p.strategy}",
                "system": "task graph",
                "value": p.tasks_s,
                "unit": "s",
                "ratio": p.tasks_s / p.plan_s,
            }
            for p in pairs
        ]
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
