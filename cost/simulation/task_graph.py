"""A graph of tasks on resources that changes block by block, and the timeline of it.

    graph = TaskGraph(sources, resources)            sources: of each block, those that it may wait for
    graph.replace({block: BlockTasks(...), ...})     a move: other contents for some blocks
    graph.delta()  or  graph.full()                  seconds of a step
    graph.undo()                                     as before the move, timeline included

A block is what a search changes at once: the tasks of an operator group, the transfers of a tensor, the
synchronisation of a parameter. Blocks are numbered in the order of the step, and wait for earlier ones. Such
a graph has no circles, and the numbers break ties: of tasks that are ready at the same time, a resource runs
the earlier block's first, then by index, so that a timeline depends on nothing but the blocks' contents.

What a block's tasks wait for is part of its content. So are what tasks of other blocks wait for of theirs:
replacing a block is writing one number, and blocks that are alike have one content.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from partc.cost.simulation.simulate_tasks import (
    INDEX_BITS,
    INDEX_MASK,
    STOPPED,
    Room,
    TaskTimes,
    simulate,
)
from partc.cost.simulation.task_arrays import (
    BACKWARD,
    FINE,
    NONE,
    OWN,
    PARTS,
    RESOURCE,
    SECONDS,
    UNKNOWN_SLOT,
    UNKNOWN_TASK,
    Contents,
    Floats,
    Ints,
    Longs,
    Used,
    Waiting,
    add_work,
    check,
    find_missing,
    place_blocks,
    write,
)

FAULTS = {
    PARTS: "as many resources and seconds as tasks have parts",
    RESOURCE: "a resource is not there",
    SECONDS: "finite seconds, zero or more, for each part",
    UNKNOWN_SLOT: "a dependency on a block that is not among the sources",
    UNKNOWN_TASK: "a dependency on a task that is not there",
    BACKWARD: "a dependency on a later task: they lead forward, by index",
}

Array: TypeAlias = NDArray[Any]  # of whichever dtype

# Contents that are remembered; beyond that, those that no block has are forgotten.
MOST_CONTENTS = 50_000
# Sums of seconds in another order than the simulation's are wrong by less than this share.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class BlockTasks:
    """The contents of a block, or of several that are alike.

    parts         int32[n]: how many resources each task takes; it ends when it has ended on all of them
    resources     int32[p], `seconds` float64[p]: of the parts of all tasks, one behind the other
    dependencies  int32[m, 3]: rows of slot, source index, target index. A slot is the number of a block among
                  the sources of this one, OWN this block itself; the target is this block's
    """

    parts: Ints
    resources: Ints
    seconds: Floats
    dependencies: Ints


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """When the tasks of a block are ready, and end: float64[n] seconds each."""

    ready: Floats
    end: Floats


@dataclass(frozen=True, slots=True)
class Timed:
    """Tasks, int64[n] blocks and indices, and when they are ready, and end: float64[n] seconds."""

    block: Longs
    index: Longs
    ready: Floats
    end: Floats


@dataclass(slots=True)
class UndoableEdit:
    """A change of the graph that can still be undone. `work`: by resource, before it."""

    blocks: Ints
    former: Ints  # contents
    work: Floats
    was_current: bool
    order: int  # tasks in the former order
    simulated: bool = False  # the former timeline is the spare one


class TaskGraph:
    """Tasks in blocks, all empty at first, on `resources` devices and links.

    sources    of each block, the earlier blocks that its tasks may wait for, by slot
    launchers  the resources from this one on are hosts that launch what the next part of a task computes
    """

    def __init__(
        self, sources: Sequence[Sequence[int]], resources: int, launchers: int | None = None
    ) -> None:
        blocks = len(sources)
        if any(not 0 <= source < block for block, own in enumerate(sources) for source in own):
            raise ValueError("blocks wait for earlier ones")
        self._waiting = _waiting_of(sources)
        # Of content 0, which has no tasks, all numbers are zero: nothing is compiled before there is another.
        self._contents = Contents(*_zeros("i4 i4 i4 i4 i4 i4 f8 i4 i4 i4 i4 i4 i4", 2))
        self._used = Used(*(np.zeros(1, np.int64) for _ in Used._fields))
        self._used.contents[0] = 1
        self._known: list[BlockTasks] = [NO_TASKS]  # by number
        self._numbers: dict[BlockTasks, int] = {NO_TASKS: 0}
        self._resources = resources
        self._sources = np.array([len(own) for own in sources], np.int32)
        self._content = np.zeros(blocks, np.int32)
        self._work = np.zeros(resources)
        self._timeline, self._spare = (
            TaskTimes(np.zeros(blocks + 1, np.int32), *_zeros("f8 f8 i8")) for _ in range(2)
        )
        self._room = Room._make(
            (
                *_zeros("i4 i4"),
                np.zeros(blocks, np.int32),
                *(np.zeros(resources) for _ in ("free", "remaining")),
                *_zeros("f8 i8"),
                resources if launchers is None else launchers,
            )
        )
        self._is_changed = np.zeros(blocks, np.int32)
        self._all = np.ones(blocks, np.int32)
        self._order_length = 0
        self._move: UndoableEdit | None = None
        self._is_current = False  # whether the timeline is the graph's, but for the last move

    @property
    def tasks(self) -> int:
        """Return how many tasks there are."""
        return int((self._contents.task[self._content + 1] - self._contents.task[self._content]).sum())

    @property
    def dependencies(self) -> int:
        """Return how many dependencies there are."""
        return sum(len(self._known[number].dependencies) for number in self._content.tolist())

    def replace(self, contents: Mapping[int, BlockTasks]) -> None:
        """Give blocks other contents; what was replaced before can no longer be undone.

        Raises ValueError, and changes nothing, where a block waits for a task that is not there, or a number
        is out of range.
        """
        chosen = np.array(sorted(contents), np.int32)
        if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < len(self._content):
            raise ValueError(f"blocks are 0 to {len(self._content) - 1}")
        self._accept()
        new_contents = [contents[block] for block in chosen.tolist()]
        numbers = self._written(new_contents, self._sources[chosen].tolist())
        move = UndoableEdit(
            chosen, self._content[chosen], self._work.copy(), self._is_current, self._order_length
        )
        self._content[chosen] = numbers
        missing = find_missing(self._contents, self._content, self._waiting, chosen)
        if missing != NONE:
            self._content[chosen] = move.former
            raise ValueError(f"block {missing}: {FAULTS[UNKNOWN_TASK]}")
        self._move = move
        add_work(self._contents, move.former, -1.0, self._work)
        add_work(self._contents, numbers, 1.0, self._work)

    def full(self, limit_s: float = math.inf) -> float:
        """Simulate every task anew; return the seconds of a step.

        Infinity where they are certainly more than `limit_s`: simulation stops as soon as a resource that
        never waits from there on would end later. Such a move is to be undone.
        """
        return self._simulate(limit_s, keeps=False)

    def delta(self, limit_s: float = math.inf) -> float:
        """Simulate what the last move changes; return the seconds of a step as `full` does."""
        move = self._move
        return self._simulate(limit_s, move is not None and not move.simulated and self._is_current)

    def _simulate(self, limit_s: float, keeps: bool) -> float:
        move, limit_s = self._move, limit_s * (1 + ROUNDING)
        if self._work.max(initial=0.0) > limit_s:
            return math.inf
        if move is None or not move.simulated:
            self._swap_timelines()
        self._make_room(place_blocks(self._contents, self._content, self._timeline.offset))
        if keeps and move is not None:
            former, is_changed = self._spare.order[: move.order], self._is_changed
            is_changed[move.blocks] = 1
        else:
            former, is_changed = self._spare.order[:0], self._all
        self._order_length = simulate(
            self._contents,
            self._content,
            self._waiting,
            self._work,
            self._timeline,
            self._room,
            former,
            is_changed,
            self._all,
            limit_s,
        )
        if move is not None:
            self._is_changed[move.blocks] = 0
            move.simulated = True
        self._is_current = self._order_length != STOPPED
        return float(self._room.free.max(initial=0.0)) if self._is_current else math.inf

    def undo(self) -> None:
        """Give the blocks of the last move, and the timeline, their state before it."""
        move = self._move
        if move is None:
            raise ValueError("there is no move to undo")
        if move.simulated:
            self._swap_timelines()
        self._content[move.blocks] = move.former
        self._work[:] = move.work
        self._order_length, self._is_current, self._move = move.order, move.was_current, None

    def _accept(self) -> None:
        if self._move is not None:
            self._is_current = self._is_current and self._move.simulated
            self._move = None

    def _swap_timelines(self) -> None:
        self._timeline, self._spare = self._spare, self._timeline

    def times(self, block: int) -> BlockTimes:
        """Return when the tasks of a block run, as last simulated."""
        begin, end = self._timeline.offset[block : block + 2]
        return BlockTimes(self._timeline.ready[begin:end].copy(), self._timeline.end[begin:end].copy())

    def timeline(self) -> Timed:
        """Return when all tasks run, in the order of (ready, block, index)."""
        keys = self._timeline.order[: self._order_length]
        block, index = keys >> INDEX_BITS, keys & INDEX_MASK
        places = self._timeline.offset[block] + index
        return Timed(block, index, self._timeline.ready[places], self._timeline.end[places])

    def _written(self, new_contents: Sequence[BlockTasks], sources: Sequence[int]) -> Ints:
        """Return the numbers of contents of blocks with so many sources; write those that are new."""
        new = [content for content in dict.fromkeys(new_contents) if content not in self._numbers]
        if len(self._known) + len(new) > MOST_CONTENTS:
            self._forget()
            new = [content for content in dict.fromkeys(new_contents) if content not in self._numbers]
        allowed = dict(zip(new_contents, sources, strict=True))
        for content in new:
            fields = content.parts, content.resources, content.seconds, content.dependencies
            if (fault := check(*fields, allowed[content], self._resources)) != FINE:
                raise ValueError(FAULTS[fault])
        for content in new:
            self._write(content)
        return np.array([self._numbers[content] for content in new_contents], np.int32)

    def _write(self, content: BlockTasks) -> None:
        used, rows = self._used, content.dependencies
        slots = int(rows[:, 0].max(initial=OWN)) + 1
        bounds = slots * (int(rows[:, 1].max(initial=0)) + 2)
        needed = (
            *(int(used.contents[0]) + 2,) * 2,  # `task` and `slot` are by content
            *(int(used.tasks[0]) + len(content.parts) + 1,) * 3,
            *(int(used.parts[0]) + len(content.resources),) * 2,
            int(used.followers[0]) + len(rows),
            *(int(used.slots[0]) + slots + 1,) * 3,
            int(used.bounds[0]) + bounds,
            int(used.links[0]) + len(rows),
        )
        arrays: tuple[Array, ...] = self._contents
        sized = zip(arrays, needed, strict=True)
        self._contents = Contents._make(_with_room(values, size) for values, size in sized)
        fields = content.parts, content.resources, content.seconds, content.dependencies
        self._numbers[content] = write(self._contents, used, *fields)
        self._known.append(content)

    def _forget(self) -> None:
        """Forget the contents that no block has. There is no move that could be undone."""
        present, self._content[:] = np.unique(self._content, return_inverse=True)
        remaining = [self._known[number] for number in present.tolist()]
        self._known, self._numbers = [], {}
        for used in self._used:
            used[0] = 0
        for content in remaining:
            self._write(content)

    def _make_room(self, tasks: int) -> None:
        """Have room for a timeline of so many tasks."""
        if tasks <= len(self._room.waiting):
            return
        timelines = []
        for timeline in (self._timeline, self._spare):
            timelines.append(TaskTimes(timeline.offset, *(_with_room(v, tasks) for v in timeline[1:])))
        self._timeline, self._spare = timelines
        room = self._room
        by_place, queue = (
            [_with_room(values, tasks) for values in fields] for fields in (room[:2], room[5:7])
        )
        self._room = Room._make((*by_place, *room[2:5], *queue, room.launchers))


def _waiting_of(sources: Sequence[Sequence[int]]) -> Waiting:
    """Return who waits for whom in flat arrays."""
    waiting: list[list[tuple[int, int]]] = [[] for _ in sources]
    for block, own in enumerate(sources):
        for slot, source in enumerate(own):
            waiting[source].append((block, slot))
    pairs = np.array([pair for each in waiting for pair in each], np.int32).reshape(-1, 2)
    return Waiting(
        np.cumsum([0, *map(len, waiting)], dtype=np.int32),
        pairs[:, 0].copy(),
        pairs[:, 1].copy(),
        np.cumsum([0, *map(len, sources)], dtype=np.int32),
        np.array([source for own in sources for source in own], np.int32),
    )


def _zeros(dtypes: str, size: int = 0) -> tuple[Array, ...]:
    return tuple(np.zeros(size, dtype) for dtype in dtypes.split())


def _with_room(values: Array, size: int) -> Array:
    """Return values in an array of `size` entries at least."""
    if size <= len(values):
        return values
    result = np.zeros(2 * size, values.dtype)
    result[: len(values)] = values
    return result


NO_TASKS = BlockTasks(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0), np.zeros((0, 3), np.int32))


def compile_kernels() -> None:
    """Compile all that a graph of tasks calls, if this process has not done so: it takes some seconds."""
    task, forward = np.zeros(1, np.int32), np.array([[0, 0, 0]], np.int32)
    content = BlockTasks(task + 1, task, np.ones(1), forward)
    graph = TaskGraph([[], [0]], 1)
    graph.replace({0: replace(content, dependencies=forward[:0]), 1: content})
    graph.delta()
