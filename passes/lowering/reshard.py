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
    Layout,
    Partial,
    PerReplica,
    Replicate,
    RequestedRows,
    Split,
    served_rows,
)
from partc.passes.lowering.cut_part import Fold, cut_part, local_blocks
from partc.passes.lowering.exchange import exchange
from partc.passes.lowering.gather_owned import gather_owned, has_parameter_rows, take_owned_slices
from partc.passes.lowering.last_change import LayoutChange, last_change
from partc.passes.lowering.lowered_graph import PieceCut, constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.overlap import overlap, pad_overlapping
from partc.passes.lowering.widen import widen
from partc.runtime.plan.program import Site

WORKER_WHOLE = Layout("worker")
SERVER_WHOLE = Layout("server")
INT64 = np.dtype(np.int64)


def reshard(lowering: Lowering, tensor: str, native: Layout, target: Layout) -> gs.Tensor:
    """Return the value that holds `tensor` as wanted, communicating as little as is known."""
    if isinstance(source := native.along(REPLICAS), RequestedRows):
        back = Layout("worker", source.returned)
        return (
            return_rows(lowering, tensor, source)
            if target == back
            else reshard(lowering, tensor, back, target)
        )
    if target.rows_of:
        return _to_owners(lowering, tensor, native, target)
    if isinstance(source, Partial) and lowering.graph.is_pushed(tensor, REPLICAS):
        return (
            gather_owned(lowering, tensor, lowering.graph.pushed[tensor])
            if target == WORKER_WHOLE
            else reshard(lowering, tensor, WORKER_WHOLE, target)
        )
    if any(beyond.within != beyond for _, beyond in target.overlapping()):
        return pad_overlapping(lowering, tensor, target)
    if "server" in (native.site, target.site) and native.site != target.site:
        return _to_other_site(lowering, tensor, native, target)
    if native.site != target.site:
        sent = _sums_made(native)
        if not lowering.graph.meshes.are_paired(sent.site, target.site):
            native = _placed_apart(lowering, tensor, sent, target)
            if native == target:
                return exchange(lowering, tensor, sent, target)
        elif target.placements == sent.placements:
            return _to_stage(lowering, tensor, sent, target)
        else:
            native = Layout(target.site, *sent.placements)
    if target.widened():
        return widen(lowering, tensor, native, target)
    if target.overlapping():
        return overlap(lowering, tensor, native, target)
    for axis in range(len(native.placements)):
        if lowering.graph.sums_before(tensor, axis) and isinstance(target.along(axis), Replicate):
            native = native.with_along(axis, Replicate())
    if _moves_between_splits(lowering, tensor, native, target):
        return exchange(lowering, tensor, native, target)
    shape = lowering.facts.shape(tensor)
    meshes = lowering.graph.meshes
    change = last_change(native, target, lambda layout: meshes.divides(layout, shape), meshes.microbatch_axis)
    return _change_axis(lowering, tensor, target, change)


def _moves_between_splits(lowering: Lowering, tensor: str, native: Layout, target: Layout) -> bool:
    """Tell whether ranks of a mesh have one part and want another: gathering would bring them all parts."""
    axes = range(max(len(native.placements), len(target.placements)))
    pairs = [(native.along(axis), target.along(axis)) for axis in axes]
    are_pieces = all(
        (isinstance(own, Split | Replicate) and isinstance(p, Split | Replicate))
        or (isinstance(own, PerReplica) and own == p)
        for own, p in pairs
    )
    is_moved = any(isinstance(own, Split) and isinstance(p, Split) and own != p for own, p in pairs)
    micro = lowering.graph.meshes.microbatch_axis
    if not (are_pieces and is_moved and lowering.graph.has_fixed_pieces(tensor)) or target.site == "server":
        return False
    return micro is None or lowering.graph.meshes.have_same_samples(native, target)


def _sums_made(layout: Layout) -> Layout:
    return Layout(layout.site, *(Replicate() if isinstance(p, Partial) else p for p in layout.placements))


def _placed_apart(lowering: Lowering, tensor: str, sent: Layout, target: Layout) -> Layout:
    """Return how a tensor arrives from a mesh of another shape: as it is wanted, as far as that goes."""
    for axis, widened in target.widened():
        target = target.with_along(axis, Split(widened.axis))
    micro = lowering.graph.meshes.microbatch_axis
    if micro is None or lowering.graph.meshes.have_same_samples(sent, target):
        return target
    return target.with_along(micro, Replicate())


