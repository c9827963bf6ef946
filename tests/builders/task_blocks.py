"""Task graphs that change at random, and slow simulations of them in plain Python."""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from partc.cost.cluster.profiles import SLOT_S
from partc.cost.simulation.task_arrays import OWN
from partc.cost.simulation.task_graph import BlockTasks

Dependency = tuple[int, int, int]  # the block and index that is waited for, and the index that waits
Parts = list[tuple[int, float]]  # resource, seconds
Contents = dict[int, tuple[list[Parts], list[Dependency]]]
Task = tuple[int, int]  # block, index


def sources_of(blocks: int) -> list[list[int]]:
    """Return the sources of blocks that may wait for any earlier one."""
    return [list(range(block)) for block in range(blocks)]


def blocks_of(contents: Contents) -> dict[int, BlockTasks]:
    return {block: block_of(block, *content) for block, content in contents.items()}


def block_of(
    block: int, tasks: list[Parts], dependencies: list[Dependency], sources: Sequence[int] | None = None
) -> BlockTasks:
    """Return a block's contents. `sources`: of the block, all earlier ones if None."""
    slots = {source: slot for slot, source in enumerate(range(block) if sources is None else sources)}
    rows = [
        (OWN if source == block else slots.get(source, source), *indices) for source, *indices in dependencies
    ]
    return BlockTasks(
        np.array([len(parts) for parts in tasks], np.int32),
        np.array([resource for parts in tasks for resource, _ in parts], np.int32),
        np.array([seconds for parts in tasks for _, seconds in parts], np.float64),
        np.array(rows, np.int32).reshape(-1, 3),
    )


class Devices:
    """What resources have done so far. `launcher`: goes ahead while the resource of the next part is busy."""

    def __init__(self, launcher: int | None = None) -> None:
        self._launcher = launcher
        self.free: dict[int, float] = defaultdict(float)
        self._slot_end: dict[int, float] = defaultdict(float)

    def run(self, parts: Parts, ready_s: float) -> float:
        """Have the parts of a task take their resources; return its end."""
        free, slot_end, ends = self.free, self._slot_end, [ready_s]
        for part, (resource, seconds) in enumerate(parts):
            following = [other for other, _ in parts[part + 1 : part + 2]]
            goes_ahead = resource == self._launcher and any(ready_s <= free[other] for other in following)
            begun = free[resource] if goes_ahead else max(ready_s, free[resource])
            if seconds < 0 and begun < slot_end[resource]:
                ends.append(slot_end[resource] - SLOT_S / 2)
                continue
            if seconds < 0:
                slot_end[resource] = begun + SLOT_S
            free[resource] = begun + abs(seconds)
            ends.append(free[resource])
        return max(ends)


def run_by_ready(contents: Contents, launcher: int | None = None) -> dict[Task, tuple[float, float]]:
    """Return each task's ready and end: first in, first out."""
    tasks = _tasks_of(contents)
    missing = dict.fromkeys(tasks, 0)
    following_of: dict[Task, list[Task]] = defaultdict(list)
    for target, (_, dependencies) in contents.items():
        for block, index, target_index in dependencies:
            missing[target, target_index] += 1
            following_of[block, index].append((target, target_index))
    ready = dict.fromkeys(tasks, 0.0)
    queue = [(0.0, task) for task, count in missing.items() if not count]
    heapq.heapify(queue)
    devices = Devices(launcher)
    times: dict[Task, tuple[float, float]] = {}
    while queue:
        ready_s, task = heapq.heappop(queue)
        end_s = devices.run(tasks[task], ready_s)
        times[task] = ready_s, end_s
        for other in following_of[task]:
            ready[other] = max(ready[other], end_s)
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(queue, (ready[other], other))
    return times


