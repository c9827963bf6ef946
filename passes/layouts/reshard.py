"""The way of a tensor from the layout in which it is made into the one in which it is read: pure.

partial -> whole     AllReduce (if aggregation was placed here; behind it ops run whole)
partial -> split     ReduceScatter
split -> whole       AllGather
whole -> split       Cut, on each rank
split -> widened     Widen: neighbours send their entries
split -> overlapping Exchange within the tensor; Crop of what is whole; Pad beyond the tensor's ends
split -> another     Exchange: AllToAll of what each rank wants, of those who have it
among meshes         ToStage: a piece to the rank at its place; Exchange where the meshes' shapes differ; of
                     the same workers AllReduce, ReduceScatter and AllGather, along an axis of the source's
workers -> servers   Push of terms, ToServers of the whole; TakeRows, on each server, and TakeSlices of
                     what workers made of slices
servers -> workers   Pull of rows, ToWorkers of the whole, ReturnRows of those that were requested

One step is of one mesh axis, of the source's mesh, or of boxes among any ranks. Lowering emits the steps
(passes/lowering/transfer_tensors.py), and the search prices them.
"""

from dataclasses import dataclass, replace
from typing import Literal

from partc.passes.layouts.laid_out_graph import WHOLE_ON_SERVERS, WHOLE_ON_WORKERS, LaidOutGraph
from partc.passes.layouts.last_change import last_change
from partc.passes.layouts.layouts import (
    REPLICAS,
    WORKER,
    Layout,
    Partial,
    PerReplica,
    Replicate,
    RequestedRows,
    Split,
    served_rows,
)

TransferKind = Literal[
    "AllReduce",
    "ReduceScatter",
    "AllGather",
    "Cut",
    "Keep",
    "Widen",
    "Crop",
    "Pad",
    "Exchange",
    "ToStage",
    "Push",
    "Pull",
    "ToServers",
    "ToWorkers",
    "TakeRows",
    "TakeSlices",
    "ReturnRows",
]


COLLECTIVES: tuple[TransferKind, ...] = ("AllReduce", "ReduceScatter", "AllGather")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One step of a tensor's way: from a layout into another. `axis`: of the source's mesh, where it is of
    one."""

    kind: TransferKind
    source: Layout
    target: Layout
    axis: int = REPLICAS


def reshard(graph: LaidOutGraph, tensor: str, target: Layout) -> tuple[Transfer, ...]:
    """Return the way into a layout, first step first. Needs layouts, decisions and the places of sums."""
    native = graph.layout(tensor)
    way: list[Transfer] = []
    while not graph.is_made_so(tensor, native, target):
        way.append(last_transfer(graph, tensor, native, target))
        target = way[-1].source
    return tuple(reversed(way))


def last_transfer(graph: LaidOutGraph, tensor: str, native: Layout, target: Layout) -> Transfer:
    """Return the last step of a tensor's way from a layout into another, which is not that one."""
    if isinstance(requested := native.along(REPLICAS), RequestedRows):
        back = Layout(WORKER, requested.returned)
        if target == back:
            return Transfer("ReturnRows", native, target)
        native = back
    if target.rows_of:
        return _to_rows(graph, tensor, native, target)
    if isinstance(native.along(REPLICAS), Partial) and graph.is_pushed(tensor, REPLICAS):
        native = served_rows(graph.pushed[tensor]) if target == WHOLE_ON_WORKERS else WHOLE_ON_WORKERS
    if any(beyond.within != beyond for _, beyond in target.overlapping()):
        return Transfer("Pad", _within(target), target)
    if "server" in (native.site, target.site) and native.site != target.site:
        return _between_workers_and_servers(graph, tensor, native, target)
    if native.site == target.site:
        native = _summed_before(graph, tensor, native, target)
    else:
        if (delivered := _delivered(graph, tensor, native, target)) is not None:
            return delivered
        sent = _sums_made(native)
        if not graph.meshes.are_paired(sent.site, target.site):
            native = _placed_apart(graph, sent, target)
            if native == target:
                return _exchange(graph, sent, target)
        elif target.placements == sent.placements:
            return Transfer("ToStage", sent, target)
        else:
            native = Layout(target.site, *sent.placements)
    return _within_mesh(graph, tensor, native, target)


def _to_rows(graph: LaidOutGraph, tensor: str, native: Layout, target: Layout) -> Transfer:
    if native.site == WORKER and isinstance(native.along(REPLICAS), Partial):
        return Transfer("Push", native, target)
    if tensor in graph.pushed and not graph.has_rows_of(tensor, target.rows_of):
        return Transfer("TakeSlices", WHOLE_ON_WORKERS, target)
    return Transfer("TakeRows", WHOLE_ON_SERVERS, target)


def _between_workers_and_servers(
    graph: LaidOutGraph, tensor: str, native: Layout, target: Layout
) -> Transfer:
    if not target.is_whole:
        return last_transfer(graph, tensor, WHOLE_ON_WORKERS, target)
    if native.rows_of:
        return Transfer("Pull", native, target)
    return Transfer("ToServers" if target.site == "server" else "ToWorkers", Layout(native.site), target)


