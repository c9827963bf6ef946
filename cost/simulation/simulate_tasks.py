"""Full and delta simulation of a task graph (FlexFlow, arXiv:1807.05358, algorithms 1 and 2), with one queue.

    ready  when the last predecessor ends
    start  when it is ready and its resource has ended the task before
    end    start + seconds

A resource runs its tasks in the order of (ready, key). Keys ascend along dependencies, so a task's pair is
greater than its predecessors' even where tasks take no time, and these rules allow one timeline only.

Full simulation runs tasks by (ready, key), and writes the order. A change touches nothing before the first
place where a task is removed, or where one that is new, or has other predecessors, belongs. Delta simulation
keeps what was simulated up to there, and goes on from there with the same code, to the same bits.
"""

from typing import NamedTuple

import numpy as np

from partc.cost.simulation.task_arrays import (
    INDEX_BITS,
    NEXT_IN,
    NEXT_OUT,
    NONE,
    NOWHERE,
    REMOVED,
    SOURCE,
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


class Journal(NamedTuple):
    """What a timeline said of the tasks that were simulated again, in the order of then."""

    ready: Floats
    start: Floats
    end: Floats
    previous: Ints
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
def replace_least(heap: Heap, size: int, ready: float, key: int) -> None:
    """Put a pair in the place of the first one of a heap of `size` pairs."""
    hole = 0
    while True:
        below = 2 * hole + 1
        if below >= size:
            break
        other = below + 1
        if other < size and (
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
    return int(blocks.task[key >> INDEX_BITS] + (key & INDEX_MASK))


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
        has_left = False  # its place in the queue is given to the first task that it makes ready
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
            if waiting[target] == 0 and has_left:
                push(heap, size, timeline.ready[target], tasks.key[target])
                size += 1
            elif waiting[target] == 0:
                replace_least(heap, size, timeline.ready[target], tasks.key[target])
                has_left = True
            row = rows[row, NEXT_OUT]
        if not has_left:
            size -= 1
            replace_least(heap, size, heap.ready[size], heap.key[size])
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
    return float(work.max())


@compiled
def first_place(
    tasks: Tasks,
    rows: Ints,
    blocks: Blocks,
    timeline: Timeline,
    order: Ints,
    removed: Blocks,
    changed: Ints,
    new: Ints,
    least: int,
) -> int:
    """Return the first place of a former `order` that a change touches, or any that is less than `least`.

    `removed`: where tasks were that are gone. `changed`: tasks that have other predecessors than before.
    `new`: blocks whose tasks are new.
    """
    begin = len(order)
    for which in range(len(removed.task)):
        for task in range(removed.task[which], removed.task[which] + removed.tasks[which]):
            begin = min(begin, timeline.position[task])
    for task in changed:
        begin = min(begin, timeline.position[task])
    if begin < least:
        return begin
    for block in new:
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            timeline.position[task] = NOWHERE
    first = begin
    for task in changed:
        first = min(first, place_of(tasks, rows, timeline, order, begin, task))
    for block in new:
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            first = min(first, place_of(tasks, rows, timeline, order, begin, task))
    return first


@compiled
def place_of(tasks: Tasks, rows: Ints, timeline: Timeline, order: Ints, begin: int, task: int) -> int:
    """Return where a task belongs among the first `begin` of an order, by (ready, key); or `begin`."""
    ready = 0.0
    row = tasks.first_in[task]
    while row != NONE:
        source = rows[row, SOURCE]
        if timeline.position[source] >= begin:
            return begin
        ready = max(ready, timeline.end[source])
        row = rows[row, NEXT_IN]
    low, high = 0, begin
    while low < high:
        middle = (low + high) >> 1
        other = order[middle]
        if timeline.ready[other] < ready or (
            timeline.ready[other] == ready and tasks.key[other] < tasks.key[task]
        ):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def resume(
    tasks: Tasks,
    rows: Ints,
    blocks: Blocks,
    timeline: Timeline,
    former: Ints,
    begin: int,
    new: Ints,
    order: Ints,
    waiting: Ints,
    heap: Heap,
    journal: Journal,
    bound: Bound,
) -> int:
    """Simulate from the place `begin` of the `former` order on.

    Returns how many tasks `order` has then, or STOPPED.
    """
    bound.remaining[:] = 0.0
    order[:begin] = former[:begin]
    journal.tail[:] = timeline.tail
    size = 0
    for place in range(len(former) - 1, begin - 1, -1):
        task = former[place]
        entry = place - begin
        journal.ready[entry], journal.start[entry] = timeline.ready[task], timeline.start[task]
        journal.end[entry], journal.previous[entry] = timeline.end[task], timeline.previous[task]
        timeline.tail[tasks.resource[task]] = timeline.previous[task]
        if not tasks.flags[task] & REMOVED:
            bound.remaining[tasks.resource[task]] += tasks.seconds[task]
            size = await_predecessors(tasks, rows, timeline, begin, task, waiting, heap, size)
    for block in new:
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            bound.remaining[tasks.resource[task]] += tasks.seconds[task]
            size = await_predecessors(tasks, rows, timeline, begin, task, waiting, heap, size)
    return run_queue(tasks, rows, blocks, timeline, order, begin, waiting, heap, size, bound)


@compiled
def await_predecessors(
    tasks: Tasks,
    rows: Ints,
    timeline: Timeline,
    begin: int,
    task: int,
    waiting: Ints,
    heap: Heap,
    size: int,
) -> int:
    """Count the predecessors that are yet to be simulated; queue a task without. Return the queue's size."""
    ready, count = 0.0, 0
    row = tasks.first_in[task]
    while row != NONE:
        source = rows[row, SOURCE]
        if timeline.position[source] >= begin:
            count += 1
        else:
            ready = max(ready, timeline.end[source])
        row = rows[row, NEXT_IN]
    tasks.flags[task] = 0
    timeline.ready[task] = ready
    waiting[task] = count
    if count:
        return size
    push(heap, size, ready, tasks.key[task])
    return size + 1


@compiled
def restore(timeline: Timeline, former: Ints, begin: int, journal: Journal) -> None:
    """Give a timeline its state before `resume`: `former` was its order."""
    timeline.tail[:] = journal.tail
    for place in range(begin, len(former)):
        task, entry = former[place], place - begin
        timeline.ready[task], timeline.start[task] = journal.ready[entry], journal.start[entry]
        timeline.end[task], timeline.previous[task] = journal.end[entry], journal.previous[entry]
        timeline.position[task] = place
