"""The tasks of a block: what operator groups compute, what goes between them, how parameters are updated.

A communication is one task, which takes the time of all its members and lanes at once: it begins when all
members are ready, of which each takes a little time of its own to begin with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from partc.compiler.task_graphs.task_prices import ComputePrice, PricedCommunication, TaskPrices
from partc.compiler.task_graphs.tensor_moves import MeshPlace, SentTensor, TensorMoves, Where
from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.cost.simulation.task_arrays import OWN, Floats, Ints
from partc.cost.simulation.task_graph import BlockTasks
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh
from partc.passes.scheduling.segment_work import Work
from partc.passes.search.operators.group_layouts import CollectiveKind, GroupLayout, plain
from partc.passes.search.operators.grouped_step import PassLevel

NOT_HERE = -1  # in place of a worker's task

Task = tuple[int, int]  # the slot of its block, and its index there
Sum = tuple[CollectiveKind, tuple[int, ...]]  # along which mesh axes


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
        """Return how the group has a tensor that it makes, or keeps."""
        key = tensor, is_made
        if key not in self._has:
            layouts = self.layout.has if is_made else self.layout.homes
            self._has[key] = Where.of(self.place, plain(layouts.get(tensor, Layout(""))))
        return self._has[key]

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the workers at the mesh's places."""
        return self.place.workers

    @cached_property
    def at(self) -> Ints:
        """Return the workers at the mesh's places, int32[places]."""
        return np.array(self.workers, np.int32)

    def lines(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the workers who meet along axes, one or several, where they are more than one."""
        return _lines(self.place, axes)


@lru_cache(maxsize=1 << 14)
def _lines(place: MeshPlace, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    mesh = Mesh("own", place.axes)
    lines = mesh.lines(axes)
    if len(lines[0]) == 1:
        return ()
    return tuple(tuple(place.workers[position] for position in line) for line in lines)


@dataclass(frozen=True, slots=True, eq=False)
class LastTasks:
    """The last task of each worker, int32[workers], NOT_HERE where it has none. Equal ones are one object."""

    indices: Ints

    @staticmethod
    def of(indices: Ints) -> "LastTasks":
        """Return the one object."""
        return _last_tasks_of(indices.tobytes())


@cache
def _last_tasks_of(indices: bytes) -> LastTasks:
    return LastTasks(np.frombuffer(indices, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class TaskBlock:
    """Tasks that may stand for several alike blocks, and where others find their results.

    last_tasks  of computing
    gates       of a transfer: how a reader wants it -> the task behind it
    cuts        of a transfer: likewise, the bytes of a part that a reader cuts out of what it has
    memory      of an update: bytes of variables, float64[workers]
    sent        bytes that workers send each other
    """

    tasks: BlockTasks
    sent: float
    last_tasks: LastTasks | None = None
    gates: Mapping[Where, int] = field(default_factory=dict)
    cuts: Mapping[Where, int] = field(default_factory=dict)
    memory: Floats | None = None


class Ends:
    """The last task of each worker so far: its slot and index, int32[workers]; NOT_HERE where it has none."""

    def __init__(self, workers: int) -> None:
        self.slots: Ints = np.full(workers, OWN, np.int32)
        self.indices: Ints = np.full(workers, NOT_HERE, np.int32)

    @staticmethod
    def of(last_tasks: LastTasks | None, slot: int, workers: int) -> "Ends":
        """Return where another block makes something."""
        ends = Ends(workers)
        if last_tasks is not None:
            ends.slots[:], ends.indices[:] = slot, last_tasks.indices
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
        """Have tasks of the block wait for others, one for one; or all for one."""
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

    def communicate(self, moved: PricedCommunication, members: Ints, ends: Ends) -> int:
        """Add a communication of workers, each ready at its end in `ends`; return the task."""
        self._sent += moved.nbytes
        begun = self.tasks(members, np.full(len(members), PER_COMMUNICATION_S))
        self.wait_for_ends(ends, members, begun)
        task = self.task(
            np.concatenate((members + self._prices.communicating(0), moved.lanes + self._prices.lane(0))),
            np.concatenate((np.full(len(members), moved.seconds), moved.occupied_s)),
        )
        self.wait(OWN, begun, task)
        return task

    def sum_along(
        self, placed: PlacedGroup, kind: CollectiveKind, axes: tuple[int, ...], nbytes: int, ends: Ends
    ) -> None:
        """Add a collective of all who meet along mesh axes, behind `ends`, which it changes.

        Several axes are summed along at once, or one after the other, the last first, if that takes less.
        """
        in_turn = tuple((axis,) for axis in reversed(axes))
        for way in min({(axes,), in_turn}, key=lambda way: (self._sums_s(placed, kind, way, nbytes), way)):
            for members in placed.lines(way):
                moved = self._prices.collective(kind, nbytes, members)
                at = np.array(members, np.int32)
                ends.put(at, self.communicate(moved, at, ends))

    def _sums_s(
        self, placed: PlacedGroup, kind: CollectiveKind, ways: tuple[tuple[int, ...], ...], nbytes: int
    ) -> float:
        every = [[self._prices.collective(kind, nbytes, line) for line in placed.lines(way)] for way in ways]
        return sum(PER_COMMUNICATION_S + max(m.seconds for m in lines) for lines in every if lines)

    def finish(
        self,
        last_tasks: LastTasks | None = None,
        gates: Mapping[Where, int] | None = None,
        cuts: Mapping[Where, int] | None = None,
        memory: Floats | None = None,
    ) -> TaskBlock:
        """Return the block."""
        return TaskBlock(
            BlockTasks(
                np.concatenate([NOTHING, *self._parts]),
                np.concatenate([NOTHING, *self._resources]),
                np.concatenate([NO_SECONDS, *self._seconds]),
                np.concatenate([NO_ROWS, *self._rows]),
            ),
            self._sent,
            last_tasks,
            gates or {},
            cuts or {},
            memory,
        )


NOTHING: Ints = np.zeros(0, np.int32)
NO_SECONDS: Floats = np.zeros(0)
NO_ROWS: Ints = np.zeros((0, 3), np.int32)


# ---------------------------------------------------------------- computing


class ComputingInputs(NamedTuple):
    """What a group's tasks on one way are written by.

    gates      tasks that all workers wait for
    makers     slots of blocks of which each worker waits for its own last task
    cut_bytes  of parts that are cut out of what the group has
    """

    placed: PlacedGroup
    way: PassLevel
    gates: tuple[Task, ...]
    makers: tuple[tuple[int, LastTasks], ...]
    cut_bytes: int


def write_computing(prices: TaskPrices, inputs: ComputingInputs) -> TaskBlock:
    """Return what a group does on one way: a task on each worker, then its collectives."""
    draft, placed = Draft(prices), inputs.placed
    collectives = _joined(placed.layout, inputs.way)
    work = prices.work(placed.layout.work[inputs.way], bool(inputs.gates) + len(collectives))
    if inputs.cut_bytes:
        cut = prices.work(Work(0, 2 * inputs.cut_bytes, 2 * inputs.cut_bytes, 1, 0), 0)
        work = ComputePrice(work.launching_s + cut.launching_s, work.computing_s + cut.computing_s)
    tasks = draft.computing(placed.at, work)
    for slot, index in inputs.gates:
        draft.wait(slot, index, tasks)
    workers = len(prices.workers)
    for slot, last_tasks in inputs.makers:
        draft.wait_for_ends(Ends.of(last_tasks, slot, workers), placed.at, tasks)
    ends = Ends(workers)
    ends.put(placed.at, tasks)
    for (_, kind, axes), nbytes in sorted(collectives.items()):
        draft.sum_along(placed, kind, axes, nbytes, ends)
    return draft.finish(last_tasks=LastTasks.of(ends.indices))


def _joined(layout: GroupLayout, way: PassLevel) -> dict[tuple[int, CollectiveKind, tuple[int, ...]], int]:
    """Return a way's collectives, those of a level, kind and axes as one: bytes."""
    joined: dict[tuple[int, CollectiveKind, tuple[int, ...]], int] = {}
    for each in layout.collectives[way]:
        key = each.level, each.kind, each.axes
        joined[key] = joined.get(key, 0) + each.nbytes
    return joined


# ---------------------------------------------------------------- transfers


class TransferInputs(NamedTuple):
    """What sends a tensor: how it is there, who makes it (in slot 0), where else it is wanted, and how."""

    tensor: SentTensor
    here: Where
    last_tasks: LastTasks | None
    targets: tuple[Where, ...]


def write_transfer(moves: TensorMoves, inputs: TransferInputs) -> TaskBlock:
    """Return what sends a tensor to all who want it elsewhere, once to equal meshes."""
    draft, tensor, here = Draft(moves.prices), inputs.tensor, inputs.here
    ends = Ends.of(inputs.last_tasks, 0, len(moves.prices.workers))
    gates: dict[Where, int] = {}
    cuts: dict[Where, int] = {}
    for where in inputs.targets:
        if (moved := moves.priced(tensor, here, where)) is not None:
            gates[where] = draft.communicate(moved, moves.members(here.place, where.place), ends)
        elif where.placements != here.placements:
            cuts[where] = -(-prod(tensor.shape) * tensor.itemsize // where.share)
    return draft.finish(gates=gates, cuts=cuts)
