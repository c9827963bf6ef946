"""The flat arrays of a task graph, and the compiled code that puts blocks into them and takes them out.

A task is a *slot*: a place in the arrays of `Tasks`. A dependency is a row of `Dependencies.rows`, in two
doubly linked lists: its target's predecessors and its source's successors.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]

Kernel = TypeVar("Kernel", bound=Callable[..., object])

NONE = np.int32(-1)
NOWHERE = np.int32(2**31 - 1)  # the position of a task that is in no order yet

# Flags of a slot, between a change and the simulation of it.
REMOVED = np.uint8(1)
CHANGED = np.uint8(2)  # stays, and has lost or won predecessors
NEW = np.uint8(4)

SOURCE, TARGET, NEXT_IN, PREVIOUS_IN, NEXT_OUT, PREVIOUS_OUT = range(6)
INDEX_BITS = 32

# What `replace_blocks` answers.
FINE, DANGLING, UNKNOWN_TASK, BACKWARD = range(4)


class Tasks(NamedTuple):
    """By slot, what a graph says of its tasks."""

    resource: Ints
    seconds: Floats
    key: Longs  # block << INDEX_BITS | index: the order of ties, ascending along dependencies
    first_in: Ints
    first_out: Ints
    predecessors: Ints  # how many dependencies it is the target of
    flags: Bytes


class Blocks(NamedTuple):
    """By block: the slots of its tasks and the rows of the dependencies that it owns."""

    task: Ints
    tasks: Ints
    row: Ints
    rows: Ints


class Change(NamedTuple):
    """What takes the place of some blocks, as flat arrays: theirs behind one another."""

    block: Ints
    spans: Blocks  # for each of `block`, where it goes
    resource: Ints
    seconds: Floats
    dependencies: Ints  # int32[n, 4]: source block, index, target block, index


def compiled(kernel: Kernel) -> Kernel:
    """Compile `kernel` at its first call, in each process anew: numba would keep its code as pickles."""
    return cast(Kernel, numba.njit(kernel))


@compiled
def unlink(tasks: Tasks, rows: Ints, row: int) -> None:
    """Take a dependency out of the lists of both its ends."""
    source, target = rows[row, SOURCE], rows[row, TARGET]
    after, before = rows[row, NEXT_IN], rows[row, PREVIOUS_IN]
    if before == NONE:
        tasks.first_in[target] = after
    else:
        rows[before, NEXT_IN] = after
    if after != NONE:
        rows[after, PREVIOUS_IN] = before
    after, before = rows[row, NEXT_OUT], rows[row, PREVIOUS_OUT]
    if before == NONE:
        tasks.first_out[source] = after
    else:
        rows[before, NEXT_OUT] = after
    if after != NONE:
        rows[after, PREVIOUS_OUT] = before
    tasks.predecessors[target] -= 1


@compiled
def link(tasks: Tasks, rows: Ints, row: int) -> None:
    """Put a dependency at the head of the lists of both its ends."""
    source, target = rows[row, SOURCE], rows[row, TARGET]
    after = tasks.first_in[target]
    rows[row, NEXT_IN], rows[row, PREVIOUS_IN] = after, NONE
    if after != NONE:
        rows[after, PREVIOUS_IN] = row
    tasks.first_in[target] = row
    after = tasks.first_out[source]
    rows[row, NEXT_OUT], rows[row, PREVIOUS_OUT] = after, NONE
    if after != NONE:
        rows[after, PREVIOUS_OUT] = row
    tasks.first_out[source] = row
    tasks.predecessors[target] += 1


@compiled
def note_changed(tasks: Tasks, task: int, changed: Ints, count: int) -> int:
    """Note that a task that stays has other predecessors; return how many are noted."""
    if tasks.flags[task] & (REMOVED | CHANGED | NEW):
        return count
    tasks.flags[task] |= CHANGED
    changed[count] = task
    return count + 1


@compiled
def take_out(
    tasks: Tasks, rows: Ints, blocks: Blocks, chosen: Ints, changed: Ints, count: int
) -> tuple[int, int]:
    """Take the tasks and dependencies of `chosen` blocks out; return FINE or DANGLING, and `count`.

    DANGLING: another block owns a dependency on a task of theirs. Then only their dependencies are out.
    """
    for block in chosen:
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            tasks.flags[task] = REMOVED
    for block in chosen:
        for row in range(blocks.row[block], blocks.row[block] + blocks.rows[block]):
            unlink(tasks, rows, row)
            count = note_changed(tasks, rows[row, TARGET], changed, count)
    for block in chosen:
        for task in range(blocks.task[block], blocks.task[block] + blocks.tasks[block]):
            if tasks.first_in[task] != NONE or tasks.first_out[task] != NONE:
                return DANGLING, count
    return FINE, count


@compiled
def put_in(
    tasks: Tasks, rows: Ints, blocks: Blocks, change: Change, changed: Ints, count: int
) -> tuple[int, int]:
    """Write what takes the place of the blocks; return how that went, and how many tasks are changed.

    Unless it is FINE, what was linked before the dependency at fault has been taken out again.
    """
    spans = change.spans
    given = 0
    for which, block in enumerate(change.block):
        blocks.task[block], blocks.tasks[block] = spans.task[which], spans.tasks[which]
        blocks.row[block], blocks.rows[block] = spans.row[which], spans.rows[which]
        for index in range(spans.tasks[which]):
            task = spans.task[which] + index
            tasks.resource[task], tasks.seconds[task] = change.resource[given], change.seconds[given]
            tasks.key[task] = np.int64(block) << INDEX_BITS | index
            tasks.first_in[task] = tasks.first_out[task] = NONE
            tasks.predecessors[task] = 0
            tasks.flags[task] = NEW
            given += 1
    given = 0
    for which in range(len(change.block)):
        for row in range(spans.row[which], spans.row[which] + spans.rows[which]):
            fault = write_dependency(tasks, rows, row, blocks, change.dependencies[given])
            if fault != FINE:
                for other in range(which + 1):
                    end = row if other == which else spans.row[other] + spans.rows[other]
                    for linked in range(spans.row[other], end):
                        unlink(tasks, rows, linked)
                return fault, count
            link(tasks, rows, row)
            count = note_changed(tasks, rows[row, TARGET], changed, count)
            given += 1
    return FINE, count


@compiled
def write_dependency(tasks: Tasks, rows: Ints, row: int, blocks: Blocks, given: Ints) -> int:
    """Write a dependency's ends; return what is wrong with it, if anything."""
    for end in range(2):
        block, index = given[2 * end], given[2 * end + 1]
        if not 0 <= block < len(blocks.task) or not 0 <= index < blocks.tasks[block]:
            return UNKNOWN_TASK
        rows[row, end] = blocks.task[block] + index
    if tasks.key[rows[row, SOURCE]] >= tasks.key[rows[row, TARGET]]:
        return BACKWARD
    return FINE


@compiled
def put_back(tasks: Tasks, rows: Ints, blocks: Blocks, chosen: Ints, spans: Blocks, linked: bool) -> None:
    """Undo `take_out` and, where `linked`, `put_in`: give `chosen` blocks their former `spans` again."""
    if linked:
        for block in chosen:
            for row in range(blocks.row[block], blocks.row[block] + blocks.rows[block]):
                unlink(tasks, rows, row)
    for which, block in enumerate(chosen):
        blocks.task[block], blocks.tasks[block] = spans.task[which], spans.tasks[which]
        blocks.row[block], blocks.rows[block] = spans.row[which], spans.rows[which]
        for task in range(spans.task[which], spans.task[which] + spans.tasks[which]):
            tasks.flags[task] = 0
        for row in range(spans.row[which], spans.row[which] + spans.rows[which]):
            link(tasks, rows, row)
