"""A graph of tasks on resources that changes block by block, and the timeline of it.

    graph = TaskGraph(sources, resources)            sources: of each block, those that it may wait for
    graph.replace({block: BlockTasks(...), ...})     a move: other contents for some blocks
    graph.delta()  or  graph.full()                  seconds of a step
    graph.undo()                                     as before the move, timeline included

A block is what a search changes at once: the tasks of an operator group, the transfers of a tensor, the
synchronisation of a parameter. Blocks are numbered in the order of the step, and wait for earlier ones. Such
a graph has no circles, and the numbers break ties: of tasks that are ready at the same time, a resource runs
the earlier block's first, then by index, so that a timeline depends on nothing but the blocks' contents.

What tasks wait for is found from the blocks that they wait for. Replacing a block is writing the number of
its content, and those of its links with other blocks: what is alike is written once. Who makes blocks of
parts that are known (partc.compiler.task_graphs) adds contents and links, and puts in their numbers itself.
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
from partc.cost.simulation.step_in_order import step_in_order
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
    FlatGraph,
    Floats,
    Ints,
    Links,
    Longs,
    add_work,
    check,
    find_missing,
    place_blocks,
    waiting_of,
    write_content,
    write_links,
)

FAULTS = {
    PARTS: "as many resources and seconds as tasks have parts",
    RESOURCE: "a resource is not there",
    SECONDS: "finite seconds for each part",
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
    resources     int32[p], `seconds` float64[p]: of the parts of all tasks, one behind the other; negative
                  are those of a beginning, which a resource shares with others of its slot
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

    is_changed: Ints  # by block
    former: FlatGraph
    work: Floats
    was_current: bool
    order: int  # tasks in the former order
    simulated: bool = False  # the former timeline is the spare one


class TaskGraph:
    """Tasks in blocks, all empty at first, on `resources` devices and links.

    sources    of each block, the earlier blocks that its tasks may wait for, by slot
    launchers  the resources from this one on are hosts that launch what the next part of a task computes, if
               it has one
    order      of all blocks, int32[n], each behind those that it waits for, if there is such: a step is as
               quick as where resources take tasks in it, or begin what is ready first, whichever is quicker
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        resources: int,
        launchers: int | None = None,
        order: Ints | None = None,
    ) -> None:
        blocks = len(sources)
        if any(not 0 <= source < block for block, own in enumerate(sources) for source in own):
            raise ValueError("blocks wait for earlier ones")
        self.waiting = waiting_of(sources)
        # Of content 0, which has no tasks, all numbers are zero: nothing is compiled before there is another.
        self.contents = Contents._make((*_zeros("i4 i4 i4 i4 i4 f8 i4", 2), np.array([1, 0, 0, 0])))
        self.links = Links._make((*_zeros("i4 i4 i4 i8 i8 i4", 2), np.array([1, 1, 0])))
        self.now = FlatGraph(np.zeros(blocks, np.int32), np.zeros(len(self.waiting.block), np.int32))
        self._known: dict[int, BlockTasks] = {0: NO_TASKS}  # by the numbers of their contents
        self._written: dict[BlockTasks, tuple[int, Ints]] = {}
        self._resources, self._block_order = resources, order
        self._work = np.zeros(resources)
        self._timeline, self._spare = (
            TaskTimes(np.zeros(blocks + 1, np.int32), *_zeros("f8 f8 i8")) for _ in range(2)
        )
        self._room = Room._make(
            (
                *_zeros("i4 i4"),
                np.zeros(blocks, np.int32),
                *(np.zeros(resources) for _ in ("free", "remaining", "slot_end")),
                *_zeros("f8 i8"),
                resources if launchers is None else launchers,
            )
        )
        self._all = np.ones(blocks, np.int32)
        self._order_length = 0
        self._move: UndoableEdit | None = None
        self._is_current = False  # whether the timeline is the graph's, but for the last move

    @property
    def tasks(self) -> int:
        """Return how many tasks there are."""
        content, first = self.now.content, self.contents.task
        return int((first[content + 1] - first[content]).sum())

    @property
    def dependencies(self) -> int:
        """Return how many dependencies there are."""
        (content, link), contents, links = self.now, self.contents, self.links
        own = contents.successor[contents.task[content + 1]] - contents.successor[contents.task[content]]
        ends = links.target_begin[links.bound[link] + links.sources[link]]
        return int(own.sum() + (ends - links.target_begin[links.bound[link]]).sum())

    def replace(self, contents: Mapping[int, BlockTasks]) -> None:
        """Give blocks other contents; what was replaced before can no longer be undone.

        Raises ValueError, and changes nothing, where a block waits for a task that is not there, or a number
        is out of range.
        """
        chosen = np.array(sorted(contents), np.int32)
        if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < len(self.now.content):
            raise ValueError(f"blocks are 0 to {len(self.now.content) - 1}")
        self._know(contents)
        former = self.now
        self.now = FlatGraph(former.content.copy(), former.link.copy())
        for block in chosen.tolist():
            number, links = self._written[contents[block]]
            entries = self._entries(block)
            self.now.content[block], self.now.link[entries] = number, 0
            self.now.link[entries[: len(links)]] = links
        missing = find_missing(self.contents, self.links, self.now, self.waiting, chosen)
        if missing != NONE:
            self.now = former
            raise ValueError(f"block {missing}: {FAULTS[UNKNOWN_TASK]}")
        is_changed = np.zeros(len(self.now.content), np.int32)
        is_changed[chosen] = 1
        self.change(former, is_changed)

    def change(self, former: FlatGraph, is_changed: Ints) -> None:
        """Note that `now` has been changed; what was changed before can no longer be undone.

        former      what `now` was before, which nobody writes to any more
        is_changed  of each block, 1 where its content, or what it waits for, is another: int32[blocks]
        """
        if self._move is not None:
            self._is_current = self._is_current and self._move.simulated
        self._move = UndoableEdit(is_changed, former, self._work.copy(), self._is_current, self._order_length)
        add_work(self.contents, former.content, self.now.content, self._work)

    def add_content(self, parts: Ints, resources: Ints, seconds: Floats, pairs: Ints) -> int:
        """Return the number of a new content. `pairs`: int32[m, 2], indices of which one waits for the other.

        It is not checked, but for lengths by whoever made it: see BlockTasks.
        """
        used, tasks = self.contents.used.tolist(), len(parts)
        needed = (
            used[0] + 2,
            *(used[1] + tasks + 1,) * 3,
            *(used[2] + len(resources),) * 2,
            used[3] + len(pairs),
        )
        self.contents = Contents._make(_all_with_room(self.contents, needed))
        return write_content(self.contents, parts, resources, seconds, pairs)

    def add_links(self, sources: Ints, targets: Ints) -> int:
        """Return the number of new links: tasks of one block, and those of another that wait for them."""
        if not len(sources):
            return 0
        self.have_room(int(sources.max() - sources.min()) + 2, len(sources))
        return write_links(self.links, sources, targets)

    def have_room(self, bounds: int, targets: int) -> None:
        """Have room for further links, with so many bounds and targets."""
        used = self.links.used.tolist()
        needed = *(used[0] + bounds,) * 4, used[1] + bounds, used[2] + targets
        self.links = Links._make(_all_with_room(self.links, needed))

    def forget(self) -> None:
        """Forget all contents and links, and what was simulated: all blocks are empty."""
        self.contents.used[:], self.links.used[:] = (1, 0, 0, 0), (1, 1, 0)
        self.now = FlatGraph(np.zeros_like(self.now.content), np.zeros_like(self.now.link))
        self._known, self._written = {0: NO_TASKS}, {}
        self._work[:], self._order_length, self._is_current, self._move = 0.0, 0, False, None

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
        self._make_room(place_blocks(self.contents, self.now.content, self._timeline.offset))
        if keeps and move is not None:
            former, is_changed = self._spare.order[: move.order], move.is_changed
        else:
            former, is_changed = self._spare.order[:0], self._all
        flat = self.contents, self.links, self.now, self.waiting, self._work, self._timeline, self._room
        in_order_s = math.inf
        if self._block_order is not None:
            in_order_s = step_in_order(*flat, self._block_order, limit_s)
            limit_s = min(limit_s, in_order_s * (1 + ROUNDING))
        self._order_length = simulate(*flat, former, is_changed, self._all, limit_s)
        if move is not None:
            move.simulated = True
        self._is_current = self._order_length != STOPPED
        queued_s = float(self._room.free.max(initial=0.0)) if self._is_current else math.inf
        return min(in_order_s, queued_s)

    def undo(self) -> None:
        """Give the blocks of the last move, and the timeline, their state before it."""
        move = self._move
        if move is None:
            raise ValueError("there is no move to undo")
        if move.simulated:
            self._swap_timelines()
        self.now = move.former
        self._work[:] = move.work
        self._order_length, self._is_current, self._move = move.order, move.was_current, None

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

    def _entries(self, block: int) -> Ints:
        """Return a block's entries, by slot."""
        begin, end = self.waiting.source_begin[block : block + 2]
        return self.waiting.entry[begin:end]

    def _know(self, contents: Mapping[int, BlockTasks]) -> None:
        """Write the contents that are new, unless one of them is wrong."""
        new = [(block, own) for block, own in contents.items() if own not in self._written]
        if len(self._written) + len(new) > MOST_CONTENTS:
            self._forget_absent()
            new = [(block, own) for block, own in contents.items() if own not in self._written]
        for block, own in new:
            fields = own.parts, own.resources, own.seconds, own.dependencies
            if (fault := check(*fields, len(self._entries(block)), self._resources)) != FINE:
                raise ValueError(FAULTS[fault])
        for _, own in new:
            self._write(own)

    def _write(self, own: BlockTasks) -> None:
        if own not in self._written:
            rows = own.dependencies
            within = rows[rows[:, 0] == OWN, 1:]
            number = self.add_content(own.parts, own.resources, own.seconds, np.ascontiguousarray(within))
            of_slots = [rows[rows[:, 0] == slot] for slot in range(int(rows[:, 0].max(initial=OWN)) + 1)]
            links = [self.add_links(each[:, 1].copy(), each[:, 2].copy()) for each in of_slots]
            self._written[own], self._known[number] = (number, np.array(links, np.int32)), own

    def _forget_absent(self) -> None:
        """Forget the contents that no block has. There is no move that could be undone then."""
        present = [self._known[number] for number in self.now.content.tolist()]
        work, length, is_current = self._work.copy(), self._order_length, self._is_current
        if self._move is not None:
            is_current = is_current and self._move.simulated
        self.forget()
        for block, own in enumerate(present):
            self._write(own)
            number, links = self._written[own]
            self.now.content[block], self.now.link[self._entries(block)[: len(links)]] = number, links
        self._work, self._order_length, self._is_current = work, length, is_current

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
            [_with_room(values, tasks) for values in fields] for fields in (room[:2], room[6:8])
        )
        self._room = Room._make((*by_place, *room[2:6], *queue, room.launchers))


def _zeros(dtypes: str, size: int = 0) -> tuple[Array, ...]:
    return tuple(np.zeros(size, dtype) for dtype in dtypes.split())


def _all_with_room(arrays: tuple[Array, ...], sizes: Sequence[int]) -> tuple[Array, ...]:
    """Return arrays with so many entries at least, all but the last."""
    return (*(_with_room(values, size) for values, size in zip(arrays[:-1], sizes, strict=True)), arrays[-1])


def _with_room(values: Array, size: int) -> Array:
    """Return values in an array of `size` entries at least."""
    if size <= len(values):
        return values
    result = np.zeros(2 * size, values.dtype)
    result[: len(values)] = values
    return result


NO_TASKS = BlockTasks(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0), np.zeros((0, 3), np.int32))


def compile_simulation() -> None:
    """Compile all that a graph of tasks calls, if this process has not done so: it takes some seconds."""
    task, forward = np.zeros(1, np.int32), np.array([[0, 0, 0]], np.int32)
    content = BlockTasks(task + 1, task, np.ones(1), forward)
    graph = TaskGraph([[], [0]], 1, order=np.arange(2, dtype=np.int32))
    graph.replace({0: replace(content, dependencies=forward[:0]), 1: content})
    graph.delta()
