"""The flat arrays of a task graph, and the compiled code that writes into them.

    content  the tasks of a block, and which of them wait for each other
    links    which tasks of a block wait for which of another one

Both are written behind one another and never changed. A block *has* a content, and two blocks of which one
may wait for the other *have* links; several may have the same. Number 0 is the content without tasks, and no
links.
"""

from collections.abc import Callable, Sequence
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

# What `check` and `find_missing` answer.
FINE, PARTS, RESOURCE, SECONDS, UNKNOWN_SLOT, UNKNOWN_TASK, BACKWARD = range(7)


class Contents(NamedTuple):
    """What is known of contents. Of each array but the last four, an entry ends where the next one begins.

    By content, and task of a content, in that order.
    """

    task: Ints
    part: Ints  # by task: where its parts begin
    successor: Ints  # by task: where those that depend on it in its block begin
    predecessors: Ints  # by task: how many of its block it depends on
    resource: Ints  # by part
    seconds: Floats  # by part; negative of a beginning that is shared (simulate_tasks.py)
    follower: Ints  # by successor: its index
    used: Longs  # int64[4]: how many contents, tasks, parts and successors there are


class Links(NamedTuple):
    """What is known of links. Tasks of the block that is waited for are its *sources* here."""

    first: Ints  # by links: the first source
    sources: Ints  # by links: how many from that on there may be
    targets: Ints  # by links: how many tasks the other block has at least
    bound: Longs  # by links: where the bounds of its sources begin, one more than there are sources
    target_begin: Longs  # by bound: where the targets of a source begin
    target: Ints  # the index of a task that waits
    used: Longs  # int64[3]: how many links, bounds and targets there are


class Waiting(NamedTuple):
    """Which blocks may wait for which: entries of block b are begin[b] to begin[b + 1].

    The slots of block b are source_begin[b] to source_begin[b + 1].
    """

    begin: Ints
    block: Ints  # that waits
    source_begin: Ints
    source: Ints  # by slot: the block that is waited for
    entry: Ints  # by slot


def waiting_of(sources: Sequence[Sequence[int]]) -> Waiting:
    """Return who may wait for whom in flat arrays."""
    source = np.array([source for own in sources for source in own], np.int32)
    block = np.repeat(np.arange(len(sources), dtype=np.int32), [len(own) for own in sources])
    order = np.argsort(source, kind="stable")
    entry = np.empty(len(source), np.int32)
    entry[order] = np.arange(len(source))
    return Waiting(
        np.searchsorted(source[order], np.arange(len(sources) + 1)).astype(np.int32),
        block[order],
        np.cumsum([0, *map(len, sources)], dtype=np.int32),
        source,
        entry,
    )


class FlatGraph(NamedTuple):
    """The content of each block, and the links of each entry of Waiting."""

    content: Ints
    link: Ints


def compiled(kernel: AnyKernel) -> AnyKernel:
    """Compile `kernel` at its first call, in each process anew: numba would keep its code as pickles."""
    return cast(AnyKernel, _numba.njit(no_cfunc_wrapper=True)(kernel))


def inner(kernel: AnyKernel) -> AnyKernel:
    """Compile `kernel`, which only such call that are compiled, too: nothing takes its arguments from Python.

    Each combination of argument types is compiled apart, numbers of 32 and 64 bits and literals among them:
    where calls differ in these, callers convert.
    """
    return cast(
        AnyKernel, _numba.njit(no_cfunc_wrapper=True, no_cpython_wrapper=True, forceinline=True)(kernel)
    )


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
        if not np.isfinite(seconds[part]):
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
def write_content(contents: Contents, parts: Ints, resources: Ints, seconds: Floats, pairs: Ints) -> int:
    """Write a content behind the others; return its number. There is room.

    `pairs`: int32[m, 2] of indices, of which the second depends on the first.
    """
    used = contents.used
    number, task, part, follower = used[0], used[1], used[2], used[3]
    for index in range(len(resources)):
        contents.resource[part + index] = resources[index]
        contents.seconds[part + index] = seconds[index]
    for index in range(len(parts)):
        contents.part[task + index] = part
        part += parts[index]
        contents.predecessors[task + index] = contents.successor[task + index] = 0
    for row in range(len(pairs)):
        contents.successor[task + pairs[row, 0]] += 1
        contents.predecessors[task + pairs[row, 1]] += 1
    for index in range(task, task + len(parts)):
        follower += contents.successor[index]
        contents.successor[index] = follower
    for row in range(len(pairs)):
        contents.successor[task + pairs[row, 0]] -= 1
        contents.follower[contents.successor[task + pairs[row, 0]]] = pairs[row, 1]
    used[0], used[1], used[2], used[3] = number + 1, task + len(parts), part, follower
    contents.task[number + 1], contents.part[used[1]], contents.successor[used[1]] = used[1], part, follower
    return int(number)


