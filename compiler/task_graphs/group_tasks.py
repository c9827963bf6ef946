"""The tasks of operator groups: what one computes and sums on a way, and what goes from it to others."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from partc.compiler.task_graphs.mesh_places import Where
from partc.compiler.task_graphs.task_blocks import Draft, Ends, PlacedGroup, TaskBlock
from partc.compiler.task_graphs.task_prices import ComputePrice, TaskPrices
from partc.compiler.task_graphs.tensor_moves import SentTensor, TensorMoves
from partc.compiler.task_graphs.tensor_ways import Gathering, Sum, gathering, is_to_stage, summed_for
from partc.passes.scheduling.segment_work import Work
from partc.passes.search.operators.group_collectives import CollectiveKind
from partc.passes.search.operators.grouped_step import PassLevel

Readers = Mapping[int, tuple[Where, ...]]  # a tensor of a group -> how it is wanted elsewhere


# ---------------------------------------------------------------- computing


def write_computing(
    prices: TaskPrices,
    placed: PlacedGroup,
    way: PassLevel,
    has_gates: bool,
    cut_bytes: int,
    readers: Readers,
) -> TaskBlock:
    """Return what a group does on one way: a task on each worker, then its collectives.

    has_gates  it waits for transfers
    cut_bytes  of parts that are cut out of what the group has
    readers    of what is summed for them; of a tensor without any it does not
    """
    draft = Draft(prices)
    collectives = _joined(placed, way, readers)
    work = prices.work(placed.layout.work[way], has_gates + len(collectives))
    if cut_bytes:
        cut = prices.work(Work(0, 2 * cut_bytes, 2 * cut_bytes, 1, 0), 0)
        work = ComputePrice(work.launching_s + cut.launching_s, work.computing_s + cut.computing_s)
    tasks = draft.computing(placed.at, work)
    draft.wait(0, placed.at, tasks)
    ends = Ends(len(prices.workers))
    ends.put(placed.at, tasks)
    for (_, kind, axes), nbytes in sorted(collectives.items()):
        draft.collective_along(placed.place, kind, axes, nbytes, ends)
    return draft.finish(last_tasks=ends.indices)


def _joined(
    placed: PlacedGroup, way: PassLevel, readers: Readers
) -> dict[tuple[int, CollectiveKind, tuple[int, ...]], int]:
    """Return a way's collectives, those of a level, kind and axes as one: bytes."""
    joined: dict[tuple[int, CollectiveKind, tuple[int, ...]], int] = {}
    for each in placed.layout.collectives[way]:
        key = each.level, each.kind, each.axes
        joined[key] = joined.get(key, 0) + each.nbytes
    for own in (own for own in placed.layout.sums[way] if own.tensor in readers):
        sums, _ = summed_for(placed.has(own.tensor, is_made=True), readers[own.tensor])
        for (kind, axes), nbytes in _bytes_of(placed, sums, own.nbytes):
            key = own.level, kind, axes
            joined[key] = joined.get(key, 0) + nbytes
    return joined


def _bytes_of(placed: PlacedGroup, sums: tuple[Sum, ...], nbytes: int) -> Iterator[tuple[Sum, int]]:
    """Yield sums, one behind the other, and the bytes that each is given of terms of so many."""
    mesh = placed.layout.mesh
    for kind, axes in sums:
        yield (kind, axes), nbytes
        if kind == "reduce_scatter":
            nbytes = -(-nbytes // prod(mesh.size(axis) for axis in axes))


# ---------------------------------------------------------------- transfers


def write_transfer(
    moves: TensorMoves, tensor: SentTensor, here: Where, is_made: bool, targets: Sequence[Where]
) -> TaskBlock:
    """Return what sends a tensor to all who want it elsewhere, once to equal meshes.

    `is_made`: in the step, by the workers who have it; in slot 0. Its terms are summed behind that.
    """
    draft = Draft(moves.prices)
    _, here = summed_for(here, tuple(targets))
    ends = Ends.of(here.place.workers if is_made else (), 0, len(moves.prices.workers))
    nbytes = prod(tensor.shape) * tensor.itemsize
    gates: dict[Where, int] = {}
    cuts: dict[Where, int] = {}
    gathered: dict[Where, int] = {}
    for where in targets:
        way = gathering(here, where)
        if way is None:
            if (moved := moves.priced(tensor, here, where)) is not None:
                members = moves.members(here.place, where.place)
                gates[where] = draft.communicate(moved, members, ends, is_to_stage(here, where))
        elif way.axes:
            if way.target not in gathered:
                gathered[way.target] = _gather(draft, way, nbytes, ends.copy())
            gates[where] = gathered[way.target]
        elif way.target is not here:
            cuts[where] = -(-nbytes // where.share)
    return draft.finish(gates=gates, cuts=cuts)


def _gather(draft: Draft, way: Gathering, nbytes: int, ends: Ends) -> int:
    """Add what gathers a tensor of so many bytes, an axis after the other; return the task behind it."""
    share, place = way.target.share, way.target.place
    for axis in way.axes:
        share *= place.axes[axis][1]
    for axis in reversed(way.axes):
        share //= place.axes[axis][1]
        draft.collective_along(place, "all_gather", (axis,), -(-nbytes // share), ends)
    return draft.joined(ends, place.workers)