def _to_stage(lowering: Lowering, tensor: str, source: Layout, target: Layout) -> gs.Tensor:
    """Send each rank's piece to the rank at its place in another mesh of the same shape."""
    operand = lowering.need(tensor, source)
    result = _result(lowering, tensor, target)
    if lowering.graph.has_fixed_pieces(tensor, source):
        lowering.out.communicate("ToStage", [operand], [result], site=source.site, to=target.site)
        return result
    counts = gs.Variable(f"{result.name}.counts", dtype=INT64)
    lowering.out.nbytes.setdefault(operand.name, lowering.local_nbytes(tensor, source))
    lowering.out.communicate(
        "RowsToStage", [operand], [result], received_counts=counts, site=source.site, to=target.site
    )
    return result


def _change_axis(lowering: Lowering, tensor: str, target: Layout, change: LayoutChange) -> gs.Tensor:
    before, after = change.before.along(change.axis), target.along(change.axis)
    if isinstance(before, Partial):
        reduces = _all_reduce if isinstance(after, Replicate) else _reduce_scatter
        return reduces(lowering, tensor, target, change)
    if isinstance(before, Split):
        joined = lowering.join_locally(tensor, target, change.axis)
        return joined if joined is not None else _all_gather(lowering, tensor, target, change)
    whole = lowering.need(tensor, change.before)
    if isinstance(after, Split):
        part = lowering.split_locally(tensor, target, change.axis)
        return part if part is not None else cut_part(lowering, tensor, whole, target, change)
    assert not (isinstance(before, PerReplica) and lowering.graph.replicas > 1), (
        f"{tensor} of one replica is no sum of all"
    )
    return whole  # a replica's own value, or the one term of a zero, is the whole


