"""Full simulation: every task of a graph from nothing (FlexFlow, arXiv:1807.05358, algorithm 1).

    ready  when the last predecessor ends
    start  when it is ready and its resource has ended the task before
    end    start + seconds

A resource runs its tasks in the order of (ready, key). Keys ascend along dependencies, so a task's pair is
greater than its predecessors' even where tasks take no time, and these rules allow one timeline only.
"""

from typing import NamedTuple

import numpy as np

from partc.cost.simulation.task_arrays import (
    INDEX_BITS,
    NEXT_OUT,
    NONE,
    TARGET,
    Blocks,
    Floats,
    Ints,
    Longs,
    Tasks,
    compiled,
)

STOPPED = -1
INDEX_MASK = np.int64((1 << INDEX_BITS) - 1)


class Timeline(NamedTuple):
    """When tasks run, by slot, and the last task of each resource."""

    ready: Floats
    start: Floats
    end: Floats
    previous: Ints  # the task before it on its resource
    position: Ints  # its place in the order of simulation
    tail: Ints  # by resource


class Bound(NamedTuple):
    """What a step takes at least: the end of each resource's last task, and what remains to it."""

    remaining: Floats  # by resource
    limit_s: float  # simulation stops once a step must take longer


class Heap(NamedTuple):
    """Pairs of ready time and key, the least first."""

    ready: Floats
    key: Longs


@compiled
def push(heap: Heap, size: int, ready: float, key: int) -> None:
    """Add a pair to a heap of `size` pairs."""
    hole = size
    while hole > 0:
        above = (hole - 1) >> 1
        if heap.ready[above] < ready or (heap.ready[above] == ready and heap.key[above] <= key):
            break
        heap.ready[hole], heap.key[hole] = heap.ready[above], heap.key[above]
        hole = above
    heap.ready[hole], heap.key[hole] = ready, key


@compiled
def drop_least(heap: Heap, size: int) -> None:
    """Take the first pair from a heap of `size` pairs."""
    last = size - 1
    ready, key = heap.ready[last], heap.key[last]
    hole = 0
    while True:
        below = 2 * hole + 1
        if below >= last:
            break
        other = below + 1
        if other < last and (
            heap.ready[other] < heap.ready[below]
            or (heap.ready[other] == heap.ready[below] and heap.key[other] < heap.key[below])
        ):
            below = other
        if ready < heap.ready[below] or (ready == heap.ready[below] and key <= heap.key[below]):
            break
        heap.ready[hole], heap.key[hole] = heap.ready[below], heap.key[below]
        hole = below
    heap.ready[hole], heap.key[hole] = ready, key


@compiled
def slot_of(blocks: Blocks, key: int) -> int:
    """Return the slot of the task that has `key`."""
    return blocks.task[key >> INDEX_BITS] + (key & INDEX_MASK)


@compiled
def simulate(
    tasks: Tasks,
    rows: Ints,
    blocks: Blocks,
    timeline: Timeline,
    order: Ints,
    waiting: Ints,
    heap: Heap,
    bound: Bound,
) -> int:
    """Fill `timeline`, and `order` with the tasks as they were simulated.

    `waiting` and `heap` are room to work in. Returns how many tasks there are, or STOPPED.
    """
    timeline.tail[:] = NONE
    bound.remaining[:] = 0.0
    size = 0
    for block in range(len(blocks.task)):
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            tasks.flags[task] = 0
            timeline.ready[task] = 0.0
            bound.remaining[tasks.resource[task]] += tasks.seconds[task]
            waiting[task] = tasks.predecessors[task]
            if waiting[task] == 0:
                push(heap, size, 0.0, tasks.key[task])
                size += 1
    return run_queue(tasks, rows, blocks, timeline, order, 0, waiting, heap, size, bound)


@compiled
def run_queue(
    tasks: Tasks,
    rows: Ints,
    blocks: Blocks,
    timeline: Timeline,
    order: Ints,
    count: int,
    waiting: Ints,
    heap: Heap,
    size: int,
    bound: Bound,
) -> int:
    """Run what is queued, and what becomes ready by that, behind the first `count` tasks of `order`.

    Returns how many tasks `order` has then, or STOPPED.
    """
    while size:
        task = slot_of(blocks, heap.key[0])
        drop_least(heap, size)
        size -= 1
        resource = tasks.resource[task]
        previous = timeline.tail[resource]
        start = timeline.ready[task]
        if previous != NONE:
            start = max(start, timeline.end[previous])
        end = start + tasks.seconds[task]
        bound.remaining[resource] -= tasks.seconds[task]
        if end + bound.remaining[resource] > bound.limit_s:
            return STOPPED
        timeline.start[task], timeline.end[task], timeline.previous[task] = start, end, previous
        timeline.tail[resource] = task
        timeline.position[task] = count
        order[count] = task
        count += 1
        row = tasks.first_out[task]
        while row != NONE:
            target = rows[row, TARGET]
            timeline.ready[target] = max(timeline.ready[target], end)
            waiting[target] -= 1
            if waiting[target] == 0:
                push(heap, size, timeline.ready[target], tasks.key[target])
                size += 1
            row = rows[row, NEXT_OUT]
    return count


@compiled
def step_seconds(timeline: Timeline) -> float:
    """Return the end of the last task."""
    seconds = 0.0
    for task in timeline.tail:
        if task != NONE:
            seconds = max(seconds, timeline.end[task])
    return seconds


@compiled
def busiest_seconds(tasks: Tasks, blocks: Blocks, work: Floats) -> float:
    """Return the seconds of the resource that has most to do; `work` is room, by resource."""
    work[:] = 0.0
    for block in range(len(blocks.task)):
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            work[tasks.resource[task]] += tasks.seconds[task]
    return work.max()
