"""The tasks of a block: what operator groups compute, what goes between them, how parameters are updated.

A communication is a task for each member and for each lane that it occupies, all at once: it begins when all
members are ready, of which each takes a little time of its own to begin with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

from partc.compiler.task_graphs.task_prices import Moved, Sent, TaskPrices
from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.cost.simulation.task_arrays import Floats, Ints, Longs
from partc.passes.layouts.boxes import box_of
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh
from partc.passes.scheduling.segment_work import Work
from partc.passes.search.group_layouts import CollectiveKind, GroupLayout, Placements
from partc.passes.search.grouped_step import Way
from partc.runtime.plan.moves import region_of
from partc.runtime.plan.program import Region
from partc.runtime.plan.record import Range

OWN = -1  # the slot of the block itself

Axes = tuple[tuple[str, int], ...]
MeshPlace = tuple[Axes, tuple[int, ...]]  # a mesh's axes, and the workers at its places
Task = tuple[int, int]  # the slot of its block, and its index there
Where = tuple[MeshPlace, Placements]
Sum = tuple[CollectiveKind, int]  # along which mesh axis


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A group's layout, and the workers at the places of its mesh."""

    layout: GroupLayout
    place: MeshPlace

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the workers at the mesh's places."""
        return self.place[1]

    def lines(self, axis: int) -> list[tuple[int, ...]]:
        """Return the workers of every line along an axis, where that is more than one."""
        if self.layout.mesh.size(axis) == 1:
            return []
        lines = self.layout.mesh.lines(axis)
        return [tuple(self.workers[position] for position in line) for line in lines]


@dataclass(frozen=True, slots=True, eq=False)
class TaskBlock:
    """Tasks that may stand for several alike blocks, and where others find their results.

    rows    int32[n, 2]: dependencies among the tasks, source and target
    links   slot of another block -> int32[n, 2]: its task, and the one here that depends on it
    done    of computing: worker -> its last task
    gates   of a transfer: how a reader wants it -> the task behind it
    cuts    of a transfer: likewise, the bytes of a part that a reader cuts out of what it has
    memory  of an update: bytes of variables, float64[workers]
    sent    bytes that workers send each other
    """

    resources: Ints
    seconds: Floats
    rows: Ints
    links: Mapping[int, Ints]
    sent: float
    done: Mapping[int, int] = field(default_factory=dict)
    gates: Mapping[Where, int] = field(default_factory=dict)
    cuts: Mapping[Where, int] = field(default_factory=dict)
    memory: Floats | None = None


class Draft:
    """A block that is being written."""

    def __init__(self, prices: TaskPrices) -> None:
        self._prices = prices
        self._resources: list[int] = []
        self._seconds: list[float] = []
        self._rows: list[tuple[int, int]] = []
        self._links: dict[int, list[tuple[int, int]]] = {}
        self._sent = 0.0

    def task(self, resource: int, seconds: float, after: Iterable[Task]) -> Task:
        """Add a task behind others."""
        index = len(self._resources)
        self._resources.append(resource)
        self._seconds.append(seconds)
        for slot, source in after:
            rows = self._rows if slot == OWN else self._links.setdefault(slot, [])
            rows.append((source, index))
        return OWN, index

    def join(self, after: Iterable[Task]) -> Task:
        """Add a task that takes no time, behind others."""
        return self.task(self._prices.gate, 0.0, after)

    def communicate(self, moved: Moved, members: Sequence[int], ends: Mapping[int, Task]) -> Task:
        """Add a communication of workers, each ready at its end in `ends`; return the task behind it."""
        self._sent += moved.nbytes
        own = [
            self.task(member, PER_COMMUNICATION_S, [ends[member]] if member in ends else [])
            for member in members
        ]
        begin = self.join(own)
        parts = [self.task(self._prices.communicating(m), moved.seconds, [begin]) for m in members]
        for lane, seconds in zip(moved.lanes.tolist(), moved.occupied_s.tolist(), strict=True):
            parts.append(self.task(self._prices.lane(lane), seconds, [begin]))
        return self.join(parts)

    def sum_along(
        self, placed: Placed, kind: CollectiveKind, axis: int, nbytes: int, ends: dict[int, Task]
    ) -> None:
        """Add a collective of every line along a mesh axis, behind `ends`, which it changes."""
        for members in placed.lines(axis):
            gate = self.communicate(self._prices.collective(kind, nbytes, members), members, ends)
            ends.update(dict.fromkeys(members, gate))

    def finish(self, **results: object) -> TaskBlock:
        """Return the block. `results`: the other fields of TaskBlock."""
        return TaskBlock(
            np.array(self._resources, np.int32),
            np.array(self._seconds, np.float64),
            _pairs(self._rows),
            {slot: _pairs(rows) for slot, rows in self._links.items()},
            self._sent,
            **results,  # type: ignore[arg-type]
        )


