"""Hold the bytes that a plan counts to what layouts say, by index sets of this file's own.

exchange                                 what each receiver lacks of its part, and nothing else
all_reduce, reduce_scatter, all_gather   the whole of what the axis of the mesh shares out
broadcast (to another stage)             the sender's part
shift_ahead, shift_back                  the halo
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np

from partc.passes.layouts.layouts import REPLICAS, WORKER, Layout, PerReplica, Replicate, Split, Widened
from partc.passes.layouts.meshes import Mesh
from partc.runtime.plan.moves import shape_of
from partc.runtime.plan.program import Site, Start
from tests.builders.plans.compiled_steps import Compiled

Axes = list[np.ndarray]  # of each axis of a tensor, bool[size]: the indices that a rank has
DENSE = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "shift_ahead", "shift_back")


def check_bytes(compiled: Compiled) -> int:
    """Return how many communications were counted; those by rows, whose sizes the data tells, are not."""
    counted = 0
    for start in compiled.plan.instructions:
        if isinstance(start, Start) and start.kind == "exchange":
            _check_exchange(compiled, start)
            counted += 1
        elif isinstance(start, Start) and start.kind in DENSE:
            _check_dense(compiled, start)
            counted += 1
    return counted


# ---------------------------------------------------------------- parts


def indices(mesh: Mesh, layout: Layout, shape: Sequence[int], place: Sequence[int]) -> Axes:
    """Return what the rank at a place of the mesh has; `place` has an index for every axis of the mesh."""
    return [_of_axis(mesh, layout, axis, size, place) for axis, size in enumerate(shape)]


def _of_axis(mesh: Mesh, layout: Layout, axis: int, size: int, place: Sequence[int]) -> np.ndarray:
    kept = np.ones(size, bool)
    for number, overlapping in layout.overlapping():
        if overlapping.axis == axis:
            start, stop = overlapping.within.ranges[place[number]]
            kept &= (np.arange(size) >= start) & (np.arange(size) < stop)
    splits = [(number, split) for number, split in layout.splits() if split.axis == axis]
    for outer in {split.outer for _, split in splits}:
        here = [(number, split.uneven) for number, split in splits if split.outer == outer]
        block = size // outer
        entries = max(uneven for _, uneven in here) or prod(mesh.size(number) for number, _ in here)
        own = np.arange(entries)
        for number, _ in here:  # earlier axes of the mesh are the outer ones
            own = np.array_split(own, mesh.size(number))[place[number]]
        kept &= np.isin(np.arange(size) % block // (block // entries), own)
    return kept


def _count(axes: Axes) -> int:
    return prod(int(kept.sum()) for kept in axes)


def largest(mesh: Mesh, layout: Layout, shape: Sequence[int]) -> int:
    """Return the elements of the largest part."""
    places = product(*(range(mesh.size(axis)) for axis in range(len(mesh.axes))))
    return max(_count(indices(mesh, layout, shape, place)) for place in places)


# ---------------------------------------------------------------- exchanges


def _check_exchange(compiled: Compiled, start: Start) -> None:
    assert start.exchange is not None
    plan, lowered = compiled.plan, compiled.compilation.lowered
    (group,) = plan.groups[start.group]
    received: dict[int, int] = {}
    for move in start.exchange.moves:
        if move.source != move.target:
            rank = group[move.target]
            received[rank] = received.get(rank, 0) + prod(shape_of(move.region))
    has = {
        rank: own
        for value in start.reads
        for rank, own in _held(
            compiled, *_at(start.senders, *lowered.meanings[_base(compiled, value)]), value
        )
    }
    tensor, target = lowered.meanings[_value(start.writes[0])]
    shape = compiled.compilation.analysis.facts.shape(tensor)
    lacked = {}
    for rank, (replica, wants) in _held(compiled, tensor, target, start.writes[0]):
        own_replica, own = has.get(rank, (None, None))
        if own is not None and tuple(map(len, own)) != shape:  # replicas' tensors, stacked
            assert own_replica is not None
            own[0] = np.arange(shape[0]) // len(own[0]) == own_replica
            own_replica = replica
        common = 0
        if own is not None and own_replica == replica:
            common = _count([a & b for a, b in zip(own, wants, strict=True)])
        lacked[rank] = _count(wants) - common
    sent = {rank: count for rank, count in lacked.items() if count}
    assert received == sent, (start.label, received, sent)
    assert start.payload_bytes == sum(lacked.values()) * np.dtype(start.exchange.dtype).itemsize


def _at(site: Site, tensor: str, layout: Layout) -> tuple[str, Layout]:
    """Return what a site has: data that several are fed are called alike at all of them."""
    return tensor, Layout(site, *layout.placements)


def _held(
    compiled: Compiled, tensor: str, layout: Layout, value: str
) -> Iterator[tuple[int, tuple[int | None, Axes]]]:
    """Yield each rank of a mesh, the replica whose tensor it has (None: all have the same), and its part."""
    mesh = compiled.compilation.lowered.meshes.of(layout.site)
    workers = [rank.rank for rank in compiled.plan.ranks if rank.replica is not None]
    shape = compiled.compilation.analysis.facts.shape(tensor)
    _, _, microbatch = value.partition("#")
    moment = (int(microbatch or 0),) if mesh.microbatch_axis is not None else ()
    for position, worker in enumerate(mesh.workers):
        place = (*mesh.coordinates(position), *moment)
        is_own = isinstance(layout.along(REPLICAS), PerReplica)
        part = indices(mesh, layout, shape, place)
        yield workers[worker], (place[REPLICAS] if is_own else None, part)


# ---------------------------------------------------------------- dense messages


def _check_dense(compiled: Compiled, start: Start) -> None:
    plan, (place,) = compiled.plan, start.reads
    in_buffer: dict[int, tuple[int, str]] = {}  # offset -> the largest value there
    for piece in plan.slices:
        if piece.buffer == place:
            size = prod(piece.shape)
            if size > in_buffer.get(piece.offset, (-1, ""))[0]:
                in_buffer[piece.offset] = size, piece.value
    values = [value for _, value in in_buffer.values()] or [place]
    itemsize = {buffer.name: np.dtype(buffer.dtype).itemsize for buffer in plan.buffers}.get(place)
    members = dict.fromkeys(map(_whole, values))
    expected = sum(_bytes(compiled, start, value, itemsize) for value in members)
    assert start.payload_bytes == expected, (start.kind, start.label, start.payload_bytes, expected)


def _whole(value: str) -> str:
    """Return what a piece that a segment reads or writes belongs to."""
    return re.sub(r"\.piece\d+(?=#|$)|\.again", "", value)


def _bytes(compiled: Compiled, start: Start, value: str, itemsize: int | None) -> Fraction:
    lowered, facts = compiled.compilation.lowered, compiled.compilation.analysis.facts
    folded = _value(value).partition(".gathered")[0].partition(".fold")[0]
    if folded != _value(value) and folded in facts.dtypes and start.senders == WORKER:
        tensor, layout = folded, Layout(WORKER)  # named so where it is whole
    else:
        tensor, layout = lowered.meanings[_base(compiled, value)]
    mesh, shape = lowered.meshes.of(layout.site), facts.shape(tensor)
    width = itemsize or np.dtype(facts.dtypes[tensor]).itemsize
    met = start.group.partition(".")[2].split("*")  # names of the mesh's axes
    for number, (axis, _) in enumerate(mesh.grid):
        if (axis in met or mesh.group((number,)) == start.group) and not isinstance(
            layout.along(number), Widened
        ):
            layout = layout.with_along(number, Replicate())
    strip = Fraction(1)
    for number, widened in layout.widened():
        layout = layout.with_along(number, Split(widened.axis))
        part = shape[widened.axis] // mesh.size(number)
        halo = widened.before if start.kind == "shift_ahead" else widened.after
        is_sent = mesh.group((number,)) == start.group
        strip *= Fraction(halo if is_sent else widened.before + part + widened.after, part)
    return largest(mesh, layout, shape) * width * strip


def _value(name: str) -> str:
    return name.partition("#")[0]


def _base(compiled: Compiled, name: str) -> str:
    """Return the value that a message's copy, or its form with another axis in front, was made of."""
    lowered = compiled.compilation.lowered
    meanings, value = lowered.meanings, _value(name)
    if value not in meanings and ".sent" in value:
        copies = (node.inputs[0].name for node in lowered.nodes if node.outputs[0].name == value)
        value = next(copies, value)
    parts = value.removesuffix(".front").split(".")
    names = [".".join(parts[:stop]) for stop in range(len(parts), 0, -1)]
    names += [".".join(parts[start:]) for start in range(1, len(parts))]
    return max((name for name in names if name in meanings), key=len, default="")
