"""Emit the steps of a tensor's way into another layout. All communication of dense tensors is made here.

A part of a tensor is cut out of the whole only where it cannot be made of parts, and the whole gathered only
where it cannot be made of what was gathered (Lowering.split_locally, join_locally).
"""

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.request_rows import return_rows
from partc.passes.layouts.laid_out_graph import WHOLE_ON_SERVERS
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
from partc.passes.layouts.reshard import Transfer, TransferKind, last_transfer
from partc.passes.lowering.cut_part import Fold, cut_part, local_blocks
from partc.passes.lowering.exchange import exchange
from partc.passes.lowering.gather_owned import gather_owned, take_owned_slices
from partc.passes.lowering.lowered_graph import PieceCut, constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.overlap import crop, pad_overlapping
from partc.passes.lowering.widen import widen
from partc.runtime.plan.program import Site

INT64 = np.dtype(np.int64)


def transfer_tensor(lowering: Lowering, tensor: str, native: Layout, target: Layout) -> gs.Tensor:
    """Return the value that holds a tensor as wanted, communicating as little as is known."""
    transfer = last_transfer(lowering.graph, tensor, native, target)
    return EMITTERS[transfer.kind](lowering, tensor, transfer)


def _return_rows(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    requested = transfer.source.along(REPLICAS)
    assert isinstance(requested, RequestedRows)
    return return_rows(lowering, tensor, requested)


def _to_stage(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Send each rank's piece to the rank at its place in another mesh of the same shape."""
    source, target = transfer.source, transfer.target
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


def _keep(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """A replica's own value, or the one term of a zero, is the whole."""
    is_own = isinstance(transfer.source.along(transfer.axis), PerReplica)
    assert not (is_own and lowering.graph.replicas > 1), f"{tensor} of one replica is no sum of all"
    return lowering.need(tensor, transfer.source)


def _cut(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    whole = lowering.need(tensor, transfer.source)
    is_sum = isinstance(lowering.graph.layout(tensor).along(transfer.axis), Partial)
    part = None if is_sum else lowering.split_locally(tensor, transfer.target, transfer.axis)
    return part if part is not None else cut_part(lowering, tensor, whole, transfer)


def _reduce_scatter(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Sum a partial tensor and keep a part."""
    here, axis = _at_source(lowering, transfer), transfer.axis
    split, partial = here.along(axis), transfer.source.along(axis)
    assert isinstance(split, Split)
    assert isinstance(partial, Partial)
    cut = _cut_of(lowering, here.with_along(axis, Replicate()), split)
    return _collective(lowering, tensor, transfer, reduction=partial.reduction, cut=cut)


def _at_source(lowering: Lowering, transfer: Transfer) -> Layout:
    """Return how a tensor is behind a collective, as the mesh spells it whose ranks take part."""
    here = lowering.graph.same_parts(transfer.target, transfer.source.site)
    assert here is not None, "each worker has its part"
    return here


def _collective(lowering: Lowering, tensor: str, transfer: Transfer, **attributes: object) -> gs.Tensor:
    """Let the ranks along an axis of the source's mesh take part; what they make may be on another."""
    site, to = transfer.source.site, transfer.target.site
    operand = lowering.need(tensor, transfer.source)
    result = _result(lowering, tensor, transfer.target)
    if site != to:
        attributes["to"] = to
    lowering.out.communicate(
        transfer.kind, [operand], [result], site=site, axes=(transfer.axis,), **attributes
    )
    return result


def _cut_of(lowering: Lowering, whole: Layout, split: Split) -> PieceCut:
    """Return where a tensor that is laid out as `whole` is cut, as its shape is on a rank."""
    blocks = local_blocks(lowering, whole, split)
    assert isinstance(blocks, int), "pieces are of fixed shapes"
    here = [axis for axis, p in whole.splits() if (p.axis, p.outer) == (split.axis, split.outer)]
    mesh = lowering.graph.meshes.of(whole.site)
    return PieceCut(split.axis, blocks, split.uneven // prod(map(mesh.size, here)))


def _all_reduce(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    axis = transfer.axis
    assert (tensor, axis) in lowering.graph.made_whole, f"{tensor} is wanted whole behind its aggregation"
    placement = transfer.source.along(axis)
    assert isinstance(placement, Partial)
    return _collective(lowering, tensor, transfer, reduction=placement.reduction)


def _to_other_site(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    operand = lowering.need(tensor, transfer.source)
    result = _result(lowering, tensor, transfer.target)
    lowering.out.communicate(transfer.kind, [operand], [result])
    return result


def _pull(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    return gather_owned(lowering, tensor, transfer.source.rows_of)


def _push(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    operand = lowering.need(tensor, transfer.source)
    result = _result(lowering, tensor, transfer.target)
    lowering.out.communicate("Push", [operand], [result], owner=transfer.target.rows_of)
    return result


def _take_slices(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    return take_owned_slices(lowering, tensor, transfer.target.rows_of)


def _take_rows(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Cut the rows that a server owns out of what servers have whole, or make these alone."""
    target, parameter = transfer.target, transfer.target.rows_of
    constant_rows = _make_owned_constant(lowering, tensor, parameter)
    if constant_rows is not None:
        return constant_rows
    whole = lowering.need(tensor, WHOLE_ON_SERVERS)
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
    operands = [lowering.need(t.name, WHOLE_ON_SERVERS) for t in node.inputs[:-1]]
    return lowering.out.emit(node.op, [*operands, row_shape], value, dtype, "server", **node.attrs)


def _result(lowering: Lowering, tensor: str, layout: Layout) -> gs.Variable:
    name = lowering.value_name(tensor, layout)
    return gs.Variable(name, dtype=lowering.facts.dtypes[tensor])


def _all_gather(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Gather pieces of fixed shapes as they are; others with the split factor in front."""
    source, target, axis = transfer.source, transfer.target, transfer.axis
    split = source.along(axis)
    assert isinstance(split, Split)
    graph = lowering.graph
    if source.site != target.site:
        cut = _cut_of(lowering, _at_source(lowering, transfer), split)
        return _collective(lowering, tensor, transfer, cut=cut)
    if (joined := lowering.join_locally(tensor, target, axis)) is not None:
        return joined
    is_local = axis == graph.meshes.microbatch_axis  # each rank has all pieces itself
    is_plain = graph.meshes.are_replicas and tensor not in graph.stored
    is_fixed = not is_plain and graph.has_fixed_pieces(tensor, target)
    if is_fixed and not is_local:
        return _collective(lowering, tensor, transfer, cut=_cut_of(lowering, target, split))
    piece = lowering.need(tensor, source)
    gather = _join_microbatches if is_fixed else _gather_rows
    nbytes = lowering.out.nbytes
    nbytes.setdefault(piece.name, lowering.local_nbytes(tensor, source))
    if split.axis == 0 and split.outer == 1:
        result = _result(lowering, tensor, target)
        gather(lowering, piece, result, target.site, axis)
        return result
    fold = Fold(lowering, tensor, target, split)
    front = fold.to_front(piece)
    nbytes[front.name] = nbytes[piece.name]
    gathered = gs.Variable(f"{fold.tensor}.gathered", dtype=front.dtype)
    lowering.out.shapes[front.name] = fold.front_shape(split, graph.meshes.size(target.site, axis))
    lowering.out.shapes[gathered.name] = fold.front_shape(None, 1)
    gather(lowering, front, gathered, target.site, axis)
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


EMITTERS: Mapping[TransferKind, Callable[[Lowering, str, Transfer], gs.Tensor]] = {
    "AllReduce": _all_reduce,
    "ReduceScatter": _reduce_scatter,
    "AllGather": _all_gather,
    "Cut": _cut,
    "Keep": _keep,
    "Widen": widen,
    "Crop": crop,
    "Pad": pad_overlapping,
    "Exchange": exchange,
    "ToStage": _to_stage,
    "Push": _push,
    "Pull": _pull,
    "ToServers": _to_other_site,
    "ToWorkers": _to_other_site,
    "TakeRows": _take_rows,
    "TakeSlices": _take_slices,
    "ReturnRows": _return_rows,
}