def _reduce_scatter(lowering: Lowering, tensor: str, target: Layout, change: LayoutChange) -> gs.Tensor:
    """Sum a partial tensor and keep a part."""
    split, partial = target.along(change.axis), change.before.along(change.axis)
    assert isinstance(split, Split)
    assert isinstance(partial, Partial)
    whole = target.with_along(change.axis, Replicate())
    graph = lowering.graph
    is_local = change.axis == graph.meshes.microbatch_axis  # each rank makes the sum itself
    is_summed = (tensor, change.axis) in graph.made_whole | graph.summed_anyway
    if is_local or is_summed or not graph.has_fixed_pieces(tensor, whole):
        return cut_part(lowering, tensor, lowering.need(tensor, whole), target, change)
    operand = lowering.need(tensor, change.before)
    result = _result(lowering, tensor, target)
    lowering.out.communicate(
        "ReduceScatter",
        [operand],
        [result],
        site=target.site,
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


def _all_reduce(lowering: Lowering, tensor: str, target: Layout, change: LayoutChange) -> gs.Tensor:
    assert (tensor, change.axis) in lowering.graph.made_whole, (
        f"{tensor} is wanted whole behind its aggregation"
    )
    placement = change.before.along(change.axis)
    assert isinstance(placement, Partial)
    operand = lowering.need(tensor, change.before)
    result = _result(lowering, tensor, target)
    lowering.out.communicate(
        "AllReduce", [operand], [result], site=target.site, axes=(change.axis,), reduction=placement.reduction
    )
    return result


def _to_other_site(lowering: Lowering, tensor: str, native: Layout, target: Layout) -> gs.Tensor:
    if not target.is_whole:
        return reshard(lowering, tensor, WORKER_WHOLE, target)
    if native.rows_of:
        return gather_owned(lowering, tensor, native.rows_of)
    operand = lowering.need(tensor, Layout(native.site))
    result = _result(lowering, tensor, target)
    op = "ToServers" if target.site == "server" else "ToWorkers"
    lowering.out.communicate(op, [operand], [result])
    return result


def _to_owners(lowering: Lowering, tensor: str, native: Layout, target: Layout) -> gs.Tensor:
    parameter = target.rows_of
    if native.site == "worker" and isinstance(native.along(REPLICAS), Partial):
        operand = lowering.need(tensor, native)
        result = _result(lowering, tensor, target)
        lowering.out.communicate("Push", [operand], [result], owner=parameter)
        return result
    if tensor in lowering.graph.pushed and not has_parameter_rows(lowering, tensor, parameter):
        return take_owned_slices(lowering, tensor, parameter)
    constant_rows = _make_owned_constant(lowering, tensor, parameter)
    if constant_rows is not None:
        return constant_rows
    whole = lowering.need(tensor, SERVER_WHOLE)
    first = lowering.out.first_row(parameter)
    rows = lowering.out.row_count(parameter)
    end = lowering.out.emit("Add", [first, rows], f"{tensor}.end.{parameter}", INT64, "server")
    axis = constant(f"{tensor}.axis.{parameter}", [0], np.int64)
    name = lowering.value_name(tensor, target)
    return lowering.out.emit("Slice", [whole, first, end, axis], name, whole.dtype, "server")


def _make_owned_constant(lowering: Lowering, tensor: str, parameter: str) -> gs.Tensor | None:
    """Make the owned rows of a constant that an op spells by its shape."""
    producers = lowering.source(tensor).inputs
    if not producers or producers[0].op not in ("ConstantOfShape", "Expand"):
        return None
    node = producers[0]
    shape = lowering.facts.shape(tensor)
    if node.op == "Expand" and len(lowering.facts.shape(node.inputs[0].name)) >= len(shape):
        return None
    sizes = constant(f"{tensor}.row_shape.{parameter}", list(shape[1:]), np.int64)
    rows = lowering.out.row_count(parameter)
    name = f"{tensor}.shape.{parameter}"
    row_shape = lowering.out.emit("Concat", [rows, sizes], name, INT64, "server", axis=0)
    value = lowering.value_name(tensor, served_rows(parameter))
    dtype = lowering.facts.dtypes[tensor]
    operands = [lowering.need(t.name, SERVER_WHOLE) for t in node.inputs[:-1]]
    return lowering.out.emit(node.op, [*operands, row_shape], value, dtype, "server", **node.attrs)


def _result(lowering: Lowering, tensor: str, layout: Layout) -> gs.Variable:
    name = lowering.value_name(tensor, layout)
    return gs.Variable(name, dtype=lowering.facts.dtypes[tensor])


def _all_gather(lowering: Lowering, tensor: str, target: Layout, change: LayoutChange) -> gs.Tensor:
    """Gather pieces of fixed shapes as they are; others with the split factor in front."""
    split = change.before.along(change.axis)
    assert isinstance(split, Split)
    piece = lowering.need(tensor, change.before)
    graph = lowering.graph
    is_local = change.axis == graph.meshes.microbatch_axis  # each rank has all pieces itself
    is_plain = graph.meshes.axes == 1 and tensor not in graph.stored
    is_fixed = not is_plain and graph.has_fixed_pieces(tensor, target)
    if is_fixed and not is_local:
        result = _result(lowering, tensor, target)
        cut = _cut_of(lowering, target, split)
        lowering.out.communicate(
            "AllGather", [piece], [result], site=target.site, axes=(change.axis,), cut=cut
        )
        return result
    gather = _join_microbatches if is_fixed else _gather_rows
    nbytes = lowering.out.nbytes
    nbytes.setdefault(piece.name, lowering.local_nbytes(tensor, change.before))
    if split.axis == 0 and split.outer == 1:
        result = _result(lowering, tensor, target)
        gather(lowering, piece, result, target.site, change.axis)
        return result
    fold = Fold(lowering, tensor, target, split)
    front = fold.to_front(piece)
    nbytes[front.name] = nbytes[piece.name]
    gathered = gs.Variable(f"{fold.tensor}.gathered", dtype=front.dtype)
    if is_fixed or change.before.uneven():
        lowering.out.shapes[front.name] = fold.front_shape(split, graph.meshes.size(target.site, change.axis))
        lowering.out.shapes[gathered.name] = fold.front_shape(None, 1)
    gather(lowering, front, gathered, target.site, change.axis)
    return fold.back(gathered, lowering.value_name(tensor, target))


def _join_microbatches(
    lowering: Lowering, piece: gs.Tensor, result: gs.Variable, site: Site, axis: int
) -> None:
    lowering.out.communicate("AllGather", [piece], [result], site=site, axes=(axis,))


def _gather_rows(lowering: Lowering, piece: gs.Tensor, result: gs.Variable, site: Site, axis: int) -> None:
    counts = gs.Variable(f"{result.name}.counts", dtype=INT64)
    lowering.out.communicate(
        "AllGatherRows", [piece], [result], received_counts=counts, site=site, axes=(axis,)
    )
