"""Change a tensor's layout. All communication of dense tensors is made here.

partial -> whole     AllReduce (if aggregation was placed here; behind it ops run whole)
split -> whole       made of what was gathered; AllGather of pieces as they are; AllGatherRows, the split
                     axis in front
partial -> split     ReduceScatter
whole -> split       made in part, or cut locally (cut_part.py)
split -> widened     ShiftAhead, ShiftBack (widen.py)
split -> overlapping Exchange, and padding (widen.py)
worker partial -> rows owned by servers      Push
rows owned by servers -> whole               Pull, or ShareRows and SpreadRows (gather_owned.py)
rows requested of servers -> where they return   AllToAllRows, ScatterRows (request_rows.py)
whole, from workers to servers and back      ToServers, ToWorkers
as it is, from one stage to another          ToStage: a piece to the rank at its place; sums are made before
among meshes of other shapes                 Exchange: what each rank wants, of those who have it
"""

from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.request_rows import return_rows
from partc.passes.layouts.layouts import (
    REPLICAS,
    Gathered,
    Layout,
    Owned,
    Partial,
    PerReplica,
    Replicate,
    RequestedRows,
    Split,
)
from partc.passes.lowering.cut_part import Fold, cut_part, local_blocks
from partc.passes.lowering.exchange import exchange
from partc.passes.lowering.gather_owned import gather_owned, has_parameter_rows, take_owned_slices
from partc.passes.lowering.last_change import LayoutChange, last_change
from partc.passes.lowering.lowered_graph import PieceCut, constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.widen import overlap, pad_overlapping, widen
from partc.runtime.plan.program import Site

WORKER_WHOLE = Layout("worker")
SERVER_WHOLE = Layout("server")
INT64 = np.dtype(np.int64)


def reshard(lowering: Lowering, tensor: str, native: Layout, wanted: Layout) -> gs.Tensor:
    """Return the value that holds `tensor` as wanted, communicating as little as is known."""
    source, target = native.along(REPLICAS), wanted.along(REPLICAS)
    if isinstance(source, RequestedRows):
        back = Layout("worker", source.returned)
        return (
            return_rows(lowering, tensor, source)
            if wanted == back
            else reshard(lowering, tensor, back, wanted)
        )
    if isinstance(target, Gathered):
        return gather_owned(lowering, tensor, Owned(target.parameter), wanted)
    if isinstance(target, Owned):
        return _to_owners(lowering, tensor, native, wanted)
    if any(beyond.within != beyond for _, beyond in wanted.overlapping()):
        return pad_overlapping(lowering, tensor, wanted)
    if "server" in (native.site, wanted.site) and native.site != wanted.site:
        return _to_other_site(lowering, tensor, native, wanted)
    if native.site != wanted.site:
        sent = _sums_made(native)
        if not lowering.graph.meshes.are_paired(sent.site, wanted.site):
            native = _placed_apart(lowering, tensor, sent, wanted)
            if native == wanted:
                return exchange(lowering, tensor, sent, wanted)
        elif wanted.placements == sent.placements:
            return _to_stage(lowering, tensor, sent, wanted)
        else:
            native = Layout(wanted.site, *sent.placements)
    if isinstance(source, Gathered) and isinstance(target, Replicate):
        return lowering.need(tensor, native)
    if wanted.widened():
        return widen(lowering, tensor, native, wanted)
    if wanted.overlapping():
        return overlap(lowering, tensor, native, wanted)
    for axis in range(len(native.placements)):
        if lowering.graph.sums_before(tensor, axis) and isinstance(wanted.along(axis), Replicate):
            native = native.with_along(axis, Replicate())
    if _moves_between_splits(lowering, tensor, native, wanted):
        return exchange(lowering, tensor, native, wanted)
    shape = lowering.facts.shape(tensor)
    meshes = lowering.graph.meshes
    change = last_change(native, wanted, lambda layout: meshes.divides(layout, shape), meshes.microbatch_axis)
    return _change_axis(lowering, tensor, wanted, change)


def _moves_between_splits(lowering: Lowering, tensor: str, native: Layout, wanted: Layout) -> bool:
    """Tell whether ranks of a mesh have one part and want another: gathering would bring them all parts."""
    axes = range(max(len(native.placements), len(wanted.placements)))
    pairs = [(native.along(axis), wanted.along(axis)) for axis in axes]
    are_pieces = all(
        (isinstance(own, Split | Replicate) and isinstance(p, Split | Replicate))
        or (isinstance(own, PerReplica) and own == p)
        for own, p in pairs
    )
    is_moved = any(isinstance(own, Split) and isinstance(p, Split) and own != p for own, p in pairs)
    micro = lowering.graph.meshes.microbatch_axis
    if not (are_pieces and is_moved and lowering.graph.has_fixed_pieces(tensor)) or wanted.site == "server":
        return False
    return micro is None or lowering.graph.meshes.have_same_samples(native, wanted)


def _sums_made(layout: Layout) -> Layout:
    return Layout(layout.site, *(Replicate() if isinstance(p, Partial) else p for p in layout.placements))


