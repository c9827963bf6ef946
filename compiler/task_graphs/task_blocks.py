"""The tasks of a block, and how they are written: what computes, communicates, and waits for what.

Of the blocks that it waits for a block names no tasks, but workers: what each of them does last there. So it
is the same whatever these blocks consist of.

A communication is one task, which takes the time of all its members and lanes at once: it begins when all
members are ready, of which each takes a little time of its own to begin with. That is of its host, and its
device computes nothing meanwhile: a segment ends where a communication begins, and what a host launches
after it goes ahead of nothing that is before it. A sum by levels is two: the second hands it on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from partc.compiler.task_graphs.mesh_places import MeshPlace, Where
from partc.compiler.task_graphs.task_prices import ComputePrice, PricedCommunication, TaskPrices
from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.cost.simulation.task_arrays import OWN, Floats, Ints
from partc.passes.layouts.layouts import Layout
from partc.passes.search.operators.group_collectives import CollectiveKind
from partc.passes.search.operators.group_layouts import GroupLayout, plain
from partc.passes.search.operators.grouped_step import PassLevel

NOT_HERE = -1  # in place of a worker's task


@dataclass(frozen=True, eq=False)
class PlacedGroup:
    """A group's layout, and the workers at the places of its mesh."""

    layout: GroupLayout
    place: MeshPlace
    _wants: dict[tuple[int, PassLevel], tuple[Where, ...]] = field(default_factory=dict)
    _has: dict[tuple[int, bool], Where] = field(default_factory=dict)

    def wants(self, read: tuple[int, PassLevel]) -> tuple[Where, ...]:
        """Return how the group reads a tensor on one way."""
        if read not in self._wants:
            layouts = self.layout.wants.get(read, ())
            self._wants[read] = tuple(Where.of(self.place, placements) for placements in layouts)
        return self._wants[read]

    def has(self, tensor: int, is_made: bool) -> Where:
        """Return how the group has a tensor that it makes, or keeps: terms if they are summed for readers."""
        key = tensor, is_made
        if key not in self._has:
            layouts = self.layout.has if is_made else self.layout.homes
            has_terms = is_made and tensor in self.layout.has_terms
            placements = plain(layouts.get(tensor, Layout("")), has_terms)
            self._has[key] = Where.of(self.place, placements)
        return self._has[key]

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the workers at the mesh's places."""
        return self.place.workers

    @cached_property
    def at(self) -> Ints:
        """Return the workers at the mesh's places, int32[places]."""
        return np.array(self.workers, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TaskBlock:
    """Tasks that may stand for several alike blocks, and where others find their results.

    parts, resources, seconds  as in BlockTasks
    pairs       int32[m, 2]: indices of which the second task waits for the first
    awaited     by slot of a block that is waited for, int32[n, 2]: a worker, whose last task there, if it has
                one, is waited for, and the task that waits. Of computing one for all slots
    last_tasks  of computing, int32[workers]: the last task of each, NOT_HERE where it has none
    gates       of a transfer: how a reader wants it -> the task behind it
    cuts        of a transfer: likewise, the bytes of a part that a reader cuts out of what it has
    memory      of an update: bytes of variables, float64[workers]
    sent        bytes that workers send each other
    """

    parts: Ints
    resources: Ints
    seconds: Floats
    pairs: Ints
    awaited: tuple[Ints, ...]
    sent: float
    last_tasks: Ints | None = None
    gates: Mapping[Where, int] = field(default_factory=dict)
    cuts: Mapping[Where, int] = field(default_factory=dict)
    memory: Floats | None = None


class Ends:
    """What each worker ended with so far, int32[workers]: a slot and the worker, or OWN and a task's index.

    NOT_HERE in place of either where it has nothing.
    """

    def __init__(self, workers: int) -> None:
        self.slots: Ints = np.full(workers, OWN, np.int32)
        self.indices: Ints = np.full(workers, NOT_HERE, np.int32)

    @staticmethod
    def of(makers: Ints | Sequence[int], slot: int, workers: int) -> "Ends":
        """Return the ends of those who make something in another block."""
        ends = Ends(workers)
        at = np.array(makers, np.int32)
        ends.slots[at], ends.indices[at] = slot, at
        return ends

    def copy(self) -> "Ends":
        """Return equal ends, which change by themselves."""
        ends = Ends(len(self.slots))
        ends.slots[:], ends.indices[:] = self.slots, self.indices
        return ends

    def put(self, workers: Ints | Sequence[int], indices: Ints | int) -> None:
        """Note tasks of the block itself."""
        self.slots[workers], self.indices[workers] = OWN, indices


class Draft:
    """A block that is being written."""

    def __init__(self, prices: TaskPrices) -> None:
        self._prices = prices
        self._count = 0
        self._parts: list[Ints] = []
        self._resources: list[Ints] = []
        self._seconds: list[Floats] = []
        self._rows: list[Ints] = []
        self._sent = 0.0

    def tasks(self, resources: Ints, seconds: Floats) -> Ints:
        """Add tasks that take one resource each; return their indices."""
        count = len(resources)
        self._parts.append(np.ones(count, np.int32))
        self._resources.append(resources)
        self._seconds.append(seconds)
        self._count += count
        return np.arange(self._count - count, self._count, dtype=np.int32)

    def computing(self, workers: Ints, work: ComputePrice) -> Ints:
        """Add what each of these workers computes, behind what launches it where that takes its host time."""
        launching_s, computing_s = work.launching_s[workers], work.computing_s[workers]
        if not launching_s.any():
            return self.tasks(workers, computing_s)
        count = len(workers)
        self._parts.append(np.full(count, 2, np.int32))
        self._resources.append(np.stack((workers + self._prices.launching(0), workers), 1).ravel())
        self._seconds.append(np.stack((launching_s, computing_s), 1).ravel())
        self._count += count
        return np.arange(self._count - count, self._count, dtype=np.int32)

    def joins(self, count: int) -> Ints:
        """Add tasks that take no time; return their indices."""
        self._parts.append(np.zeros(count, np.int32))
        self._count += count
        return np.arange(self._count - count, self._count, dtype=np.int32)

    def task(self, resources: Ints, seconds: Floats) -> int:
        """Add a task that takes several resources at once, or none; return its index."""
        self._parts.append(np.array([len(resources)], np.int32))
        self._resources.append(resources)
        self._seconds.append(seconds)
        self._count += 1
        return self._count - 1

    def wait(self, slots: Ints | int, sources: Ints | int, targets: Ints | int) -> None:
        """Have tasks of the block wait for others, one for one; or all for one. `sources`: as in Ends."""
        rows = np.empty((max(np.size(sources), np.size(targets)), 3), np.int32)
        rows[:, 0], rows[:, 1], rows[:, 2] = slots, sources, targets
        self._rows.append(rows)

    def wait_for_ends(self, ends: Ends, workers: Ints, targets: Ints | int) -> None:
        """Have tasks wait for what workers ended with, where they have any."""
        indices = ends.indices[workers]
        here = indices >= 0
        if not here.all():
            workers, indices = workers[here], indices[here]
            targets = targets if isinstance(targets, int) else targets[here]
        self.wait(ends.slots[workers], indices, targets)

    def communicate(
        self, moved: PricedCommunication, members: Ints, ends: Ends, is_shared: bool = False
    ) -> int:
        """Add a communication of workers, each ready at its end in `ends`; return the task.

        Who has no end there only receives, and begins when all others do, as in a plan's one order.
        `is_shared`: it begins together with others of its slot.
        """
        has_end = ends.indices[members] >= 0
        if has_end.any() and not has_end.all():
            join = self.joins(1)
            self.wait_for_ends(ends, members[has_end], int(join[0]))
            ends = ends.copy()
            ends.put(members[~has_end], join)
        return int(self.communicate_apart((moved,), members[None], ends, is_shared)[0])

    def communicate_apart(
        self, moved: Sequence[PricedCommunication], members: Ints, ends: Ends, is_shared: bool = False
    ) -> Ints:
        """Add communications of different workers, int32[communications, members]; return their tasks."""
        count, each = members.shape
        added = self._count + np.arange(count * (each + 1), dtype=np.int32).reshape(count, each + 1)
        tasks, begun = added[:, -1], added[:, :-1].ravel()
        self._count += count * (each + 1)
        beginning = np.stack((members, members + self._prices.launching(0)), 2).reshape(count, 2 * each)
        parts = np.full((count, each + 1), 2, np.int32)
        parts[:, -1] = [each + len(own.lanes) for own in moved]
        self._parts.append(parts.ravel())
        communicating, lane = members + self._prices.communicating(0), self._prices.lane(0)
        begin_s = np.full(2 * each, -PER_COMMUNICATION_S if is_shared else PER_COMMUNICATION_S)
        for number, own in enumerate(moved):
            self._sent += own.nbytes
            self._resources += (beginning[number], communicating[number], own.lanes + lane)
            self._seconds += (begin_s, np.full(each, own.seconds - own.handed_on_s), own.occupied_s)
        self.wait_for_ends(ends, members.ravel(), begun)
        self.wait(OWN, begun, np.repeat(tasks, each))
        handed_on_s = np.array([own.handed_on_s for own in moved])
        if not handed_on_s.any():
            return tasks
        handed_on = self.tasks(members[:, 0] + self._prices.handing_on(0), handed_on_s)
        self.wait(OWN, tasks, handed_on)
        return handed_on

    def collective_along(
        self, place: MeshPlace, kind: CollectiveKind, axes: tuple[int, ...], nbytes: int, ends: Ends
    ) -> None:
        """Add a collective of all who meet along mesh axes, behind `ends`, which it changes.

        Several axes are summed along at once, or one after the other, the last first, if that takes less.
        """
        in_turn = tuple((axis,) for axis in reversed(axes))
        ways = {(axes,), in_turn}
        for way in min(ways, key=lambda way: (self._sums_s(place, kind, way, nbytes), way)):
            if lines := place.lines(way):
                members = np.array(lines, np.int32)
                tasks = self.communicate_apart(self._prices.collectives(kind, nbytes, lines), members, ends)
                ends.put(members.ravel(), np.repeat(tasks, members.shape[1]))

    def joined(self, ends: Ends, workers: Sequence[int]) -> int:
        """Return the task with which all of these workers have ended, one more where they are several."""
        tasks = set(ends.indices[list(workers)].tolist())
        if len(tasks) == 1:
            return int(tasks.pop())
        join = int(self.joins(1)[0])
        self.wait(OWN, np.array(sorted(tasks), np.int32), join)
        return join

    def _sums_s(
        self, place: MeshPlace, kind: CollectiveKind, ways: tuple[tuple[int, ...], ...], nbytes: int
    ) -> float:
        every = [self._prices.collectives(kind, nbytes, place.lines(way)) for way in ways]
        return sum(PER_COMMUNICATION_S + max(m.seconds for m in lines) for lines in every if lines)

    def finish(
        self,
        last_tasks: Ints | None = None,
        gates: Mapping[Where, int] | None = None,
        cuts: Mapping[Where, int] | None = None,
        memory: Floats | None = None,
    ) -> TaskBlock:
        """Return the block."""
        rows = np.concatenate([NO_ROWS, *self._rows])
        slots = rows[:, 0]
        return TaskBlock(
            np.concatenate([NOTHING, *self._parts]),
            np.concatenate([NOTHING, *self._resources]),
            np.concatenate([NO_SECONDS, *self._seconds]),
            rows[slots == OWN, 1:],
            tuple(rows[slots == slot, 1:] for slot in range(int(slots.max(initial=OWN)) + 1)),
            self._sent,
            last_tasks,
            gates or {},
            cuts or {},
            memory,
        )


NOTHING: Ints = np.zeros(0, np.int32)
NO_SECONDS: Floats = np.zeros(0)
NO_ROWS: Ints = np.zeros((0, 3), np.int32)
