"""Proposals a second of a search, simulated in full and by what they change, on steps drawn without a model.

    python benchmarks/delta_simulation.py [--devices 4 16 64] [--proposals 200] [--json FILE]

A random walk as a search makes: from data parallelism, one operator's configuration at a time, better ones are
kept, and worse ones with a chance. Both simulations follow the same walk and are asserted to agree. A proposal is the
change of the graph, the simulation, and the return where it is not kept; what a block contains is drawn
before the clock runs. Ratios: to full simulation in the same run.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from synthetic_steps import Blocks, Step, layers, recurrence

from partc.cost.simulation.task_graph import BlockTasks, TaskGraph

STEPS = (layers(10), layers(100), recurrence(10, 2), recurrence(40, 2))
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Row:
    work: str
    system: str
    value: float
    unit: str
    ratio: float | None


class Walk:
    """One search's way through the strategies of a step, simulated in both ways."""

    def __init__(self, step: Step, devices: int, seed: int) -> None:
        self.blocks = Blocks(step, devices)
        self._rng = np.random.default_rng(seed)
        self._strategy = self.blocks.data_parallel()
        contents = self.blocks.all_contents(self._strategy)
        self.graphs: dict[str, TaskGraph] = {}
        self.seconds = dict.fromkeys(("full", "delta"), 0.0)
        for system in self.seconds:
            self.graphs[system] = self.blocks.graph()
            self.graphs[system].replace(contents)
            self._now_s = self.graphs[system].full()

    def propose(self) -> None:
        strategy = list(self._strategy)
        operator = int(self._rng.integers(len(strategy)))
        strategy[operator] = self.blocks.draw(self._rng)
        contents = self.blocks.contents(strategy, operator)
        chance = self._rng.random()
        found = {system: self._simulate(system, contents, chance) for system in self.seconds}
        assert found["full"] == found["delta"], found
        if self._keeps(found["full"], chance):
            self._strategy, self._now_s = strategy, found["full"]

    def _simulate(self, system: str, contents: Mapping[int, BlockTasks], chance: float) -> float:
        graph = self.graphs[system]
        begun_s = time.perf_counter()
        graph.replace(contents)
        step_s = graph.full() if system == "full" else graph.delta()
        if not self._keeps(step_s, chance):
            graph.undo()
        self.seconds[system] += time.perf_counter() - begun_s
        return step_s

    def _keeps(self, step_s: float, chance: float) -> bool:
        return chance < math.exp(min(0.0, 200 * (self._now_s - step_s) / self._now_s))


def measure(step: Step, devices: int, proposals: int, seed: int) -> list[Row]:
    walk = Walk(step, devices, seed)
    for _ in range(WARM_UP):
        walk.propose()
    walk.seconds = dict.fromkeys(walk.seconds, 0.0)
    for _ in range(proposals):
        walk.propose()
    work = f"{step.name} on {devices}"
    rates = {system: proposals / seconds for system, seconds in walk.seconds.items()}
    rows = [Row(work, system, rate, "proposals/s", rate / rates["full"]) for system, rate in rates.items()]
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
            (full, delta, tasks, dependencies), rows = found, rows + found
            print(
                f"{full.work:28} {tasks.value:8,.0f} tasks {dependencies.value:9,.0f} dependencies "
                f"{full.value:9,.1f}/s full {delta.value:9,.1f}/s delta  {delta.ratio:5.2f}x",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
