"""A step whose resources take the tasks of blocks in a given order, as they do in a program.

A queue (simulate_tasks.py) lets a resource begin whatever is ready first. A program can do better: what is
ready first may hold back what more comes after. Here a resource waits for the next task in the order even if
others are ready (docs/decisions/088).

Updates are not worth that: of blocks that no other waits for, what leads to further tasks has its turn, for
it may be a sum, or what hands one on. All else there comes when the other blocks are done.
"""

import numpy as np

from partc.cost.simulation.simulate_tasks import NO, YES, Room, TaskTimes, free_resources, run_task
from partc.cost.simulation.task_arrays import (
    Contents,
    FlatGraph,
    Floats,
    Ints,
    Links,
    Waiting,
    compiled,
    inner,
)

LEAD_TASKS = 2  # of a block that no other waits for: a sum, and what hands it on


@inner
def count_ahead(contents: Contents, graph: FlatGraph, timeline: TaskTimes, room: Room) -> None:
    """Count those that take resources among the tasks of its own block that each task waits for, in a row."""
    for place in range(timeline.offset[len(graph.content)]):
        room.waiting[place] = 0
    for block in range(len(graph.content)):
        offset, first = timeline.offset[block], contents.task[graph.content[block]]
        for task in range(first, contents.task[graph.content[block] + 1]):
            count = room.waiting[offset + task - first] + (contents.part[task] < contents.part[task + 1])
            for follower in range(contents.successor[task], contents.successor[task + 1]):
                place = offset + contents.follower[follower]
                room.waiting[place] = max(room.waiting[place], count)


@inner
def pass_on(
    contents: Contents,
    links: Links,
    graph: FlatGraph,
    waiting: Waiting,
    timeline: TaskTimes,
    block: int,
    index: int,
    end: float,
) -> None:
    """Have those that wait for a task be ready when it ends, at the earliest."""
    task, offset = contents.task[graph.content[block]] + index, timeline.offset[block]
    for follower in range(contents.successor[task], contents.successor[task + 1]):
        place = offset + contents.follower[follower]
        timeline.ready[place] = max(timeline.ready[place], end)
    for entry in range(waiting.begin[block], waiting.begin[block + 1]):
        link = graph.link[entry]
        source = index - links.first[link]
        if not 0 <= source < links.sources[link]:
            continue
        offset, bound = timeline.offset[waiting.block[entry]], links.bound[link] + source
        for target in range(links.target_begin[bound], links.target_begin[bound + 1]):
            place = offset + links.target[target]
            timeline.ready[place] = max(timeline.ready[place], end)


@compiled
def step_in_order(
    contents: Contents,
    links: Links,
    graph: FlatGraph,
    waiting: Waiting,
    work: Floats,
    timeline: TaskTimes,
    room: Room,
    order: Ints,
    limit_s: float,
) -> float:
    """Return the seconds of a step, infinity where they are certainly above the limit.

    order  all blocks, each behind those that it waits for: int32[blocks]

    Tasks of a block are taken by index. What they wait for within it has lower ones. Writes over what `ready`
    of the timeline has, and `waiting` of the room.
    """
    free_resources(work, room)
    for place in range(timeline.offset[len(graph.content)]):
        timeline.ready[place] = 0.0
    count_ahead(contents, graph, timeline, room)
    for is_second in (NO, YES):
        for block in order:
            is_awaited = waiting.begin[block] < waiting.begin[block + 1]
            if is_awaited and is_second:
                continue
            offset, first = timeline.offset[block], contents.task[graph.content[block]]
            for task in range(first, contents.task[graph.content[block] + 1]):
                place = offset + task - first
                has_followers = contents.successor[task] < contents.successor[task + 1]
                has_turn = is_awaited or (has_followers and room.waiting[place] < LEAD_TASKS)
                if has_turn == is_second:
                    continue
                end = run_task(contents, task, timeline.ready[place], room, limit_s)
                if end == np.inf:
                    return np.inf
                pass_on(contents, links, graph, waiting, timeline, block, task - first, end)
    return float(room.free.max())
