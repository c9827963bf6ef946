"""Full and delta simulation of a task graph (FlexFlow, arXiv:1807.05358, algorithms 1 and 2), with one queue.

    ready  when the last predecessor ends
    end    when all its parts do: each takes a resource, from when the task is ready and the resource has
           ended what it did before

A part may be a launch: what a host does for the task's next part, on a device. As long as that device is
busy, a launch waits for nothing but former launches: it goes ahead (docs/decisions/059-launches-go-ahead.md).
What a host does last of a task launches nothing, and waits as other parts do.

A part of negative seconds is a beginning that a resource shares: those that it comes to within SLOT_S of one
take nothing, and end half a slot behind it at the earliest. Messages of about the same time travel together
(docs/decisions/032), and wait for each other.

A resource takes tasks in the order of (ready, key). Keys ascend along dependencies, so a task's pair is
greater than its predecessors' even where tasks take no time, and these rules allow one timeline only.

Tasks of one block whose keys follow each other, ready at the same time, are one entry of the queue: whatever
is ready then, none comes between.

Simulation runs tasks by (ready, key), and writes the order. A change touches nothing before the first place
where a task is removed, or where one that is new belongs. Delta simulation takes the order up to there as it
was, without the queue, and goes on from there: the same additions, to the same bits.
"""

from typing import Any, NamedTuple

import numpy as np

from partc.cost.cluster.profiles import SLOT_S
from partc.cost.simulation.task_arrays import (
    NONE,
    Contents,
    FlatGraph,
    Floats,
    Ints,
    Links,
    Longs,
    Waiting,
    compiled,
    inner,
)

STOPPED = -1
INDEX_BITS = 32
INDEX_MASK = np.int64((1 << INDEX_BITS) - 1)
# Of the types that variables have, where literals would be compiled apart (see `inner`).
NOTHING: Any = np.int64(0)
NO: Any = np.bool_(False)
YES: Any = np.bool_(True)


class TaskTimes(NamedTuple):
    """When tasks run, by place: a block's tasks are at its offset."""

    offset: Ints  # by block
    ready: Floats
    end: Floats
    order: Longs  # keys of tasks as they were simulated


class Room(NamedTuple):
    """Room to work in."""

    waiting: Ints  # by place: how many predecessors have not ended
    length: Ints  # by place: of the entry of the queue that begins there
    head: Ints  # by block: where its entry of the queue that may still grow begins
    free: Floats  # by resource: when it has ended what it did so far
    remaining: Floats  # by resource: the seconds of what it has yet to do
    slot_end: Floats  # by resource: until when beginnings take nothing more
    ready: Floats  # the queue, a heap of pairs, the least first
    key: Longs
    launchers: int  # the resources from this one on are hosts that launch


@inner
def push(room: Room, size: int, ready: float, key: int) -> None:
    """Add a pair to a queue of `size` pairs."""
    hole = size
    while hole > 0:
        above = (hole - 1) >> 1
        if room.ready[above] < ready or (room.ready[above] == ready and room.key[above] <= key):
            break
        room.ready[hole], room.key[hole] = room.ready[above], room.key[above]
        hole = above
    room.ready[hole], room.key[hole] = ready, key


@inner
def replace_least(room: Room, size: int, ready: float, key: int) -> None:
    """Put a pair in the place of the first one of a queue of `size` pairs."""
    hole = 0
    while True:
        below = 2 * hole + 1
        if below >= size:
            break
        other = below + 1
        if other < size and (
            room.ready[other] < room.ready[below]
            or (room.ready[other] == room.ready[below] and room.key[other] < room.key[below])
        ):
            below = other
        if ready < room.ready[below] or (ready == room.ready[below] and key <= room.key[below]):
            break
        room.ready[hole], room.key[hole] = room.ready[below], room.key[below]
        hole = below
    room.ready[hole], room.key[hole] = ready, key


