"""FlexFlow's table 4 and figure 12: seconds of a search with full and with delta simulation.

    python benchmarks/search_time.py [--models nmt ...] [--cluster p100] [--devices 4 8 16] [--seeds 2]
                                     [--systems delta full anew] [--least 200] [--most 20000]
                                     [--budget 30] [--json FILE] [--plots FOLDER]

A walk of one chain begins at a random state, and ends when half of its proposals have brought nothing
better (flexflow.txt, section 6.2): of `--least` proposals or more, and of `--most` at most. All systems make
the same proposals, so that they come to the same steps, which is asserted; the first may take `--budget`
seconds, and the others make as many proposals. All stop simulating a step once it is too long to be taken.

    delta  what a proposal changes is written anew, and simulated from the first change on (algorithm 2)
    full   what a proposal changes is written anew, and every task simulated (algorithm 1)
    anew   the whole graph is written anew, as algorithm 1 has it in its second line

Seconds are of the processor's time, with layouts of operators when they are first needed, without compiling
kernels. Plots: the best step so far over these seconds, of the first seed.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flexflow import CLUSTERS, MODELS, Experiment, experiment_of
from line_plot import line_plot
from rows import write_rows

from partc.compiler.planning.order_step import bucket_bytes
from partc.compiler.search.operators.own_space import space_of
from partc.compiler.search.operators.walk_tasks import BestStates, StepConfigs, TaskWalk, random_state
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.cost.simulation.task_graph import BlockTasks, TaskGraph
from partc.passes.search.operators.grouped_step import group_step
from partc.passes.search.operators.operator_space import OperatorConfig, OperatorSpace, data_parallel_config

POINTS = 200  # of a plotted curve
RANDOM_MOVES = 2  # of each kind, on the mean: what makes a state random
PAPER = {  # table 4: seconds with full and delta simulation on 4, 8, 16, 32 and 64 devices
    "alexnet": ((0.11, 0.04), (0.40, 0.13), (1.4, 0.48), (5.3, 1.8), (18, 5.9)),
    "resnet101": ((1.4, 0.4), (4.5, 1.4), (22, 7.3), (107, 33), (515, 158)),
    "inception_v3": ((14, 4.1), (66, 17), (388, 77), (1746, 298), (8817, 1278)),
    "rnntc": ((16, 7.5), (91, 39), (404, 170), (1358, 516), (4404, 1489)),
    "rnnlm": ((21, 9.2), (76, 31), (327, 121), (1102, 342), (3406, 969)),
    "nmt": ((40, 16), (178, 65), (998, 328), (2698, 701), (8982, 2190)),
}
PAPER_DEVICES = (4, 8, 16, 32, 64)


class DeltaGraph(TaskGraph):
    """Counts the seconds that simulating moves takes."""

    simulating_s = 0.0

    def delta(self, limit_s: float = math.inf) -> float:
        """Simulate the last move."""
        begun_s = time.process_time()
        step_s = self.simulated(limit_s)
        self.simulating_s += time.process_time() - begun_s
        return step_s

    def simulated(self, limit_s: float) -> float:
        """Simulate what the last move changes."""
        return super().delta(limit_s)


class FullGraph(DeltaGraph):
    """Simulates every task, whatever a move changes."""

    def simulated(self, limit_s: float) -> float:
        """Simulate every task."""
        return self.full(limit_s)


class AnewTasks(StepTasks):
    """Writes the whole graph for every move."""

    def begin(self, configs: Sequence[OperatorConfig]) -> float | None:
        """Write the graph of these configurations."""
        self._configs = self._former = tuple(configs)
        return super().begin(configs)

    def move(self, changes: Mapping[int, OperatorConfig], limit_s: float = math.inf) -> float | None:
        """Write the graph that some groups' other configurations make."""
        before = self._configs
        step_s = self.begin([changes.get(number, config) for number, config in enumerate(before)])
        self._former = before
        if step_s is None or self.exceeds_memory:
            self._configs = before
            return None
        return step_s

    def undo(self) -> None:
        """Take the last move back: the next one writes all there is."""
        self._configs = self._former


SYSTEMS: dict[str, tuple[type[StepTasks], type[DeltaGraph]]] = {
    "delta": (StepTasks, DeltaGraph),
    "full": (StepTasks, FullGraph),
    "anew": (AnewTasks, DeltaGraph),
}


@dataclass(frozen=True)
class Walked:
    """A search: its seconds, those of simulating, its proposals, and (seconds, step) of each improvement."""

    work: str
    system: str
    seed: int
    seconds: float
    simulating_s: float
    proposals: int
    step_s: float
    ended: bool  # by the rule, not by a limit
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Limits:
    """When a walk ends: `least` and `most` proposals, and processor seconds."""

    least: int
    most: int
    budget_s: float = math.inf

    def is_over(self, proposals: int, improved_at: int, seconds: float) -> bool:
        """Tell whether half of the proposals brought nothing, or a limit is reached."""
        return self.follows_rule(proposals, improved_at) or proposals >= self.most or seconds >= self.budget_s

    def follows_rule(self, proposals: int, improved_at: int) -> bool:
        """Tell whether half of the proposals brought nothing."""
        return proposals >= self.least and 2 * (proposals - improved_at) >= proposals


WARM_UP = Limits(50, 50)


def compile_kernels() -> None:
    """Have delta simulation and its undoing compiled: a walk may come to it late."""
    graph = TaskGraph([()] * 3, 1)
    alone = BlockTasks(np.ones(1, np.int32), np.zeros(1, np.int32), np.ones(1), np.zeros((0, 3), np.int32))
    graph.replace(dict.fromkeys(range(3), alone))
    graph.full()
    graph.replace({2: alone})
    graph.delta(1e3)
    graph.undo()