def _placed_apart(lowering: Lowering, tensor: str, sent: Layout, wanted: Layout) -> Layout:
    """Return how a tensor arrives from a mesh of another shape: as it is wanted, as far as that goes."""
    for axis, widened in wanted.widened():
        wanted = wanted.with_along(axis, Split(widened.axis))
    micro = lowering.graph.meshes.microbatch_axis
    if micro is None or lowering.graph.meshes.have_same_samples(sent, wanted):
        return wanted
    return wanted.with_along(micro, Replicate())


def _to_stage(lowering: Lowering, tensor: str, source: Layout, wanted: Layout) -> gs.Tensor:
    """Send each rank's piece to the rank at its place in another mesh of the same shape."""
    operand = lowering.need(tensor, source)
    result = _result(lowering, tensor, wanted)
    if lowering.graph.has_fixed_pieces(tensor, source):
        lowering.out.communicate("ToStage", [operand], [result], site=source.site, to=wanted.site)
        return result
    counts = gs.Variable(f"{result.name}.counts", dtype=INT64)
    lowering.out.nbytes.setdefault(operand.name, lowering.local_nbytes(tensor, source))
    lowering.out.communicate(
        "RowsToStage", [operand], [result], received_counts=counts, site=source.site, to=wanted.site
    )
    return result


def _change_axis(lowering: Lowering, tensor: str, wanted: Layout, change: LayoutChange) -> gs.Tensor:
    source, target = change.before.along(change.axis), wanted.along(change.axis)
    if isinstance(source, Partial):
        reduces = _all_reduce if isinstance(target, Replicate) else _reduce_scatter
        return reduces(lowering, tensor, wanted, change)
    if isinstance(source, Split):
        joined = lowering.join_locally(tensor, wanted, change.axis)
        return joined if joined is not None else _all_gather(lowering, tensor, wanted, change)
    whole = lowering.need(tensor, change.before)
    if isinstance(target, Split):
        part = lowering.split_locally(tensor, wanted, change.axis)
        return part if part is not None else cut_part(lowering, tensor, whole, wanted, change)
    assert not (isinstance(source, PerReplica) and lowering.graph.replicas > 1), (
        f"{tensor} of one replica is no sum of all"
    )
    return whole  # a replica's own value, or the one term of a zero, is the whole


def _reduce_scatter(lowering: Lowering, tensor: str, wanted: Layout, change: LayoutChange) -> gs.Tensor:
    """Sum a partial tensor and keep a part."""
    split, partial = wanted.along(change.axis), change.before.along(change.axis)
    assert isinstance(split, Split)
    assert isinstance(partial, Partial)
    whole = wanted.with_along(change.axis, Replicate())
    graph = lowering.graph
    is_local = change.axis == graph.meshes.microbatch_axis  # each rank makes the sum itself
    is_summed = (tensor, change.axis) in graph.made_whole | graph.summed_anyway
    if is_local or is_summed or not graph.has_fixed_pieces(tensor, whole):
        return cut_part(lowering, tensor, lowering.need(tensor, whole), wanted, change)
    operand = lowering.need(tensor, change.before)
    result = _result(lowering, tensor, wanted)
    lowering.out.communicate(
        "ReduceScatter",
        [operand],
        [result],
        site=wanted.site,
        axes=(change.axis,),
        reduction=partial.reduction,
        cut=_cut_of(lowering, whole, split),
    )
    return result