@inner
def run_task(contents: Contents, task: int, ready: float, room: Room, limit_s: float) -> float:
    """Have the parts of a task take their resources; return its end, infinity: a step is beyond the limit."""
    end = ready
    last = contents.part[task + 1] - 1
    for part in range(contents.part[task], last + 1):
        resource, seconds = contents.resource[part], contents.seconds[part]
        begun = max(ready, room.free[resource])
        if part < last and resource >= room.launchers and ready <= room.free[contents.resource[part + 1]]:
            begun = room.free[resource]
        if seconds < 0.0:
            if begun < room.slot_end[resource]:
                end = max(end, room.slot_end[resource] - SLOT_S / 2)
                continue
            room.slot_end[resource] = begun + SLOT_S
        else:
            room.remaining[resource] -= seconds
        ended = begun + abs(seconds)
        room.free[resource] = ended
        if ended + room.remaining[resource] > limit_s:
            return np.inf
        end = max(end, ended)
    return end


@inner
def note_end(place: int, end: float, timeline: TaskTimes, room: Room) -> bool:
    """Note that a predecessor of the task at a place ends; tell whether none is left."""
    timeline.ready[place] = max(timeline.ready[place], end)
    room.waiting[place] -= 1
    return bool(room.waiting[place] == 0)


@inner
def queue_task(
    block: int, place: int, ready: float, timeline: TaskTimes, room: Room, size: int, has_left: bool
) -> tuple[int, bool]:
    """Queue a task: with those before it in its block, or in the place of the first, if that `has_left`."""
    head = room.head[block]
    if head != NONE and timeline.ready[head] == ready and head + room.length[head] == place:
        room.length[head] += 1
        return size, has_left
    room.head[block], room.length[place] = place, 1
    key = np.int64(block) << INDEX_BITS | (place - timeline.offset[block])
    if has_left:
        replace_least(room, size, ready, key)
        return size, NO
    push(room, size, ready, key)
    return size + 1, NO


@inner
def free_resources(work: Floats, room: Room) -> None:
    """Have no resource have done anything."""
    for resource in range(len(work)):
        room.free[resource], room.remaining[resource] = 0.0, work[resource]
        room.slot_end[resource] = 0.0


@inner
def begin(
    contents: Contents,
    links: Links,
    graph: FlatGraph,
    waiting: Waiting,
    work: Floats,
    timeline: TaskTimes,
    room: Room,
) -> None:
    """Have no task be run, and all wait for their predecessors."""
    free_resources(work, room)
    for block in range(len(graph.content)):
        room.head[block] = NONE
        task, place = contents.task[graph.content[block]], timeline.offset[block]
        count = contents.task[graph.content[block] + 1] - task
        for index in range(count):
            room.waiting[place + index] = contents.predecessors[task + index]
            timeline.ready[place + index] = 0.0
    for entry in range(len(graph.link)):
        link, offset = graph.link[entry], timeline.offset[waiting.block[entry]]
        begun, ended = links.bound[link], links.bound[link] + links.sources[link]
        for target in range(links.target_begin[begun], links.target_begin[ended]):
            room.waiting[offset + links.target[target]] += 1


@inner
def replay(
    contents: Contents,
    links: Links,
    graph: FlatGraph,
    waiting: Waiting,
    timeline: TaskTimes,
    room: Room,
    former: Longs,
    is_changed: Ints,
    limit_s: float,
) -> tuple[int, int]:
    """Run tasks in their former order, as far as a change of blocks leaves it alone, and queue what is ready.

    `former`: up to the first task of a block that is changed. Returns how many tasks were run, or STOPPED,
    and the size of the queue.
    """
    size, count, keep = NOTHING, NOTHING, 0
    for block in range(len(graph.content)):
        if is_changed[block]:
            for place in range(timeline.offset[block] + NOTHING, timeline.offset[block + 1] + NOTHING):
                if room.waiting[place] == 0:
                    size, _ = queue_task(block, place, 0.0, timeline, room, size, NO)
    while keep < len(former) and not is_changed[former[keep] >> INDEX_BITS]:
        keep += 1
    while count < keep:
        key = former[count]
        block, index = key >> INDEX_BITS, key & INDEX_MASK
        place = timeline.offset[block] + index
        ready = timeline.ready[place]
        if size and (room.ready[0] < ready or (room.ready[0] == ready and room.key[0] < key)):
            break
        end = run_task(contents, contents.task[graph.content[block]] + index, ready, room, limit_s)
        if end == np.inf:
            return STOPPED, size
        timeline.end[place], timeline.order[count], room.waiting[place] = end, key, NONE
        count += 1
        size, _ = release(
            contents, links, graph, waiting, timeline, room, block, index, end, size, NO, is_changed
        )
    for late in range(count, len(former)):
        block, index = former[late] >> INDEX_BITS, former[late] & INDEX_MASK
        if not is_changed[block] and room.waiting[timeline.offset[block] + index] == 0:
            place = timeline.offset[block] + index
            size, _ = queue_task(block, place, timeline.ready[place], timeline, room, size, NO)
    return count, size