def _pairs(rows: Sequence[tuple[int, int]]) -> Ints:
    return np.array(rows, np.int32).reshape(-1, 2)


# ---------------------------------------------------------------- computing


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor that a group reads on one way: the slots and blocks of what sends it and of what makes it."""

    wanted: tuple[Placements, ...]
    transfer: tuple[int, TaskBlock] | None
    maker: tuple[int, TaskBlock] | None


def write_computing(prices: TaskPrices, placed: Placed, way: Way, reads: Sequence[Read]) -> TaskBlock:
    """Return what a group does on one way: a task on each worker, then its collectives."""
    draft = Draft(prices)
    gates: dict[Task, None] = {}  # which all workers wait for
    makers: dict[int, TaskBlock] = {}
    cut_bytes = 0
    for read in reads:
        for placements in read.wanted:
            where = placed.place, placements
            if read.transfer is not None and where in read.transfer[1].gates:
                gates[read.transfer[0], read.transfer[1].gates[where]] = None
            elif read.maker is not None:
                makers[read.maker[0]] = read.maker[1]
            cut_bytes += 0 if read.transfer is None else read.transfer[1].cuts.get(where, 0)
    collectives = _joined(placed.layout, way)
    seconds = prices.work_s(placed.layout.work[way], bool(gates) + len(collectives))
    if cut_bytes:
        seconds = seconds + prices.work_s(Work(0, 2 * cut_bytes, 2 * cut_bytes, 1, 0), 0)
    ends: dict[int, Task] = {}
    for worker in placed.workers:
        made = [(slot, maker.done[worker]) for slot, maker in makers.items() if worker in maker.done]
        ends[worker] = draft.task(worker, float(seconds[worker]), [*gates, *made])
    for (_, kind, axis), nbytes in sorted(collectives.items()):
        draft.sum_along(placed, kind, axis, nbytes, ends)
    return draft.finish(done={worker: index for worker, (_, index) in ends.items()})


def _joined(layout: GroupLayout, way: Way) -> dict[tuple[int, CollectiveKind, int], int]:
    """Return a way's collectives, those of a level, kind and axis as one: bytes."""
    joined: dict[tuple[int, CollectiveKind, int], int] = {}
    for each in layout.collectives[way]:
        key = each.level, each.kind, each.axis
        joined[key] = joined.get(key, 0) + each.nbytes
    return joined