def _within(target: Layout) -> Layout:
    """Return a layout without what lies beyond the tensor's ends."""
    for axis, overlapping in target.overlapping():
        target = target.with_along(axis, overlapping.within)
    return target


def _delivered(graph: LaidOutGraph, tensor: str, native: Layout, target: Layout) -> Transfer | None:
    """Return the collective that leaves each worker the part that it is to have on another mesh, if one does.

    Messages among all would bring the same part to each of its readers from afar.
    """
    here = graph.same_parts(target, native.site)
    if here is None or graph.is_made_so(tensor, native, here) or not graph.has_fixed_pieces(tensor):
        return None
    last = last_transfer(graph, tensor, native, here)
    return replace(last, target=target) if last.kind in COLLECTIVES else None


def _summed_before(graph: LaidOutGraph, tensor: str, native: Layout, target: Layout) -> Layout:
    """Return how a tensor is made of operands that are summed before, where it is wanted whole."""
    for axis in range(len(native.placements)):
        if graph.sums_before(tensor, axis) and isinstance(target.along(axis), Replicate):
            native = native.with_along(axis, Replicate())
    return native


def _sums_made(layout: Layout) -> Layout:
    return Layout(layout.site, *(Replicate() if isinstance(p, Partial) else p for p in layout.placements))


def _placed_apart(graph: LaidOutGraph, sent: Layout, target: Layout) -> Layout:
    """Return how a tensor arrives from a mesh of another shape: as it is wanted, as far as that goes."""
    for axis, widened in target.widened():
        target = target.with_along(axis, Split(widened.axis))
    micro = graph.meshes.microbatch_axis
    if micro is None or graph.meshes.have_same_samples(sent, target):
        return target
    return target.with_along(micro, Replicate())


def _exchange(graph: LaidOutGraph, source: Layout, target: Layout) -> Transfer:
    """It is sent as often as it is made: whole micro-batches, or parts of each."""
    micro = graph.meshes.microbatch_axis
    if micro is not None:
        source = source.with_along(micro, target.along(micro))
    return Transfer("Exchange", source, target)


def _within_mesh(graph: LaidOutGraph, tensor: str, native: Layout, target: Layout) -> Transfer:
    if widened := target.widened():
        axis, placement = widened[-1]
        own = Split(placement.axis)
        source = own if native.along(axis) == own else Replicate()
        return Transfer("Widen", target.with_along(axis, source), target, axis)
    if target.overlapping():
        return _overlap(graph, native, target)
    if _moves_between_splits(graph, tensor, native, target):
        return _exchange(graph, native, target)
    return _along_one_axis(graph, tensor, native, target)


def _overlap(graph: LaidOutGraph, native: Layout, target: Layout) -> Transfer:
    source = target
    for axis, overlapping in target.overlapping():
        own = native.along(axis)
        if not (isinstance(own, Split) and (own.axis, own.outer) == (overlapping.axis, 1)):
            return Transfer("Crop", target.with_along(axis, Replicate()), target, axis)
        source = source.with_along(axis, own)
    return _exchange(graph, source, target)


def _moves_between_splits(graph: LaidOutGraph, tensor: str, native: Layout, target: Layout) -> bool:
    """Tell whether ranks of a mesh have one part and want another: gathering would bring them all parts."""
    axes = range(max(len(native.placements), len(target.placements)))
    pairs = [(native.along(axis), target.along(axis)) for axis in axes]
    are_pieces = all(
        (isinstance(own, Split | Replicate) and isinstance(p, Split | Replicate))
        or (isinstance(own, PerReplica) and own == p)
        for own, p in pairs
    )
    is_moved = any(isinstance(own, Split) and isinstance(p, Split) and own != p for own, p in pairs)
    micro = graph.meshes.microbatch_axis
    if not (are_pieces and is_moved and graph.has_fixed_pieces(tensor)) or target.site == "server":
        return False
    return micro is None or graph.meshes.have_same_samples(native, target)


def _along_one_axis(graph: LaidOutGraph, tensor: str, native: Layout, target: Layout) -> Transfer:
    shape, meshes = graph.facts.shape(tensor), graph.meshes
    change = last_change(native, target, lambda layout: meshes.divides(layout, shape), meshes.microbatch_axis)
    source, axis = change.before, change.axis
    own, wanted = source.along(axis), target.along(axis)
    if isinstance(own, Partial) and isinstance(wanted, Split):
        whole = target.with_along(axis, Replicate())
        scatters = _scatters(graph, tensor, axis, whole)
        return Transfer("ReduceScatter" if scatters else "Cut", source if scatters else whole, target, axis)
    if isinstance(own, Partial):
        return Transfer("AllReduce", source, target, axis)
    if isinstance(own, Split):
        return Transfer("AllGather", source, target, axis)
    return Transfer("Cut" if isinstance(wanted, Split) else "Keep", source, target, axis)


def _scatters(graph: LaidOutGraph, tensor: str, axis: int, whole: Layout) -> bool:
    """Tell whether each rank is sent its part of a sum, not a sum that is there whole anyway."""
    is_local = axis == graph.meshes.microbatch_axis  # each rank makes the sum itself
    is_summed = (tensor, axis) in graph.made_whole | graph.summed_anyway
    return not is_local and not is_summed and graph.has_fixed_pieces(tensor, whole)
