"""Delta simulation: what a change of the graph does to a timeline (after FlexFlow's algorithm 2).

In a training step nearly every task behind a change is moved by it, so there is little to leave out, and a
queue of all that move costs what full simulation costs. What a change does leave is the *order*. So the
former order is replayed from the first place that the change touches:

    replay     the next task of the former order: ready from its predecessors, start from the task before it
               on its resource. No queue
    displace   a task that is new, has other predecessors, or waits for a displaced one: it goes through a
               queue by (ready, key), from which it comes out between the tasks of the former order
    roll back  where a task is ready before one that its resource has already run: the tasks from there on
               are taken back, and are displaced

The order that remains satisfies every dependency, and ascends by (ready, key) on each resource: the
timeline is the one that full simulation finds, to the bit (simulate_tasks.py). It gives up where too much is
displaced.
"""

from typing import NamedTuple

import numpy as np

from partc.cost.simulation.simulate_tasks import Heap, Timeline, drop_least, push, slot_of
from partc.cost.simulation.task_arrays import (
    AWAITED,
    DISPLACED,
    NEVER,
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

UNSEEN = np.int32(-2)  # the last task of a resource that the replay has not come to

# Where `Replay.counts` counts what.
EMITTED, QUEUED, SAVED, BEGIN, EFFORT = range(5)


class Journal(NamedTuple):
    """What a timeline said of the tasks that were simulated again."""

    task: Ints
    ready: Floats
    start: Floats
    end: Floats
    previous: Ints
    tail: Ints  # by resource


class Replay(NamedTuple):
    """The state of a replay."""

    order: Ints  # tasks as they are simulated now
    place: Ints  # by slot: its position in `order`
    waiting: Ints  # by slot: how many predecessors a displaced task waits for
    last: Ints  # by resource: the task that it ran last
    counts: Longs


@compiled
def replay(
    tasks: Tasks,
    rows: Ints,
    blocks: Blocks,
    timeline: Timeline,
    former: Ints,
    removed: Blocks,
    changed: Ints,
    new: Ints,
    state: Replay,
    heap: Heap,
    journal: Journal,
    most_effort: int,
) -> bool:
    """Bring `timeline` up to date; False, and it is of no use, if that takes more than `most_effort`.

    `former`: the order of the former simulation. `removed`: where tasks were that are gone. `changed`: tasks
    that have other predecessors than before. `new`: blocks whose tasks are new.
    """
    count = state.counts
    begin = first_place(timeline, len(former), removed, changed)
    count[EMITTED], count[QUEUED], count[SAVED], count[BEGIN], count[EFFORT] = begin, 0, 0, begin, 0
    state.order[:begin] = former[:begin]
    state.last[:] = UNSEEN
    journal.tail[:] = timeline.tail
    displace_changed(tasks, rows, blocks, timeline, changed, new, state, heap, journal)
    at = begin
    while count[EFFORT] <= most_effort:
        if at == len(former):
            if count[QUEUED] == 0:
                break
            run_first(tasks, rows, blocks, timeline, state, heap, journal)
            continue
        task = former[at]
        if tasks.flags[task] & (REMOVED | DISPLACED):
            at += 1
            continue
        ready = 0.0
        row = tasks.first_in[task]
        while row != NONE:
            ready = max(ready, timeline.end[rows[row, SOURCE]])
            row = rows[row, NEXT_IN]
        if ready == NEVER:
            displace(tasks, rows, timeline, task, state, journal)
            await_predecessors(tasks, rows, timeline, task, state, heap)
            at += 1
        elif count[QUEUED] and (
            heap.ready[0] < ready or (heap.ready[0] == ready and heap.key[0] < tasks.key[task])
        ):
            run_first(tasks, rows, blocks, timeline, state, heap, journal)
        else:
            save(timeline, task, count, journal)
            run(tasks, rows, timeline, task, ready, state, heap, journal)
            at += 1
    if count[EFFORT] > most_effort:
        return False
    finish(tasks, timeline, state, journal)
    return True


@compiled
def first_place(timeline: Timeline, begin: int, removed: Blocks, changed: Ints) -> int:
    """Return the first place of a removed or changed task in the former order, or `begin`."""
    for which in range(len(removed.task)):
        for task in range(removed.task[which], removed.task[which] + removed.tasks[which]):
            begin = min(begin, timeline.position[task])
    for task in changed:
        begin = min(begin, timeline.position[task])
    return begin


@compiled
def displace_changed(
    tasks: Tasks,
    rows: Ints,
    blocks: Blocks,
    timeline: Timeline,
    changed: Ints,
    new: Ints,
    state: Replay,
    heap: Heap,
    journal: Journal,
) -> None:
    """Queue the tasks that are new or have other predecessors, as far as they are ready."""
    begin = state.counts[BEGIN]
    for block in new:
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            timeline.end[task] = NEVER
            timeline.position[task] = NOWHERE
    for task in changed:
        displace(tasks, rows, timeline, task, state, journal)
    for block in new:
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            await_since(tasks, rows, timeline, task, begin, state, heap)
    for task in changed:
        await_since(tasks, rows, timeline, task, begin, state, heap)


@compiled
def save(timeline: Timeline, task: int, count: Longs, journal: Journal) -> None:
    """Keep what the timeline says of a task of the former order."""
    saved = count[SAVED]
    journal.task[saved] = task
    journal.ready[saved] = timeline.ready[task]
    journal.start[saved] = timeline.start[task]
    journal.end[saved] = timeline.end[task]
    journal.previous[saved] = timeline.previous[task]
    count[SAVED] = saved + 1


@compiled
def displace(
    tasks: Tasks, rows: Ints, timeline: Timeline, task: int, state: Replay, journal: Journal
) -> None:
    """Take a task that has not run out of the former order."""
    save(timeline, task, state.counts, journal)
    tasks.flags[task] |= DISPLACED
    timeline.end[task] = NEVER


@compiled
def await_since(
    tasks: Tasks, rows: Ints, timeline: Timeline, task: int, begin: int, state: Replay, heap: Heap
) -> None:
    """Let a displaced task wait for predecessors that are displaced, or stand behind `begin` in the order."""
    state.waiting[task] = 0
    row = tasks.first_in[task]
    while row != NONE:
        source = rows[row, SOURCE]
        if timeline.end[source] == NEVER or timeline.position[source] >= begin:
            state.waiting[task] += 1
            tasks.flags[source] |= AWAITED
        row = rows[row, NEXT_IN]
    if state.waiting[task] == 0:
        enqueue(tasks, rows, timeline, task, state, heap)


@compiled
def await_predecessors(
    tasks: Tasks, rows: Ints, timeline: Timeline, task: int, state: Replay, heap: Heap
) -> None:
    """Let a task that was just displaced wait for those of its predecessors that are."""
    await_since(tasks, rows, timeline, task, NOWHERE + 1, state, heap)


@compiled
def enqueue(tasks: Tasks, rows: Ints, timeline: Timeline, task: int, state: Replay, heap: Heap) -> None:
    """Queue a displaced task whose predecessors have all run."""
    ready = 0.0
    row = tasks.first_in[task]
    while row != NONE:
        ready = max(ready, timeline.end[rows[row, SOURCE]])
        row = rows[row, NEXT_IN]
    timeline.ready[task] = ready
    if state.counts[QUEUED] == len(heap.key):
        state.counts[EFFORT] = NOWHERE  # entries that roll-backs made void fill the queue
        return
    push(heap, state.counts[QUEUED], ready, tasks.key[task])
    state.counts[QUEUED] += 1


@compiled
def run_first(
    tasks: Tasks,
    rows: Ints,
    blocks: Blocks,
    timeline: Timeline,
    state: Replay,
    heap: Heap,
    journal: Journal,
) -> None:
    """Run the first task of the queue, unless a roll-back has made its entry void."""
    count = state.counts
    ready = heap.ready[0]
    task = slot_of(blocks, heap.key[0])
    drop_least(heap, count[QUEUED])
    count[QUEUED] -= 1
    count[EFFORT] += 1
    if timeline.end[task] == NEVER and state.waiting[task] == 0 and timeline.ready[task] == ready:
        run(tasks, rows, timeline, task, ready, state, heap, journal)


@compiled
def run(
    tasks: Tasks,
    rows: Ints,
    timeline: Timeline,
    task: int,
    ready: float,
    state: Replay,
    heap: Heap,
    journal: Journal,
) -> None:
    """Run a task on its resource, or roll back to the first task there that should come behind it."""
    resource = tasks.resource[task]
    last = state.last[resource]
    if last == UNSEEN:
        last = timeline.tail[resource] if timeline.position[task] == NOWHERE else timeline.previous[task]
        while last != NONE and timeline.position[last] >= state.counts[BEGIN]:
            last = timeline.previous[last]
    start = ready
    if last != NONE:
        if ready < timeline.ready[last] or (
            ready == timeline.ready[last] and tasks.key[task] < tasks.key[last]
        ):
            state.last[resource] = last
            roll_back(tasks, rows, timeline, task, ready, state, heap, journal)
            return
        start = max(start, timeline.end[last])
    timeline.ready[task], timeline.start[task] = ready, start
    timeline.end[task] = start + tasks.seconds[task]
    timeline.previous[task] = last
    state.last[resource] = task
    place = state.counts[EMITTED]
    state.place[task] = place
    state.order[place] = task
    state.counts[EMITTED] = place + 1
    if tasks.flags[task] & AWAITED:
        tell_successors(tasks, rows, timeline, task, state, heap)


@compiled
def tell_successors(
    tasks: Tasks, rows: Ints, timeline: Timeline, task: int, state: Replay, heap: Heap
) -> None:
    """Queue the displaced tasks that waited for this one alone."""
    tasks.flags[task] &= ~AWAITED
    row = tasks.first_out[task]
    while row != NONE:
        target = rows[row, TARGET]
        if timeline.end[target] == NEVER and tasks.flags[target] & DISPLACED:
            state.waiting[target] -= 1
            if state.waiting[target] == 0:
                enqueue(tasks, rows, timeline, target, state, heap)
        row = rows[row, NEXT_OUT]


@compiled
def roll_back(
    tasks: Tasks,
    rows: Ints,
    timeline: Timeline,
    task: int,
    ready: float,
    state: Replay,
    heap: Heap,
    journal: Journal,
) -> None:
    """Take back the tasks that ran since one that `task` precedes on its resource; all are displaced."""
    count = state.counts
    key = tasks.key[task]
    behind = state.last[tasks.resource[task]]
    previous = timeline.previous[behind]
    while previous != NONE and (
        timeline.ready[previous] > ready or (timeline.ready[previous] == ready and tasks.key[previous] > key)
    ):
        behind = previous
        previous = timeline.previous[behind]
    since = timeline.position[behind]
    if since >= count[BEGIN]:
        since = state.place[behind]
    timeline.ready[task] = ready
    timeline.end[task] = NEVER
    tasks.flags[task] |= DISPLACED
    state.waiting[task] = 0
    emitted = count[EMITTED]
    count[EFFORT] += emitted - since
    for place in range(emitted - 1, since - 1, -1):
        take_back(tasks, rows, timeline, state.order[place], place, state, journal)
    count[EMITTED] = since
    count[BEGIN] = min(count[BEGIN], since)
    for place in range(since, emitted):
        taken = state.order[place]
        if state.waiting[taken] == 0:
            enqueue(tasks, rows, timeline, taken, state, heap)
    if state.waiting[task] == 0:
        enqueue(tasks, rows, timeline, task, state, heap)


@compiled
def take_back(
    tasks: Tasks, rows: Ints, timeline: Timeline, task: int, place: int, state: Replay, journal: Journal
) -> None:
    """Take back a task that ran, the last in the order: its displaced successors wait for it again."""
    if place < state.counts[BEGIN]:
        save(timeline, task, state.counts, journal)
    resource = tasks.resource[task]
    if state.last[resource] != UNSEEN:
        state.last[resource] = timeline.previous[task]
    tasks.flags[task] |= DISPLACED
    timeline.end[task] = NEVER
    state.waiting[task] = 0
    row = tasks.first_out[task]
    while row != NONE:
        target = rows[row, TARGET]
        if timeline.end[target] == NEVER and tasks.flags[target] & DISPLACED:
            state.waiting[target] += 1
            tasks.flags[task] |= AWAITED
        row = rows[row, NEXT_OUT]


@compiled
def finish(tasks: Tasks, timeline: Timeline, state: Replay, journal: Journal) -> None:
    """Write positions and the resources' last tasks, and clear the flags."""
    begin, emitted = state.counts[BEGIN], state.counts[EMITTED]
    for resource in range(len(timeline.tail)):
        last = state.last[resource]
        if last == UNSEEN:
            last = timeline.tail[resource]
            while last != NONE and timeline.position[last] >= begin:
                last = timeline.previous[last]
        timeline.tail[resource] = last
    for place in range(begin, emitted):
        task = state.order[place]
        timeline.position[task] = place
        tasks.flags[task] = 0


@compiled
def restore(timeline: Timeline, former: Ints, begin: int, saved: int, journal: Journal) -> None:
    """Give a timeline its state before `replay` again: `former` was its order, `begin` where it differs."""
    timeline.tail[:] = journal.tail
    for entry in range(saved):
        task = journal.task[entry]
        timeline.ready[task], timeline.start[task] = journal.ready[entry], journal.start[entry]
        timeline.end[task], timeline.previous[task] = journal.end[entry], journal.previous[entry]
    for place in range(begin, len(former)):
        timeline.position[former[place]] = place