# ---------------------------------------------------------------- transfers


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of a tensor that groups send each other."""

    shape: tuple[int, ...]
    itemsize: int


def write_transfer(
    prices: TaskPrices,
    tensor: Tensor,
    source: Placed,
    has: Placements,
    made: TaskBlock | None,
    readers: Iterable[tuple[Placed, tuple[Placements, ...]]],
) -> TaskBlock:
    """Return what sends a tensor to all who want it elsewhere, once to equal meshes. `made`: in slot 0."""
    draft = Draft(prices)
    ends = {} if made is None else {worker: (0, index) for worker, index in made.done.items()}
    gates: dict[Where, int] = {}
    cuts: dict[Where, int] = {}
    for reader, wanted in readers:
        for placements in wanted:
            where = reader.place, placements
            if where in gates or where in cuts or where == (source.place, has):
                continue
            if sent := moves_between(tensor, (source.place, has), where, prices.hosts):
                members = tuple(dict.fromkeys((*source.workers, *reader.workers)))
                gates[where] = draft.communicate(prices.exchange(sent), members, ends)[1]
            elif placements != has:
                share = reader.layout.mesh.share(Layout("", *placements))
                cuts[where] = -(-prod(tensor.shape) * tensor.itemsize // share)
    return draft.finish(gates=gates, cuts=cuts)


@lru_cache(maxsize=1 << 16)
def moves_between(tensor: Tensor, source: Where, target: Where, hosts: tuple[str, ...]) -> Sent:
    """Return what goes from worker to worker for a tensor to be had elsewhere, as `find_moves` chooses it."""
    if not prod(tensor.shape):
        return ()
    ((axes, workers), placements), ((other_axes, others), wanted) = source, target
    regions, elements = _overlaps(tensor.shape, (axes, placements), (other_axes, wanted))
    holders: dict[int, list[int]] = {}
    for worker, region in zip(workers, regions, strict=True):
        holders.setdefault(region, []).append(worker)
    had = dict(zip(workers, regions, strict=True))
    sent_by = dict.fromkeys(workers, 0)
    sent: dict[tuple[int, int], int] = {}
    columns = dict(zip(others, elements.T, strict=True))
    for worker in (worker for worker in dict.fromkeys((*workers, *others)) if worker in columns):
        column = columns[worker]
        for region in np.flatnonzero(column).tolist():
            if had.get(worker) == region:
                continue
            near = [each for each in holders[region] if hosts[each] == hosts[worker]]
            sender = min(near or holders[region], key=sent_by.__getitem__)
            nbytes = int(column[region]) * tensor.itemsize
            sent_by[sender] += nbytes
            sent[sender, worker] = sent.get((sender, worker), 0) + nbytes
    return tuple(sorted(sent.items()))


Cut = tuple[Axes, Placements]


@lru_cache(maxsize=1 << 14)
def _overlaps(shape: tuple[int, ...], source: Cut, target: Cut) -> tuple[tuple[int, ...], Longs]:
    """Return the region at each place of the source, numbered, and how many elements of each region those at
    each place of the target want, int64[regions, places]."""
    has, wants = _regions(shape, source), _regions(shape, target)
    numbers = {region: number for number, region in enumerate(dict.fromkeys(has))}
    elements = np.ones((len(numbers), len(wants)), np.int64)
    for axis in range(len(shape)):
        ours = {ranges: n for n, ranges in enumerate(dict.fromkeys(region[axis] for region in numbers))}
        theirs = {ranges: n for n, ranges in enumerate(dict.fromkeys(region[axis] for region in wants))}
        rows = [ours[region[axis]] for region in numbers]
        columns = [theirs[region[axis]] for region in wants]
        elements *= _common_lengths(list(ours), list(theirs))[np.ix_(rows, columns)]
    return tuple(numbers[region] for region in has), elements


@lru_cache(maxsize=1 << 14)
def _regions(shape: tuple[int, ...], cut: Cut) -> tuple[Region, ...]:
    axes, placements = cut
    mesh, layout = Mesh("own", axes), Layout("own", *placements)
    places = range(prod(size for _, size in mesh.grid))
    return tuple(region_of(box_of(mesh, layout, shape, mesh.coordinates(place))) for place in places)


def _common_lengths(ours: Sequence[tuple[Range, ...]], theirs: Sequence[tuple[Range, ...]]) -> Longs:
    """Return how long what every two have in common is. Ranges of one do not overlap."""
    (starts, stops), (other_starts, other_stops) = (
        np.array([span for ranges in each for span in ranges], np.int64).T for each in (ours, theirs)
    )
    common = np.minimum.outer(stops, other_stops) - np.maximum.outer(starts, other_starts)
    begins, other_begins = (np.cumsum([0, *(len(ranges) for ranges in each[:-1])]) for each in (ours, theirs))
    own = np.add.reduceat(common.clip(min=0), begins, axis=0)
    return np.add.reduceat(own, other_begins, axis=1)
