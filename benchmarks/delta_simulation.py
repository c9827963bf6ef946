"""Proposals a second of a search, simulated in full and by what they change, on steps drawn without a model.

    python benchmarks/delta_simulation.py [--devices 4 16 64] [--proposals 200] [--json FILE]

A random walk as a search makes: from data parallelism, one operator's configuration at a time, better ones
are kept, and worse ones with a chance. All simulations follow the same walk and are asserted to agree. A
proposal is the change of the graph, the simulation, and the return where it is not kept; what blocks
contain is made before the clock runs. With limit: simulation stops once the step is too long to be kept.
Ratios: to full simulation in the same run.
"""

import argparse
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rows import Row, write_rows
from synthetic_steps import Blocks, Step, layers, recurrence

from partc.cost.simulation.task_graph import BlockTasks, TaskGraph

STEPS = (layers(10), layers(100), recurrence(10, 2), recurrence(40, 2))
WARM_UP = 3
GREED = 200
SYSTEMS = ("full", "delta", "full with limit", "delta with limit")


class Walk:
    """One search's way through the strategies of a step, simulated in both ways."""

    def __init__(self, step: Step, devices: int, seed: int) -> None:
        self.blocks = Blocks(step, devices)
        self._rng = np.random.default_rng(seed)
        self._strategy = self.blocks.data_parallel()
        contents = self.blocks.all_contents(self._strategy)
        self.graphs: dict[str, TaskGraph] = {}
        self._order = SYSTEMS
        self.forget_seconds()
        for system in SYSTEMS:
            self.graphs[system] = self.blocks.graph()
            self.graphs[system].replace(contents)
            self._now_s = self.graphs[system].full()

    def forget_seconds(self) -> None:
        self.seconds = dict.fromkeys(SYSTEMS, 0.0)
        self.change_seconds = dict.fromkeys(SYSTEMS, 0.0)

    def propose(self) -> None:
        strategy = list(self._strategy)
        operator = int(self._rng.integers(len(strategy)))
        strategy[operator] = self.blocks.draw(self._rng)
        contents = self.blocks.contents(strategy, operator)
        # Metropolis: a step is kept with probability exp(-GREED * what it takes more, relatively).
        limit_s = self._now_s * (1 - math.log(1 - self._rng.random()) / GREED)
        self._order = self._order[1:] + self._order[:1]  # who comes first finds colder caches
        found = {system: self._simulate(system, contents, limit_s) for system in self._order}
        assert len({step_s if step_s <= limit_s else math.inf for step_s in found.values()}) == 1, found
        assert found["full"] == found["delta"], found
        if found["full"] <= limit_s:
            self._strategy, self._now_s = strategy, found["full"]

    def _simulate(self, system: str, contents: Mapping[int, BlockTasks], limit_s: float) -> float:
        graph = self.graphs[system]
        stop_s = limit_s if "limit" in system else math.inf
        begun_s = time.perf_counter()
        graph.replace(contents)
        simulated_s = time.perf_counter()
        step_s = graph.full(stop_s) if "full" in system else graph.delta(stop_s)
        if step_s > limit_s:
            graph.undo()
        ended_s = time.perf_counter()
        self.seconds[system] += ended_s - begun_s
        self.change_seconds[system] += simulated_s - begun_s
        return step_s


def measure(step: Step, devices: int, proposals: int, seed: int) -> list[Row]:
    walk = Walk(step, devices, seed)
    for _ in range(WARM_UP):
        walk.propose()
    walk.forget_seconds()
    for _ in range(proposals):
        walk.propose()
    work = f"{step.name} on {devices}"
    rates = {system: proposals / seconds for system, seconds in walk.seconds.items()}
    rows = [Row(work, system, rate, "proposals/s", rate / rates["full"]) for system, rate in rates.items()]
    rows += [
        Row(work, f"{system}: change of the graph", seconds / walk.seconds[system], "share", None)
        for system, seconds in walk.change_seconds.items()
    ]
    graph = walk.graphs["full"]
    return [
        *rows,
        Row(work, "graph", graph.tasks, "tasks", None),
        Row(work, "graph", graph.dependencies, "dependencies", None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--proposals", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for step in STEPS:
        for devices in arguments.devices:
            found = measure(step, devices, arguments.proposals, arguments.seed)
            rows += found
            tasks = next(row.value for row in found if row.unit == "tasks")
            print(f"{found[0].work}, {tasks:,.0f} tasks")
            for row in found[: len(SYSTEMS)]:
                print(f"    {row.system:20} {row.value:9,.1f}/s {row.ratio:6.2f}x", flush=True)
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
