"""The messages that bring a tensor from workers to others, and what they take."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import prod

import numpy as np

from partc.compiler.task_graphs.mesh_places import Axes, MeshPlace, Where
from partc.compiler.task_graphs.task_prices import PricedCommunication, TaskPrices
from partc.cost.simulation.task_arrays import Ints, Longs, compiled
from partc.passes.layouts.boxes import box_of
from partc.passes.layouts.layouts import Layout, Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.search.operators.group_layouts import Placements
from partc.runtime.plan.moves import region_of
from partc.runtime.plan.record import Range


@dataclass(frozen=True, slots=True, eq=False)
class SentTensor:
    """What is known of a tensor that groups send each other. Equal ones are one object."""

    shape: tuple[int, ...]
    itemsize: int

    @staticmethod
    @cache
    def of(shape: tuple[int, ...], itemsize: int) -> "SentTensor":
        """Return the one object."""
        return SentTensor(shape, itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Who sends whom how much: int32[n] workers, in order, and int64[n] bytes."""

    sources: Ints
    targets: Ints
    nbytes: Longs

    @staticmethod
    def joined(parts: Sequence["Messages"]) -> "Messages":
        """Return messages in order, those between the same workers as one."""
        sources, targets, nbytes = (
            np.concatenate([getattr(each, name) for each in parts])
            for name in ("sources", "targets", "nbytes")
        )
        most = int(targets.max(initial=0)) + 1
        pairs, numbers = np.unique(sources.astype(np.int64) * most + targets, return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, numbers, nbytes)
        return Messages((pairs // most).astype(np.int32), (pairs % most).astype(np.int32), total)


@dataclass
class TensorMoves:
    """What brings tensors from mesh to mesh. What was asked before is remembered."""

    prices: TaskPrices
    _messages: dict[tuple[SentTensor, Where, Where], Messages] = field(default_factory=dict)
    _priced: dict[tuple[SentTensor, Where, Where], PricedCommunication | None] = field(default_factory=dict)
    _members: dict[tuple[MeshPlace, MeshPlace], Ints] = field(default_factory=dict)

    def members(self, source: MeshPlace, target: MeshPlace) -> Ints:
        """Return the workers of two meshes, int32[n]."""
        key = source, target
        if key not in self._members:
            self._members[key] = np.array(tuple(dict.fromkeys((*source.workers, *target.workers))), np.int32)
        return self._members[key]

    def priced(self, tensor: SentTensor, source: Where, target: Where) -> PricedCommunication | None:
        """Return what it takes to have a tensor elsewhere; None where nothing is sent."""
        key = tensor, source, target
        if key not in self._priced:
            messages = self.messages(tensor, source, target)
            self._priced[key] = (
                self.prices.exchange(messages.sources, messages.targets, messages.nbytes)
                if len(messages.nbytes)
                else None
            )
        return self._priced[key]

    def messages(self, tensor: SentTensor, source: Where, target: Where) -> Messages:
        """Return what is sent for a tensor to be had elsewhere, as `find_moves` chooses it."""
        key = tensor, source, target
        if key not in self._messages:
            self._messages[key] = messages_between(tensor, source, target, self.prices.host_numbers)
        return self._messages[key]


def messages_between(tensor: SentTensor, source: Where, target: Where, hosts: Ints) -> Messages:
    """Return what goes from worker to worker. `hosts`: the number of each worker's host, int32[workers]."""
    place, other = source.place, target.place
    if not prod(tensor.shape):
        nothing = np.zeros(0, np.int32)
        return Messages(nothing, nothing, np.zeros(0, np.int64))
    regions, elements = _overlaps(
        tensor.shape, (place.axes, source.placements), (other.axes, target.placements)
    )
    columns = {worker: column for column, worker in enumerate(other.workers)}
    receivers = [worker for worker in dict.fromkeys((*place.workers, *other.workers)) if worker in columns]
    had = np.full(len(hosts), -1, np.int32)
    had[list(place.workers)] = regions
    rows = choose_senders(
        elements * tensor.itemsize,
        np.array(place.workers, np.int32),
        had,
        np.array(receivers, np.int32),
        np.array([columns[worker] for worker in receivers], np.int32),
        hosts,
    )
    sources, targets = (rows[:, end].astype(np.int32) for end in range(2))
    return Messages.joined([Messages(sources, targets, rows[:, 2])])


@compiled
def choose_senders(
    nbytes: Longs, holders: Ints, had: Ints, receivers: Ints, columns: Ints, hosts: Ints
) -> Longs:
    """Return rows of sender, receiver and bytes, int64[n, 3].

    nbytes   int64[regions, places]: what each place wants of each region
    holders  int32[n]: workers that have a region, `had` int32[workers]: which one
    columns  the place of each receiver. It gets a region it does not have from who has sent least so far, of
             its own host if there is any, the first of equals
    """
    sent = np.zeros(len(hosts), np.int64)
    rows = np.empty((len(receivers) * len(nbytes), 3), np.int64)
    count = 0
    for which, receiver in enumerate(receivers):
        for region in range(len(nbytes)):
            part_bytes = nbytes[region, columns[which]]
            if part_bytes == 0 or had[receiver] == region:
                continue
            best, best_is_near = -1, False
            for holder in holders:
                if had[holder] != region:
                    continue
                is_near = hosts[holder] == hosts[receiver]
                if best < 0 or (is_near and not best_is_near):
                    best, best_is_near = holder, is_near
                elif is_near == best_is_near and sent[holder] < sent[best]:
                    best = holder
            sent[best] += part_bytes
            rows[count, 0], rows[count, 1], rows[count, 2] = best, receiver, part_bytes
            count += 1
    return rows[:count].copy()


PlacedAxes = tuple[Axes, Placements]
Cuts = tuple[tuple[int, Split], ...]  # of an axis 0: into how many parts along each mesh axis that cuts it


@lru_cache(maxsize=1 << 14)
def _overlaps(shape: tuple[int, ...], source: PlacedAxes, target: PlacedAxes) -> tuple[Ints, Longs]:
    """Return the region at each place of the source, numbered, and how many elements of each region those at
    each place of the target want, int64[regions, places]."""
    has, wants = (
        [_part_numbers(size, axis, cut) for axis, size in enumerate(shape)] for cut in (source, target)
    )
    whole = np.zeros(prod(size for _, size in source[0]), np.int64)
    for numbers in has:
        whole = whole * (int(numbers.max()) + 1) + numbers
    _, firsts, inverse = np.unique(whole, return_index=True, return_inverse=True)
    order = np.argsort(firsts)  # regions in the order in which they appear
    regions = np.argsort(order).astype(np.int32)[inverse]
    elements = np.ones((len(firsts), prod(size for _, size in target[0])), np.int64)
    for axis, size in enumerate(shape):
        common = _common_lengths(size, _cuts(axis, source), _cuts(axis, target))
        elements *= common[np.ix_(has[axis][firsts[order]], wants[axis])]
    return regions, elements


def _cuts(axis: int, cut: PlacedAxes) -> Cuts:
    axes, placements = cut
    return tuple(
        (size, replace(split, axis=0))
        for (_, size), split in zip(axes, placements, strict=False)
        if isinstance(split, Split) and split.axis == axis
    )


@lru_cache(maxsize=1 << 14)
def _part_numbers(size: int, axis: int, cut: PlacedAxes) -> Longs:
    """Return which part of an axis of a tensor is at each place of a mesh, int64[places]."""
    axes, placements = cut
    cutting = [n for n, split in enumerate(placements) if isinstance(split, Split) and split.axis == axis]
    numbers, _ = _parts(size, _cuts(axis, cut))
    grid = [size if n in cutting else 1 for n, (_, size) in enumerate(axes)]
    return np.broadcast_to(np.reshape(numbers, grid), [size for _, size in axes]).ravel()


@lru_cache(maxsize=1 << 14)
def _parts(size: int, cuts: Cuts) -> tuple[Longs, tuple[tuple[Range, ...], ...]]:
    """Return the parts of an axis that differ, and the number of each place's, int64[places]."""
    mesh = Mesh("own", tuple(("", parts) for parts, _ in cuts) or (("", 1),))
    layout = Layout("own", *(split for _, split in cuts))
    places = range(prod(size for _, size in mesh.grid))
    regions = [region_of(box_of(mesh, layout, (size,), mesh.coordinates(place)))[0] for place in places]
    numbers = {region: number for number, region in enumerate(dict.fromkeys(regions))}
    return np.array([numbers[region] for region in regions], np.int64), tuple(numbers)


@lru_cache(maxsize=1 << 14)
def _common_lengths(size: int, ours: Cuts, theirs: Cuts) -> Longs:
    """Return how long what every two parts of an axis have in common is, int64[ours, theirs].

    Parts of one side are all of the axis, and do not overlap.
    """
    sides = [_parts(size, cuts)[1] for cuts in (ours, theirs)]
    borders = np.unique([start for parts in sides for ranges in parts for start, _ in ranges])
    common = np.zeros([len(parts) for parts in sides], np.int64)
    owners = []
    for parts in sides:
        starts = np.array([(start, part) for part, ranges in enumerate(parts) for start, _ in ranges])
        starts = starts[np.argsort(starts[:, 0])]
        owners.append(starts[np.searchsorted(starts[:, 0], borders, "right") - 1, 1])
    np.add.at(common, tuple(owners), np.diff(borders, append=size))
    return common