@compiled
def write_links(links: Links, sources: Ints, targets: Ints) -> int:
    """Write links behind the others; return their number. There is room, and there is at least one."""
    used = links.used
    number, bound, begin = used[0], used[1], used[2]
    first, last = sources.min(), sources.max()
    for source in range(bound, bound + last - first + 2):
        links.target_begin[source] = 0
    for row in range(len(sources)):
        links.target_begin[bound + sources[row] - first] += 1
    for source in range(bound, bound + last - first + 2):
        begin += links.target_begin[source]
        links.target_begin[source] = begin
    for row in range(len(sources)):
        own = bound + sources[row] - first
        links.target_begin[own] -= 1
        links.target[links.target_begin[own]] = targets[row]
    links.first[number], links.sources[number], links.targets[number] = (
        first,
        last - first + 1,
        targets.max() + 1,
    )
    links.bound[number] = bound
    used[0], used[1], used[2] = number + 1, bound + last - first + 2, begin
    return int(number)


@compiled
def find_missing(contents: Contents, links: Links, graph: FlatGraph, waiting: Waiting, blocks: Ints) -> int:
    """Return a block that waits for a task that is not there, or NONE, of some blocks and those that wait."""
    for block in blocks:
        for slot in range(waiting.source_begin[block], waiting.source_begin[block + 1]):
            if _misses(contents, links, graph, waiting.source[slot], block, waiting.entry[slot]):
                return int(block)
        for entry in range(waiting.begin[block], waiting.begin[block + 1]):
            if _misses(contents, links, graph, block, waiting.block[entry], entry):
                return int(waiting.block[entry])
    return int(NONE)


@inner
def _misses(contents: Contents, links: Links, graph: FlatGraph, source: int, target: int, entry: int) -> bool:
    link = graph.link[entry]
    sources, targets = graph.content[source], graph.content[target]
    return bool(
        links.first[link] + links.sources[link] > contents.task[sources + 1] - contents.task[sources]
        or links.targets[link] > contents.task[targets + 1] - contents.task[targets]
    )


@compiled
def add_work(contents: Contents, former: Ints, now: Ints, work: Floats) -> None:
    """Take the seconds of what blocks no longer have from those of its resources, and add those it has.

    `former`, `now`: contents by block, int32[blocks].
    """
    for block in range(len(now)):
        if former[block] != now[block]:
            _add_seconds(contents, former[block], -1.0, work)
    for block in range(len(now)):
        if former[block] != now[block]:
            _add_seconds(contents, now[block], 1.0, work)


@inner
def _add_seconds(contents: Contents, number: int, sign: float, work: Floats) -> None:
    begin, end = contents.part[contents.task[number]], contents.part[contents.task[number + 1]]
    for part in range(begin, end):
        work[contents.resource[part]] += sign * max(0.0, contents.seconds[part])  # that it takes at least


@compiled
def place_blocks(contents: Contents, content: Ints, offset: Ints) -> int:
    """Write where each block's tasks begin and the last one's end, behind one another; return how many."""
    tasks = 0
    for block in range(len(content)):
        offset[block] = tasks
        tasks += contents.task[content[block] + 1] - contents.task[content[block]]
    offset[len(content)] = tasks
    return int(tasks)
