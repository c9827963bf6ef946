"""FlexFlow's section 8.4: the global optimum by exhaustion, and how long each method takes to it.

    python benchmarks/global_optimum.py [--works lenet rnnlm] [--clusters p100 k80] [--seeds 3]
                                        [--budget 60] [--walk 5] [--exhaust 600] [--json FILE]

LeNet, and an RNNLM of two steps, on four devices of a cluster. Steps are the task graph's. Exhaustion begins
where a short walk and a climb end. Of mcmc, from data parallelism: the median over seeds of the seconds until
its best state is within 0.1 % of the optimum, compiling kernels left out; dp and ilp: the seconds of their
tables and of solving, and the step of their answer.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flexflow import CLUSTERS, EXAMPLES, Experiment, first_devices
from rows import write_rows

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.search.operators.exhaust import exhaust
from partc.compiler.search.operators.own_space import OwnSpace
from partc.compiler.search.operators.search_additively import solve_additively
from partc.compiler.search.operators.walk_tasks import (
    BestStates,
    StepConfigs,
    climb,
    fewer_replicas,
    walk_tasks,
)
from partc.compiler.search.search_limit import SearchLimit
from partc.cost.cluster.cluster import read_cluster
from partc.models.catalogue import build_model
from partc.passes.search.operators.operator_space import data_parallel_config
from partc.runtime.errors import BadUsage

DEVICES = 4
WORKS: dict[str, tuple[str, dict[str, int]]] = {
    "lenet": ("softmax_cross_entropy", {}),
    "rnnlm": ("loss", {"steps": 2}),
}
CLOSE = 1e-3  # of the optimum


@dataclass(frozen=True)
class Row:
    """A method's answer: the step's seconds, and those that it took to it (None: it did not get there)."""

    work: str
    method: str
    step_s: float
    seconds: float | None
    note: str


class SmallCase:
    """A model on four devices."""

    def __init__(self, work: str, cluster: str) -> None:
        loss, sizes = WORKS[work]
        self.name = f"{work}, {DEVICES} {cluster}"
        step = build_training_graph(build_model(work, batch=64, **sizes), loss=loss, optimizer=SGD(0.1))
        machines = first_devices(read_cluster(EXAMPLES / CLUSTERS[cluster]), DEVICES)
        first = Experiment(self.name, step, machines).first
        own = OwnSpace.of(first)
        assert own is not None, "there are operators"
        self.own = own
        self.data: StepConfigs = (data_parallel_config(DEVICES),) * len(own.groups)
        own.tasks.begin(self.data)
        own.tasks.move({0: own.alone[0]})  # kernels are compiled

    def starts(self) -> list[StepConfigs]:
        """Return data parallelism, fewer replicas and a single device."""
        return [self.data, fewer_replicas(self.own.tasks, self.own.space), self.own.alone]

    def exhausted(self, walk_s: float, most_s: float) -> Row:
        """Return the quickest of all states."""
        own, begun_s = self.own, time.monotonic()
        best, rng = BestStates(), np.random.default_rng(0)
        walk_tasks(own.tasks, own.space, self.starts(), best, rng, begun_s + walk_s)
        begin, step_s, _ = climb(own.tasks, own.space, best.in_order()[0], begun_s + most_s)
        print(f"{self.name}: exhaustion begins at {1e3 * step_s:.3f} ms", file=sys.stderr, flush=True)
        found = exhaust(own.tasks, own.kinds, begin, lambda: time.monotonic() < begun_s + most_s)
        seconds = time.monotonic() - begun_s
        note = (
            f"{own.states:,} states, {found.priced:,} priced after a walk of {walk_s:.0f} s"
            + ", not ended" * (not found.is_proven)
        )
        return Row(self.name, "exhaustive", found.step_s, seconds, note)

    def walked(self, least_s: float, budget_s: float, seeds: int) -> Row:
        """Return how long walks take to the optimum."""
        took: list[float] = []
        best_s: list[float] = []
        for seed in range(seeds):
            begun_s, reached = time.monotonic(), list[float]()

            def show(step_s: float, begun_s: float = begun_s, reached: list[float] = reached) -> None:
                if step_s <= least_s * (1 + CLOSE):
                    reached.append(time.monotonic() - begun_s)

            best, rng = BestStates(), np.random.default_rng(seed)
            own = self.own
            walk_tasks(own.tasks, own.space, [self.data], best, rng, begun_s + budget_s, show)
            best_s.append(best.least_s)
            if best.least_s <= least_s * (1 + CLOSE):
                took.append(reached[0] if reached else 0.0)
        seconds = statistics.median(took) if len(took) * 2 > seeds else None
        note = f"{len(took)} of {seeds} seeds get there"
        return Row(self.name, "mcmc", statistics.median(best_s), seconds, note)

    def solved(self, method: str) -> Row | None:
        """Return the step of the least sum."""
        limit = SearchLimit(600.0)
        try:
            solved = solve_additively(self.own, method, limit, 0)  # type: ignore[arg-type]
        except BadUsage as refusal:
            print(f"{self.name}: {refusal}", file=sys.stderr)
            return None
        seconds = limit.elapsed_s
        step_s = self.own.tasks.begin(solved.state)
        assert step_s is not None
        return Row(self.name, method, step_s, seconds, "; ".join(solved.remarks))


def main() -> None:
    """Run, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a walk")
    parser.add_argument("--walk", type=float, default=5.0, help="seconds of a walk before exhaustion")
    parser.add_argument("--exhaust", type=float, default=600.0, help="seconds of exhaustion, at most")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[Row] = []
    print("| work | method | step, ms | to the best | s | |\n|---|---|---|---|---|---|")
    for cluster in asked.clusters:
        for work in asked.works:
            case = SmallCase(work, cluster)
            data_s = case.own.tasks.begin(case.data)
            assert data_s is not None
            least = case.exhausted(asked.walk, asked.exhaust)
            own = [Row(case.name, "data", data_s, None, ""), least]
            own += [row for row in map(case.solved, ("dp", "ilp")) if row is not None]
            own.append(case.walked(least.step_s, asked.budget, asked.seeds))
            for row in own:
                taken = "-" if row.seconds is None else f"{row.seconds:.1f}"
                step = f"{1e3 * row.step_s:.3f} | {row.step_s / least.step_s:.3f}"
                print(f"| {row.work} | {row.method} | {step} | {taken} | {row.note} |", flush=True)
            rows += own
            write_rows(rows, asked.json)


if __name__ == "__main__":
    main()
