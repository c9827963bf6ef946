"""How long a search takes to come close to the best that is known: seeds of short walks, and one long one.

    python benchmarks/search_seconds.py [--model nmt] [--cluster k80] [--devices 64] [--seeds 10]
                                        [--budget 60] [--long 1800] [--within 0.01] [--json FILE]

Steps are the task graph's. The best known is that of all walks. A walk's seconds are of the clock, on all
cores, from when the graph is analysed, compiled kernels at hand; what another core's chain finds is seen when
a round ends. `-`: the walk does not come so close.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flexflow import CLUSTERS, MODELS, Experiment, experiment_of
from rows import write_rows

from partc.compiler.planning.order_step import bucket_bytes
from partc.compiler.search.operators.own_space import OwnSpace, space_of
from partc.compiler.search.operators.walk_chains import walk_rounds
from partc.compiler.search.operators.walk_tasks import BestStates, StepConfigs
from partc.compiler.task_graphs.step_tasks import StepTasks


@dataclass(frozen=True)
class Walk:
    """A walk: the seconds that it had, its proposals, and (seconds, step) of each improvement."""

    seed: int
    budget_s: float
    proposals: int
    curve: tuple[tuple[float, float], ...]

    @property
    def step_s(self) -> float:
        """Return the best step."""
        return self.curve[-1][1]

    def reaches_s(self, step_s: float) -> float | None:
        """Return after how many seconds it had a step, or a shorter one."""
        return next((at for at, found_s in self.curve if found_s <= step_s), None)


def walked(case: Experiment, starts: list[StepConfigs], seed: int, budget_s: float) -> Walk:
    """Return a walk with a task graph that remembers nothing yet."""
    tasks = StepTasks(case.tasks.step, case.tasks.prices, bucket_bytes(case.first.cluster))
    begun_s = time.monotonic()
    curve: list[tuple[float, float]] = []

    def note(step_s: float) -> None:
        curve.append((time.monotonic() - begun_s, step_s))

    def until(share: float) -> float:
        return time.monotonic() + share * (begun_s + budget_s - time.monotonic())

    proposals, rng, found = 0, np.random.default_rng(seed), BestStates()
    space = space_of(case.first, case.groups)
    for count in walk_rounds(tasks, space, starts, found, rng, until, note):
        proposals += count
        if not curve or found.least_s < curve[-1][1]:
            note(found.least_s)
    return Walk(seed, budget_s, proposals, tuple(curve))


def main() -> None:
    """Walk, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="nmt")
    parser.add_argument("--cluster", choices=CLUSTERS, default="k80")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a walk")
    parser.add_argument("--long", type=float, default=1800.0, help="seconds of the long walk; 0: none")
    parser.add_argument("--within", type=float, default=0.01, help="of the best known")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    case = experiment_of(asked.model, asked.cluster, asked.devices)
    starts = OwnSpace(case.first, case.groups).starts()
    begun_s = [case.tasks.begin(state) for state in starts]
    budgets = [(seed, asked.budget) for seed in range(asked.seeds)]
    budgets += [(asked.seeds, asked.long)] if asked.long else []
    walks = []
    for seed, budget_s in budgets:
        walks.append(walked(case, starts, seed, budget_s))
        print(f"seed {seed}, {budget_s:.0f} s: {1e3 * walks[-1].step_s:.2f} ms", flush=True)
        write_rows(walks, asked.json)
    best_s = min(walk.step_s for walk in walks)
    reached = [walk.reaches_s(best_s * (1 + asked.within)) for walk in walks]
    print(f"\n{case.name}: starts {', '.join(f'{1e3 * s:.1f}' for s in begun_s if s is not None)} ms")
    print("| seed | budget, s | proposals | best, ms | over the best known | within, s | of the starts |")
    print("|---|---|---|---|---|---|---|")
    for walk, at in zip(walks, reached, strict=True):
        ratio = min(s for s in begun_s if s is not None) / walk.step_s
        print(
            f"| {walk.seed} | {walk.budget_s:.0f} | {walk.proposals} | {1e3 * walk.step_s:.2f} "
            f"| {walk.step_s / best_s - 1:.1%} | {'-' if at is None else f'{at:.0f}'} | {ratio:.2f}x |"
        )
    short = [walk.step_s for walk in walks[: asked.seeds]]
    print(f"median of the short walks: {statistics.median(short) / best_s - 1:.1%} over the best known")


if __name__ == "__main__":
    main()
