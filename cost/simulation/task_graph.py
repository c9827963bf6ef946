"""A graph of tasks on resources that changes block by block, and the timeline of it.

    graph.replace({block: BlockTasks(...), ...})     a move: other contents for some blocks
    graph.delta()  or  graph.full()                  seconds of a step
    graph.undo()                                     as before the move, timeline included

A block is what a search changes at once: the tasks of an operator group, the transfers between two groups,
the synchronisation of a parameter. Blocks are numbered in the order of the step: a dependency leads from a
task to a later one of its own block, or to a later block. Such a graph has no circles, and the numbers break
ties: of tasks that are ready at the same time, a resource runs the earlier block's first, then by index, so
that a timeline depends on nothing but the contents of the blocks.

A block owns the dependencies that are given with it, whichever tasks they join. When a block is replaced, so
are those that own dependencies on its tasks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from partc.cost.simulation.simulate_tasks import (
    INDEX_MASK,
    STOPPED,
    Bound,
    Heap,
    Journal,
    Timeline,
    busiest_seconds,
    first_place,
    restore,
    resume,
    simulate,
    step_seconds,
)
from partc.cost.simulation.task_arrays import (
    BACKWARD,
    DANGLING,
    FINE,
    INDEX_BITS,
    NONE,
    UNKNOWN_TASK,
    Blocks,
    Change,
    Floats,
    Ints,
    Longs,
    Tasks,
    put_back,
    put_in,
    take_out,
)

FAULTS = {
    DANGLING: "a block that is not replaced owns a dependency on a task that is",
    UNKNOWN_TASK: "a dependency on a task that is not there",
    BACKWARD: "a dependency on a later task: they lead forward, by block, then by index",
}

Array: TypeAlias = NDArray[Any]  # of whichever dtype

# Where less than this share of a timeline stays, full simulation is as quick: it keeps no journal.
LEAST_KEPT = 0.3
# Sums of seconds in another order than the simulation's are wrong by less than this share.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BlockTasks:
    """The contents of a block.

    `resources` int32[n], `seconds` float64[n]: of its tasks. `dependencies` int32[m, 4]: rows of source
    block, source index, target block, target index.
    """

    resources: Ints
    seconds: Floats
    dependencies: Ints


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """When the tasks of a block are ready, start and end: float64[n] seconds each."""

    ready: Floats
    start: Floats
    end: Floats


@dataclass(frozen=True, slots=True)
class Timed:
    """Tasks, int64[n] blocks and indices, and when they are ready, start and end: float64[n] seconds."""

    block: Longs
    index: Longs
    ready: Floats
    start: Floats
    end: Floats


@dataclass(slots=True)
class Spans:
    """Room in arrays that grow, given in spans whose sizes are powers of two."""

    used: int = 0
    free: dict[int, list[int]] = field(default_factory=dict)

    def take(self, size: int) -> int:
        """Return where a span begins that has room for `size`."""
        if size == 0:
            return 0
        exponent = (size - 1).bit_length()
        if spans := self.free.get(exponent):
            return spans.pop()
        self.used += 1 << exponent
        return self.used - (1 << exponent)

    def give_back(self, begin: int, size: int) -> None:
        """Free a span that `take` returned."""
        if size:
            self.free.setdefault((size - 1).bit_length(), []).append(begin)


@dataclass(slots=True)
class Move:
    """A change of the graph that can still be undone."""

    blocks: Ints
    former: Blocks  # spans
    present: Blocks
    changed: int
    was_current: bool
    order: int  # tasks in the former order
    simulated: bool = False
    swapped: bool = False  # the former timeline is the spare one, or else ...
    begin: int | None = None  # ... what it was from this place of the order on is in the journal


class TaskGraph:
    """Tasks in blocks 0 to `blocks` - 1, all empty at first, on `resources` devices and links."""

    def __init__(self, blocks: int, resources: int) -> None:
        self._blocks = Blocks(*(np.zeros(blocks, np.int32) for _ in Blocks._fields))
        self._slots, self._places = Spans(), Spans()
        self._tasks = Tasks(*_empty("i4 f8 i8 i4 i4 i4 u1"))
        self._rows = np.zeros((0, 6), np.int32)
        self._timeline, self._spare = (
            Timeline._make((*_empty("f8 f8 f8 i4 i4"), np.full(resources, NONE))) for _ in range(2)
        )
        self._order, self._other_order, self._waiting, self._changed = _empty("i4 i4 i4 i4")
        self._remaining = np.zeros(resources)
        self._journal = Journal._make((*_empty("f8 f8 f8 i4"), np.zeros(resources, np.int32)))
        self._heap = Heap(*_empty("f8 i8"))
        self._order_length = 0
        self._move: Move | None = None
        self._is_current = False  # whether the timeline is the graph's, but for the last move

    @property
    def tasks(self) -> int:
        """Return how many tasks there are."""
        return int(self._blocks.tasks.sum())

    @property
    def dependencies(self) -> int:
        """Return how many dependencies there are."""
        return int(self._blocks.rows.sum())

    def replace(self, contents: Mapping[int, BlockTasks]) -> None:
        """Give blocks other contents; what was replaced before can no longer be undone.

        Raises ValueError, and changes nothing, where another block owns a dependency on a replaced task, a
        dependency leads backward or to a task that is not there, or a number is out of range.
        """
        chosen = np.array(sorted(contents), np.int32)
        change = self._change(chosen, [contents[block] for block in chosen.tolist()])
        self._accept()
        former = Blocks(*(values[chosen] for values in self._blocks))
        self._make_room()
        fault, changed = take_out(self._tasks, self._rows, self._blocks, chosen, self._changed, 0)
        if fault == FINE:
            fault, changed = put_in(self._tasks, self._rows, self._blocks, change, self._changed, changed)
        self._move = Move(chosen, former, change.spans, changed, self._is_current, self._order_length)
        if fault != FINE:
            self._put_back(self._move, linked=False)
            raise ValueError(FAULTS[fault])

    def full(self, limit_s: float = math.inf) -> float:
        """Simulate every task anew; return the seconds of a step.

        Infinity where they are certainly more than `limit_s`: simulation stops as soon as a resource that
        never waits from there on would end later. Such a move is to be undone.
        """
        move = self._move
        if self._exceeds(limit_s):
            return math.inf
        if move is None or not move.simulated:
            self._swap_orders()
            self._timeline, self._spare = self._spare, self._timeline
        self._order_length = simulate(
            self._tasks,
            self._rows,
            self._blocks,
            self._timeline,
            self._order,
            self._waiting,
            self._heap,
            self._bound(limit_s),
        )
        if move is not None and not move.simulated:
            move.swapped = move.simulated = True
        return self._step_seconds()

    def delta(self, limit_s: float = math.inf) -> float:
        """Simulate what the last move changes; return the seconds of a step as `full` does."""
        move = self._move
        if move is None or move.simulated or not self._is_current:
            return self.full(limit_s)
        if self._exceeds(limit_s):
            return math.inf
        length = self._order_length
        least = math.ceil(LEAST_KEPT * length)
        begin = first_place(
            self._tasks,
            self._rows,
            self._blocks,
            self._timeline,
            self._order[:length],
            move.former,
            self._changed[: move.changed],
            move.blocks,
            least,
        )
        if begin < least:
            return self.full(limit_s)
        self._swap_orders()
        move.begin, move.simulated = begin, True
        self._order_length = resume(
            self._tasks,
            self._rows,
            self._blocks,
            self._timeline,
            self._other_order[:length],
            begin,
            move.blocks,
            self._order,
            self._waiting,
            self._heap,
            self._journal,
            self._bound(limit_s),
        )
        return self._step_seconds()

    def _exceeds(self, limit_s: float) -> bool:
        if limit_s == math.inf:
            return False
        busiest_s = busiest_seconds(self._tasks, self._blocks, self._remaining)
        return bool(busiest_s > self._bound(limit_s).limit_s)

    def _bound(self, limit_s: float) -> Bound:
        return Bound(self._remaining, limit_s * (1 + ROUNDING))

    def _step_seconds(self) -> float:
        self._is_current = self._order_length != STOPPED
        return float(step_seconds(self._timeline)) if self._is_current else math.inf

    def undo(self) -> None:
        """Give the blocks of the last move, and the timeline, their state before it."""
        move = self._move
        if move is None:
            raise ValueError("there is no move to undo")
        if move.simulated:
            self._swap_orders()
        if move.swapped:
            self._timeline, self._spare = self._spare, self._timeline
        self._order_length = move.order
        if move.begin is not None:
            order = self._order[: move.order]
            restore(self._timeline, order, move.begin, self._journal)
        self._is_current = move.was_current
        self._put_back(move, linked=True)

    def _swap_orders(self) -> None:
        self._order, self._other_order = self._other_order, self._order

    def times(self, block: int) -> BlockTimes:
        """Return when the tasks of a block run, as last simulated."""
        begin = self._blocks.task[block]
        span = slice(begin, begin + self._blocks.tasks[block])
        return BlockTimes(*(values[span].copy() for values in self._timeline[:3]))

    def timeline(self) -> Timed:
        """Return when all tasks run, in the order of (ready, block, index)."""
        order = self._order[: self._order_length]
        keys = self._tasks.key[order]
        times = (values[order] for values in self._timeline[:3])
        return Timed(keys >> INDEX_BITS, keys & INDEX_MASK, *times)

    def _change(self, chosen: Ints, contents: list[BlockTasks]) -> Change:
        resources = np.concatenate([block.resources for block in contents], dtype=np.int32)
        seconds = np.concatenate([block.seconds for block in contents], dtype=np.float64)
        dependencies = np.concatenate([block.dependencies for block in contents], dtype=np.int32)
        limit = len(self._timeline.tail)
        if (
            any(len(block.resources) != len(block.seconds) for block in contents)
            or not ((resources >= 0) & (resources < limit)).all()
        ):
            raise ValueError(f"tasks: a resource of 0 to {limit - 1} each")
        if not ((seconds >= 0) & np.isfinite(seconds)).all():
            raise ValueError("tasks: finite seconds, zero or more, each")
        if chosen[0] < 0 or chosen[-1] >= len(self._blocks.task):
            raise ValueError(f"blocks are 0 to {len(self._blocks.task) - 1}")
        tasks = [len(block.seconds) for block in contents]
        rows = [len(block.dependencies) for block in contents]
        spans = Blocks(
            np.array([self._slots.take(size) for size in tasks], np.int32),
            np.array(tasks, np.int32),
            np.array([self._places.take(size) for size in rows], np.int32),
            np.array(rows, np.int32),
        )
        return Change(chosen, spans, resources, seconds, dependencies)

    def _accept(self) -> None:
        if self._move is None:
            return
        self._release(self._move.former)
        self._is_current = self._is_current and self._move.simulated
        self._move = None

    def _put_back(self, move: Move, linked: bool) -> None:
        put_back(self._tasks, self._rows, self._blocks, move.blocks, move.former, linked)
        self._tasks.flags[self._changed[: move.changed]] = 0
        self._release(move.present)
        self._move = None

    def _release(self, spans: Blocks) -> None:
        for begin, size in zip(spans.task.tolist(), spans.tasks.tolist(), strict=True):
            self._slots.give_back(begin, size)
        for begin, size in zip(spans.row.tolist(), spans.rows.tolist(), strict=True):
            self._places.give_back(begin, size)

    def _make_room(self) -> None:
        if self._places.used > len(self._rows):
            self._rows = _enlarged(self._rows, 2 * self._places.used)
        if self._slots.used <= len(self._changed):
            return
        size = 2 * self._slots.used
        self._tasks = Tasks(*(_enlarged(values, size) for values in self._tasks))
        self._timeline, self._spare = (
            Timeline._make((*(_enlarged(values, size) for values in timeline[:-1]), timeline.tail))
            for timeline in (self._timeline, self._spare)
        )
        self._order, self._other_order, self._waiting, self._changed = (
            _enlarged(values, size)
            for values in (self._order, self._other_order, self._waiting, self._changed)
        )
        enlarged = (_enlarged(values, size) for values in self._journal[:-1])
        self._journal = Journal._make((*enlarged, self._journal.tail))
        self._heap = Heap(*(_enlarged(values, size) for values in self._heap))


def _empty(dtypes: str) -> tuple[Array, ...]:
    return tuple(np.zeros(0, dtype) for dtype in dtypes.split())


def _enlarged(values: Array, size: int) -> Array:
    result = np.zeros((size, *values.shape[1:]), values.dtype)
    result[: len(values)] = values
    return result
