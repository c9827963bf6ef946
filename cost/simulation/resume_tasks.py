"""Delta simulation: what a change of the graph does to a timeline (FlexFlow's algorithm 2, with one queue).

Full simulation runs tasks by (ready, key), and writes the order. A change touches nothing before the first
place where a task is removed, or where one that is new, or has other predecessors, belongs. What was
simulated up to there is kept, and simulation goes on from there with the code of the full one
(simulate_tasks.py): the timeline is the same, to the bit.
"""

from typing import NamedTuple

from partc.cost.simulation.simulate_tasks import Bound, Heap, Timeline, push, run_queue
from partc.cost.simulation.task_arrays import (
    NEXT_IN,
    NONE,
    NOWHERE,
    REMOVED,
    SOURCE,
    Blocks,
    Floats,
    Ints,
    Tasks,
    compiled,
)


class Journal(NamedTuple):
    """What a timeline said of the tasks that were simulated again, in the order of then."""

    ready: Floats
    start: Floats
    end: Floats
    previous: Ints
    tail: Ints  # by resource


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
) -> int:
    """Return the first place of a former `order` that a change touches.

    `removed`: where tasks were that are gone. `changed`: tasks that have other predecessors than before.
    `new`: blocks whose tasks are new.
    """
    begin = len(order)
    for which in range(len(removed.task)):
        for task in range(removed.task[which], removed.task[which] + removed.tasks[which]):
            begin = min(begin, timeline.position[task])
    for task in changed:
        begin = min(begin, timeline.position[task])
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
