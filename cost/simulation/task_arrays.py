"""The flat arrays of a task graph, and the compiled code that writes the contents of blocks into them.

Contents are written behind one another and never changed; a block *has* one of them, and several may have the
same. What depends on a task is found from it: in its own block by the content, and in blocks that wait for it
by theirs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

AnyKernel = TypeVar("AnyKernel", bound=Callable[..., object])

_numba: Any = numba  # whose types do not know all options

OWN = -1  # in place of a slot: the block itself
NONE = np.int32(-1)

# What `write` and `find_missing` answer.
FINE, PARTS, RESOURCE, SECONDS, UNKNOWN_SLOT, UNKNOWN_TASK, BACKWARD = range(7)


class Contents(NamedTuple):
    """What is known of contents. Of each array but the lengths, an entry ends where the next one begins.

    By content, task of a content, slot of a content, and link of a slot, in that order.
    """

    task: Ints
    slot: Ints
    part: Ints  # by task: where its parts begin
    successor: Ints  # by task: where those that depend on it in its block begin
    predecessors: Ints  # by task: how many dependencies it is the target of
    resource: Ints  # by part
    seconds: Floats  # by part
    follower: Ints  # by successor: its index
    first: Ints  # by slot: the first task of the other block that has links
    links: Ints  # by slot: for how many tasks from that on there are links
    bound: Ints  # by slot: where the bounds of its links begin
    link: Ints  # by bound: where the links of a task of the other block begin
    target: Ints  # by link: the index of the task that depends on it


class Used(NamedTuple):
    """How much of the arrays is used, int64[1] each."""

    contents: Longs
    tasks: Longs
    parts: Longs
    followers: Longs
    slots: Longs
    bounds: Longs
    links: Longs


class Waiting(NamedTuple):
    """Which blocks wait for which: those of block b are entries begin[b] to begin[b + 1]."""

    begin: Ints
    block: Ints  # that waits
    slot: Ints  # and as which of its sources
    source_begin: Ints
    source: Ints  # block that a block waits for, by slot


def compiled(kernel: AnyKernel) -> AnyKernel:
    """Compile `kernel` at its first call, in each process anew: numba would keep its code as pickles."""
    return cast(AnyKernel, _numba.njit(no_cfunc_wrapper=True)(kernel))


def inner(kernel: AnyKernel) -> AnyKernel:
    """Compile `kernel`, which only such call that are compiled, too: nothing takes its arguments from Python.

    Each combination of argument types is compiled apart, numbers of 32 and 64 bits and literals among them:
    where calls differ in these, callers convert.
    """
    return cast(AnyKernel, _numba.njit(no_cfunc_wrapper=True, no_cpython_wrapper=True)(kernel))


@compiled
def check(parts: Ints, resources: Ints, seconds: Floats, dependencies: Ints, sources: int, limit: int) -> int:
    """Return what is wrong with a content, if anything. `sources`: of its block; `limit`: of resources."""
    total = 0
    for count in parts:
        if count < 0:
            return PARTS
        total += count
    if total != len(resources) or total != len(seconds):
        return PARTS
    for part in range(total):
        if not 0 <= resources[part] < limit:
            return RESOURCE
        if not (seconds[part] >= 0.0 and np.isfinite(seconds[part])):
            return SECONDS
    for row in range(len(dependencies)):
        slot, source, target = dependencies[row]
        if not OWN <= slot < sources:
            return UNKNOWN_SLOT
        if source < 0 or not 0 <= target < len(parts) or (slot == OWN and source >= len(parts)):
            return UNKNOWN_TASK
        if slot == OWN and source >= target:
            return BACKWARD
    return FINE


@compiled
def write(
    contents: Contents, used: Used, parts: Ints, resources: Ints, seconds: Floats, dependencies: Ints
) -> int:
    """Write a content behind the others; return its number. There is room."""
    number, task, slot = used.contents[0], used.tasks[0], used.slots[0]
    part = used.parts[0]
    for index in range(len(resources)):
        contents.resource[part + index] = resources[index]
        contents.seconds[part + index] = seconds[index]
    for index in range(len(parts)):
        contents.part[task + index] = part
        part += parts[index]
        contents.predecessors[task + index] = contents.successor[task + index] = 0
    slots = 0
    for row in range(len(dependencies)):
        contents.predecessors[task + dependencies[row, 2]] += 1
        for new in range(slots, dependencies[row, 0] + 1):
            contents.first[slot + new] = contents.links[slot + new] = 0
            slots += 1
        if dependencies[row, 0] != OWN:
            _widen(contents, slot + dependencies[row, 0], dependencies[row, 1])
    used.contents[0], used.tasks[0], used.slots[0] = number + 1, task + len(parts), slot + slots
    used.parts[0] = part
    _sort(contents, used, task, slot, dependencies)
    contents.task[number + 1], contents.slot[number + 1] = used.tasks[0], used.slots[0]
    contents.part[used.tasks[0]], contents.successor[used.tasks[0]] = part, used.followers[0]
    return int(number)


@inner
def _widen(contents: Contents, slot: int, source: int) -> None:
    """Have the links of a slot reach a task of the other block."""
    first, end = contents.first[slot], contents.first[slot] + contents.links[slot]
    if first == end:
        first, end = source, source
    contents.first[slot] = min(first, source)
    contents.links[slot] = max(end, source + 1) - min(first, source)


@inner
def _sort(contents: Contents, used: Used, task: int, slot: int, dependencies: Ints) -> None:
    """Write dependencies by their sources: of the tasks, and of the slots, from `task` and `slot` on."""
    for one in range(slot, used.slots[0]):
        contents.bound[one] = used.bounds[0]
        used.bounds[0] += contents.links[one] + 1
        for bound in range(contents.bound[one], used.bounds[0]):
            contents.link[bound] = 0
    for row in range(len(dependencies)):
        which, source, _ = dependencies[row]
        if which == OWN:
            contents.successor[task + source] += 1
        else:
            contents.link[contents.bound[slot + which] + source - contents.first[slot + which]] += 1
    for index in range(task, used.tasks[0]):
        used.followers[0] += contents.successor[index]
        contents.successor[index] = used.followers[0]
    for one in range(slot, used.slots[0]):
        for bound in range(contents.bound[one], contents.bound[one] + contents.links[one] + 1):
            used.links[0] += contents.link[bound]
            contents.link[bound] = used.links[0]
    for row in range(len(dependencies)):
        which, source, target = dependencies[row]
        if which == OWN:
            contents.successor[task + source] -= 1
            contents.follower[contents.successor[task + source]] = target
        else:
            bound = contents.bound[slot + which] + source - contents.first[slot + which]
            contents.link[bound] -= 1
            contents.target[contents.link[bound]] = target


@compiled
def find_missing(contents: Contents, content: Ints, waiting: Waiting, blocks: Ints) -> int:
    """Return a block that waits for a task that is not there, or NONE, of some blocks and of their sources'.

    `content`: of every block.
    """
    for block in blocks:
        slots = contents.slot[content[block] + 1] - contents.slot[content[block]]
        if slots > waiting.source_begin[block + 1] - waiting.source_begin[block]:
            return int(block)
        for entry in range(waiting.source_begin[block], waiting.source_begin[block + 1]):
            slot = entry - waiting.source_begin[block]
            if _misses(contents, content[waiting.source[entry]], content[block], slot):
                return int(block)
        for entry in range(waiting.begin[block], waiting.begin[block + 1]):
            other = waiting.block[entry]
            if _misses(contents, content[block], content[other], waiting.slot[entry]):
                return int(other)
    return int(NONE)


@inner
def _misses(contents: Contents, source: int, content: int, slot: int) -> bool:
    slot += contents.slot[content]
    if slot >= contents.slot[content + 1]:
        return False
    return bool(
        contents.first[slot] + contents.links[slot] > contents.task[source + 1] - contents.task[source]
    )


@compiled
def add_work(contents: Contents, content: Ints, sign: float, work: Floats) -> None:
    """Add the seconds of contents to those of their resources, or take them away."""
    for number in content:
        begin, end = contents.part[contents.task[number]], contents.part[contents.task[number + 1]]
        for part in range(begin, end):
            work[contents.resource[part]] += sign * contents.seconds[part]


@compiled
def place_blocks(contents: Contents, content: Ints, offset: Ints) -> int:
    """Write where each block's tasks begin and the last one's end, behind one another; return how many."""
    tasks = 0
    for block in range(len(content)):
        offset[block] = tasks
        tasks += contents.task[content[block] + 1] - contents.task[content[block]]
    offset[len(content)] = tasks
    return int(tasks)