@inner
def release(
    contents: Contents,
    links: Links,
    graph: FlatGraph,
    waiting: Waiting,
    timeline: TaskTimes,
    room: Room,
    block: int,
    index: int,
    end: float,
    size: int,
    has_left: bool,
    is_queued: Ints,
) -> tuple[int, bool]:
    """Queue what a task that ended was the last predecessor of, of the blocks that are queued."""
    task, offset = contents.task[graph.content[block]] + index, timeline.offset[block]
    for follower in range(contents.successor[task], contents.successor[task + 1]):
        place = offset + contents.follower[follower]
        if note_end(place, end, timeline, room) and is_queued[block]:
            size, has_left = queue_task(block, place, timeline.ready[place], timeline, room, size, has_left)
    for entry in range(waiting.begin[block], waiting.begin[block + 1]):
        link = graph.link[entry]
        source = index - links.first[link]
        if not 0 <= source < links.sources[link]:
            continue
        other, bound = waiting.block[entry] + NOTHING, links.bound[link] + source
        offset = timeline.offset[other]
        for target in range(links.target_begin[bound], links.target_begin[bound + 1]):
            place = offset + links.target[target]
            if note_end(place, end, timeline, room) and is_queued[other]:
                ready = timeline.ready[place]
                size, has_left = queue_task(other, place, ready, timeline, room, size, has_left)
    return size, has_left


@inner
def run_queue(
    contents: Contents,
    links: Links,
    graph: FlatGraph,
    waiting: Waiting,
    timeline: TaskTimes,
    room: Room,
    count: int,
    size: int,
    all_blocks: Ints,
    limit_s: float,
) -> int:
    """Run what is queued, and what becomes ready by that, behind the first `count` tasks of the order.

    Returns how many tasks the order has then, or STOPPED.
    """
    while size:
        key = room.key[0]
        block, first = key >> INDEX_BITS, key & INDEX_MASK
        head = timeline.offset[block] + first
        ready = timeline.ready[head]
        if room.head[block] == head:
            room.head[block] = NONE
        has_left = YES  # its place in the queue is given to the first entry that it makes ready
        for index in range(first, first + room.length[head]):
            end = run_task(contents, contents.task[graph.content[block]] + index, ready, room, limit_s)
            if end == np.inf:
                return STOPPED
            timeline.end[timeline.offset[block] + index] = end
            timeline.order[count] = block << INDEX_BITS | index
            count += 1
            size, has_left = release(
                contents, links, graph, waiting, timeline, room, block, index, end, size, has_left, all_blocks
            )
        if has_left:
            size -= 1
            replace_least(room, size, room.ready[size], room.key[size])
    return count


@compiled
def simulate(
    contents: Contents,
    links: Links,
    graph: FlatGraph,
    waiting: Waiting,
    work: Floats,
    timeline: TaskTimes,
    room: Room,
    former: Longs,
    is_changed: Ints,
    all_blocks: Ints,
    limit_s: float,
) -> int:
    """Fill a timeline, of which the offsets are there; return how many tasks there are, or STOPPED.

    `former`: the order before some blocks were changed, empty for full simulation, of which all are.
    """
    begin(contents, links, graph, waiting, work, timeline, room)
    count, size = replay(contents, links, graph, waiting, timeline, room, former, is_changed, limit_s)
    if count == STOPPED:
        return STOPPED
    return run_queue(contents, links, graph, waiting, timeline, room, count, size, all_blocks, limit_s)