def run_in_turn(
    contents: Contents, order: Sequence[int], is_awaited: Collection[int], launcher: int | None = None
) -> float:
    """Return when all is done if resources take blocks in this order, and tasks of a block by index.

    Of blocks that are not awaited, what begins there is taken in turn, and the rest at last: what has fewer
    than two tasks ahead of it in a row that take anything, and is waited for.
    """
    tasks = _tasks_of(contents)
    sources: dict[Task, list[Task]] = {
        task: [(b, i) for b, i, target in contents[task[0]][1] if target == task[1]] for task in tasks
    }

    def ahead(task: Task) -> int:
        own = [source for source in sources[task] if source[0] == task[0]]
        return max((ahead(source) + bool(tasks[source]) for source in own), default=0)

    def is_late(task: Task) -> bool:
        if task[0] in is_awaited:
            return False
        return ahead(task) >= 2 or not any(
            task in sources[block, i] for block, i in tasks if block == task[0]
        )

    in_turn = [(block, index) for block in order for index in range(len(contents[block][0]))]
    devices, ends = Devices(launcher), dict[Task, float]()
    for task in sorted(in_turn, key=is_late):
        ends[task] = devices.run(tasks[task], max((ends[source] for source in sources[task]), default=0.0))
    return max(devices.free.values(), default=0.0)


def _tasks_of(contents: Contents) -> dict[Task, Parts]:
    return {
        (block, index): task for block, (given, _) in contents.items() for index, task in enumerate(given)
    }


class RandomMoves:
    """A random graph and random changes of it, shaped as a search's: tasks wait for those of their block and
    of a few earlier ones, and what waits for a block that is changed is changed, too.

    Seconds are often equal, and often nothing, so that there are ties. The last of several resources launches
    for the first, or nothing.
    """

    def __init__(self, seed: int, blocks: int, resources: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.blocks, self.resources, self.launcher = blocks, resources, max(1, resources - 1)
        self.sources = [self._drawn_sources(block) for block in range(blocks)]
        self._density = self._rng.uniform(0.05, 0.9)
        self._whole_seconds, self._are_short = self.chance(0.5), self.chance(0.5)
        self.contents: Contents = {}
        self.contents = self._drawn(range(self.blocks), range(self.blocks))
        self._former = self.contents

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def propose(self) -> Contents:
        """Return other contents for a few blocks, and other dependencies for those that wait for them."""
        chosen = set(self._rng.integers(0, self.blocks, self._rng.integers(1, 4)).tolist())
        waiting = {block for block, sources in enumerate(self.sources) if chosen & set(sources)}
        change = self._drawn(sorted(chosen | waiting), chosen)
        self._former = self.contents
        self.contents = self.contents | change
        return change

    def take_back(self) -> None:
        self.contents = self._former

    def _drawn_sources(self, block: int) -> list[int]:
        count = min(block, int(self._rng.integers(0, 4)))
        return sorted(self._rng.choice(block, count, replace=False).tolist()) if count else []

    def _drawn(self, blocks: Iterable[int], chosen: Collection[int]) -> Contents:
        tasks = {block: given for block, (given, _) in self.contents.items()}
        for block in chosen:
            tasks[block] = [self._task() for _ in range(self._rng.integers(0, 7))]
        sizes = {block: len(given) for block, given in tasks.items()}
        return {block: (tasks[block], self._dependencies(block, sizes)) for block in blocks}

    def _task(self) -> Parts:
        count = 1 if self.chance(0.7) else int(self._rng.integers(0, self.launcher + 1))
        resources = self._rng.choice(self.launcher, count, replace=False).tolist()
        if self.launcher < self.resources and 0 in resources and self.chance(0.7):
            resources.insert(resources.index(0), self.launcher)
        elif self.launcher < self.resources and self.chance(0.2):
            resources.append(self.launcher)
        return [(resource, self._seconds()) for resource in resources]

    def _seconds(self) -> float:
        if self.chance(0.2):  # a beginning, of which a slot has several
            return -SLOT_S * float(self._rng.choice([0.1, 0.4, 2.0]))
        unit = SLOT_S if self._are_short else 1.0
        drawn = float(self._rng.integers(0, 4)) if self._whole_seconds else float(self._rng.random())
        return unit * drawn

    def _dependencies(self, block: int, sizes: dict[int, int]) -> list[Dependency]:
        pairs = [
            (source, index, target)
            for source in (*self.sources[block], block)
            for index in range(sizes[source])
            for target in range(sizes[block])
            if source != block or index < target
        ]
        return [pair for pair in pairs if self.chance(self._density)]