def tasks_of(system: str, case: Experiment) -> StepTasks:
    """Return a task graph that remembers nothing yet."""
    kind, graph = SYSTEMS[system]
    first = case.first
    step = group_step(first.analysis, case.groups)
    return kind(step, TaskPrices(first.cluster, first.options.times), bucket_bytes(first.cluster), graph)


def walked(
    case: Experiment, space: OperatorSpace, system: str, start: StepConfigs, seed: int, limits: Limits
) -> Walked:
    """Return a search from a start."""
    tasks, best, rng = tasks_of(system, case), BestStates(), np.random.default_rng(seed)
    begun_s = time.process_time()
    walk = TaskWalk(tasks, space, best, start)
    curve, improved_at, seconds = [(0.0, best.least_s)], 0, 0.0
    while not limits.is_over(walk.proposals, improved_at, seconds):
        walk.advance(rng, 1)
        seconds = time.process_time() - begun_s
        if best.least_s < curve[-1][1]:
            curve.append((seconds, best.least_s))
            improved_at = walk.proposals
    assert isinstance(tasks.graph, DeltaGraph)
    return Walked(
        case.name,
        system,
        seed,
        seconds,
        tasks.graph.simulating_s,
        walk.proposals,
        best.least_s,
        limits.follows_rule(walk.proposals, improved_at),
        tuple(curve),
    )


def searches(case: Experiment, systems: Sequence[str], seeds: int, limits: Limits) -> list[Walked]:
    """Return the searches of all systems, from the same random states."""
    space = space_of(case.first, case.groups)
    data: StepConfigs = (data_parallel_config(space.workers),) * len(case.groups)
    moves = RANDOM_MOVES * len(space.kinds)
    for system in systems:
        walked(case, space, system, data, seeds, WARM_UP)
    rows: list[Walked] = []
    for seed in range(seeds):
        start = random_state(case.tasks, space, data, np.random.default_rng([seed, 1]), moves)
        own_limits = limits
        for system in systems:
            row = walked(case, space, system, start, seed, own_limits)
            if own_limits is not limits:
                assert row.step_s == rows[-1].step_s, "the same walk"
            own_limits = Limits(row.proposals, row.proposals)
            rows.append(row)
    return rows


def curves(rows: Sequence[Walked], title: str) -> str:
    """Return a plot of the best step so far, of the first seed."""
    first = [row for row in rows if row.seed == 0]
    every_s = max(row.seconds for row in first) / POINTS
    lines = {row.system: _sampled(row, every_s) for row in first}
    return line_plot(lines, title=title, x="processor seconds", y="best step so far, ms", every=every_s)


def _sampled(row: Walked, every_s: float) -> list[float]:
    times, steps = zip(*row.curve, strict=True)
    at = np.arange(1, max(2, int(row.seconds / every_s) + 1)) * every_s
    return [1e3 * steps[place - 1] for place in np.searchsorted(times, at, side="right")]


def show(rows: Sequence[Walked], model: str, devices: int) -> None:
    """Print a line per system, the mean of all seeds."""
    paper = dict.fromkeys(SYSTEMS, "")
    if devices in PAPER_DEVICES:
        full_s, delta_s = PAPER[model][PAPER_DEVICES.index(devices)]
        paper |= {"full": f"{full_s:g}", "delta": f"{delta_s:g} ({full_s / delta_s:.1f}x)"}
    by_system = {name: [row for row in rows if row.system == name] for name in SYSTEMS}
    full = by_system["full"] or rows
    for name, own in by_system.items():
        if own:
            ended = sum(row.ended for row in own)
            print(
                f"| {own[0].work} | {name} | {_mean(own, 'seconds'):.1f} "
                f"| {_mean(full, 'seconds') / _mean(own, 'seconds'):.2f}x "
                f"| {_mean(own, 'simulating_s'):.2f} | {_mean(own, 'proposals'):.0f} "
                f"| {1e3 * min(row.step_s for row in own):.1f} | {ended} of {len(own)} "
                f"| {paper[name]} |",
                flush=True,
            )


def _mean(rows: Sequence[Walked], name: str) -> float:
    return statistics.mean(getattr(row, name) for row in rows)


def main() -> None:
    """Search, print a table in Markdown, write JSON and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cluster", choices=CLUSTERS, default="p100")
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["delta", "full"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--least", type=int, default=200, help="proposals of a walk, at least")
    parser.add_argument("--most", type=int, default=20_000, help="proposals of a walk, at most")
    parser.add_argument("--budget", type=float, default=30.0, help="processor seconds of the first system")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path)
    asked = parser.parse_args()
    limits = Limits(asked.least, asked.most, asked.budget)
    rows: list[Walked] = []
    compile_kernels()
    print(
        "| work | system | s | times full | simulating, s | proposals | best, ms | by the rule | paper, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model in asked.models:
        for devices in asked.devices:
            case = experiment_of(model, asked.cluster, devices)
            own = searches(case, asked.systems, asked.seeds, limits)
            show(own, model, devices)
            rows += own
            write_rows(rows, asked.json)
            if asked.plots:
                asked.plots.mkdir(parents=True, exist_ok=True)
                path = asked.plots / f"search-time-{model}-{devices}.svg"
                path.write_text(curves(own, f"{case.name}: search with full and with delta simulation"))
            print(f"{case.name}: done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