def _cut_of(lowering: Lowering, whole: Layout, split: Split) -> PieceCut:
    """Return where a tensor that is laid out as `whole` is cut, as its shape is on a rank."""
    blocks = local_blocks(lowering, whole, split)
    assert isinstance(blocks, int), "pieces are of fixed shapes"
    here = [axis for axis, p in whole.splits() if (p.axis, p.outer) == (split.axis, split.outer)]
    mesh = lowering.graph.meshes.of(whole.site)
    return PieceCut(split.axis, blocks, split.uneven // prod(map(mesh.size, here)))


def _all_reduce(lowering: Lowering, tensor: str, wanted: Layout, change: LayoutChange) -> gs.Tensor:
    assert (tensor, change.axis) in lowering.graph.made_whole, (
        f"{tensor} is wanted whole behind its aggregation"
    )
    placement = change.before.along(change.axis)
    assert isinstance(placement, Partial)
    operand = lowering.need(tensor, change.before)
    result = _result(lowering, tensor, wanted)
    lowering.out.communicate(
        "AllReduce", [operand], [result], site=wanted.site, axes=(change.axis,), reduction=placement.reduction
    )
    return result


def _to_other_site(lowering: Lowering, tensor: str, native: Layout, wanted: Layout) -> gs.Tensor:
    if not wanted.is_whole:
        return reshard(lowering, tensor, WORKER_WHOLE, wanted)
    if isinstance(owned := native.along(REPLICAS), Owned):
        return gather_owned(lowering, tensor, owned, wanted)
    operand = lowering.need(tensor, Layout(native.site))
    result = _result(lowering, tensor, wanted)
    op = "ToServers" if wanted.site == "server" else "ToWorkers"
    lowering.out.communicate(op, [operand], [result])
    return result


def _to_owners(lowering: Lowering, tensor: str, native: Layout, wanted: Layout) -> gs.Tensor:
    owned, source = wanted.along(REPLICAS), native.along(REPLICAS)
    assert isinstance(owned, Owned)
    if native.site == "worker" and isinstance(source, Partial):
        operand = lowering.need(tensor, native)
        result = _result(lowering, tensor, wanted)
        lowering.out.communicate("Push", [operand], [result], owner=owned.parameter)
        return result
    if isinstance(source, Gathered) and not has_parameter_rows(lowering, tensor, owned.parameter):
        return take_owned_slices(lowering, tensor, source)
    constant_rows = _make_owned_constant(lowering, tensor, owned)
    if constant_rows is not None:
        return constant_rows
    whole = lowering.need(tensor, SERVER_WHOLE)
    first = lowering.out.first_row(owned.parameter)
    rows = lowering.out.row_count(owned.parameter)
    end = lowering.out.emit("Add", [first, rows], f"{tensor}.end.{owned.parameter}", INT64, "server")
    axis = constant(f"{tensor}.axis.{owned.parameter}", [0], np.int64)
    name = lowering.value_name(tensor, wanted)
    return lowering.out.emit("Slice", [whole, first, end, axis], name, whole.dtype, "server")


def _make_owned_constant(lowering: Lowering, tensor: str, owned: Owned) -> gs.Tensor | None:
    """Make the owned rows of a constant that an op spells by its shape."""
    producers = lowering.source(tensor).inputs
    if not producers or producers[0].op not in ("ConstantOfShape", "Expand"):
        return None
    node = producers[0]
    shape = lowering.facts.shape(tensor)
    if node.op == "Expand" and len(lowering.facts.shape(node.inputs[0].name)) >= len(shape):
        return None
    sizes = constant(f"{tensor}.row_shape.{owned.parameter}", list(shape[1:]), np.int64)
    rows = lowering.out.row_count(owned.parameter)
    name = f"{tensor}.shape.{owned.parameter}"
    row_shape = lowering.out.emit("Concat", [rows, sizes], name, INT64, "server", axis=0)
    value = lowering.value_name(tensor, Layout("server", owned))
    dtype = lowering.facts.dtypes[tensor]
    operands = [lowering.need(t.name, SERVER_WHOLE) for t in node.inputs[:-1]]
    return lowering.out.emit(node.op, [*operands, row_shape], value, dtype, "server", **node.attrs)


def _result(lowering: Lowering, tensor: str, layout: Layout) -> gs.Variable:
    name = lowering.value_name(tensor, layout)
    return gs.Variable(name, dtype=lowering.facts.dtypes[tensor])


def _all_gather(lowering: Lowering, tensor: str, wanted: Layout, change: LayoutChange) -> gs.Tensor:
    """Gather pieces of fixed shapes as they are; others with the split factor in front."""
    split = change.before.along(change.axis)
    assert isinstance(split, Split)
    piece = lowering.need(tensor, change.before)
    graph = lowering.graph
    is_local = change.axis == graph.meshes.microbatch_axis  # each rank has all pieces itself
    is_plain = graph.meshes.axes == 1 and tensor not in graph.stored
    is_fixed = not is_plain and graph.has_fixed_pieces(tensor, wanted)
    if is_fixed and not is_local:
        result = _result(lowering, tensor, wanted)
        cut = _cut_of(lowering, wanted, split)
        lowering.out.communicate(
            "AllGather", [piece], [result], site=wanted.site, axes=(change.axis,), cut=cut
        )
        return result
    gather = _join_microbatches if is_fixed else _gather_rows
    nbytes = lowering.out.nbytes
    nbytes.setdefault(piece.name, lowering.local_nbytes(tensor, change.before))
    if split.axis == 0 and split.outer == 1:
        result = _result(lowering, tensor, wanted)
        gather(lowering, piece, result, wanted.site, change.axis)
        return result
    fold = Fold(lowering, tensor, wanted, split)
    front = fold.to_front(piece)
    nbytes[front.name] = nbytes[piece.name]
    gathered = gs.Variable(f"{fold.tensor}.gathered", dtype=front.dtype)
    if is_fixed or change.before.uneven():
        lowering.out.shapes[front.name] = fold.front_shape(split, graph.meshes.size(wanted.site, change.axis))
        lowering.out.shapes[gathered.name] = fold.front_shape(None, 1)
    gather(lowering, front, gathered, wanted.site, change.axis)
    return fold.back(gathered, lowering.value_name(tensor, wanted))


def _join_microbatches(
    lowering: Lowering, piece: gs.Tensor, result: gs.Variable, site: Site, axis: int
) -> None:
    lowering.out.communicate("AllGather", [piece], [result], site=site, axes=(axis,))


def _gather_rows(lowering: Lowering, piece: gs.Tensor, result: gs.Variable, site: Site, axis: int) -> None:
    counts = gs.Variable(f"{result.name}.counts", dtype=INT64)
    lowering.out.communicate(
        "AllGatherRows", [piece], [result], received_counts=counts, site=site, axes=(axis,)
    )
