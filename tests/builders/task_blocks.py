"""Task graphs that change at random, and a slow simulation of them in plain Python."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from partc.cost.simulation.task_graph import BlockTasks

Dependency = tuple[int, int, int, int]
Contents = dict[int, tuple[list[tuple[int, float]], list[Dependency]]]  # (resource, seconds), dependencies
Task = tuple[int, int]  # block, index


def block_of(tasks: list[tuple[int, float]], dependencies: list[Dependency]) -> BlockTasks:
    return BlockTasks(
        np.array([resource for resource, _ in tasks], np.int32),
        np.array([seconds for _, seconds in tasks], np.float64),
        np.array(dependencies, np.int32).reshape(-1, 4),
    )


def relaxed(contents: Contents) -> dict[Task, tuple[float, float, float]]:
    """Return each task's ready, start and end: first in, first out, applied until nothing changes."""
    tasks = {
        (block, index): task for block, (given, _) in contents.items() for index, task in enumerate(given)
    }
    predecessors = defaultdict(list)
    for _, dependencies in contents.values():
        for block, index, target, target_index in dependencies:
            predecessors[target, target_index].append((block, index))
    times = dict.fromkeys(tasks, (0.0, 0.0, 0.0))
    while True:
        ready = {task: max((times[p][2] for p in predecessors[task]), default=0.0) for task in tasks}
        free: dict[int, float] = defaultdict(float)
        found = {}
        for task in sorted(tasks, key=lambda task: (ready[task], task)):
            resource, seconds = tasks[task]
            start = max(ready[task], free[resource])
            free[resource] = start + seconds
            found[task] = ready[task], start, start + seconds
        if found == times:
            return times
        times = found


class RandomMoves:
    """A random graph and random changes of it, shaped as a search's: operators, and what joins two of them.

    Every third block is an operator, whose tasks may depend on each other. Another one joins an earlier
    operator to a later one or to none: dependencies from task to task, and tasks between, which are its own.
    Seconds are often equal, and often nothing, so that there are ties.
    """

    def __init__(self, seed: int, operators: int, resources: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.blocks, self.resources = 3 * operators - 2, resources
        self._joined = {block: self._ends(block) for block in range(self.blocks) if block % 3}
        self._density = self._rng.uniform(0.05, 0.9)
        self._whole_seconds = self.chance(0.5)
        self.contents: Contents = {}
        self.contents = self._drawn(range(self.blocks))
        self._former = self.contents

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def propose(self) -> Contents:
        """Return other contents for a few blocks, and for what joins them to others."""
        chosen = set(self._rng.integers(0, self.blocks, self._rng.integers(1, 4)).tolist())
        joining = {block for block, ends in self._joined.items() if chosen & set(ends)}
        change = self._drawn(sorted(chosen | joining))
        self._former = self.contents
        self.contents = self.contents | change
        return change

    def take_back(self) -> None:
        self.contents = self._former

    def _ends(self, block: int) -> tuple[int, ...]:
        source = 3 * int(self._rng.integers(0, block // 3 + 1))
        later = range(block // 3 + 1, (self.blocks + 2) // 3)
        return (source,) if self.chance(0.2) else (source, 3 * int(self._rng.choice(later)))

    def _drawn(self, blocks: Iterable[int]) -> Contents:
        tasks = {block: [self._task() for _ in range(self._rng.integers(0, 7))] for block in blocks}
        sizes = {block: len(given) for block, (given, _) in self.contents.items()}
        sizes |= {block: len(given) for block, given in tasks.items()}
        return {block: (given, self._dependencies(block, sizes)) for block, given in tasks.items()}

    def _task(self) -> tuple[int, float]:
        seconds = float(self._rng.integers(0, 4)) if self._whole_seconds else float(self._rng.random())
        return int(self._rng.integers(self.resources)), seconds

    def _dependencies(self, block: int, sizes: dict[int, int]) -> list[Dependency]:
        line = sorted({block, *self._joined.get(block, ())})
        tasks = [(place, index) for place in line for index in range(sizes[place])]
        pairs = [
            (*source, *target)
            for source in tasks
            for target in tasks
            if source < target and (source[0] != target[0] or source[0] == block)
        ]
        return [pair for pair in pairs if self.chance(self._density)]
