"""Change a tensor's layout. All communication of dense tensors is made here.

partial -> whole     AllReduce (if aggregation was placed here; behind it ops run whole)
split -> whole       AllGather of pieces as they are; AllGatherRows, the split axis in front
partial -> split     ReduceScatter
whole -> split       made in part, or cut locally
split -> widened     ShiftAhead, ShiftBack (widen.py)
worker partial -> rows owned by servers      Push
rows owned by servers -> whole               Pull, or ShareRows and SpreadRows (gather_owned.py)
rows requested of servers -> where they return   AllToAllRows, ScatterRows (request_rows.py)
whole, from workers to servers and back      ToServers, ToWorkers
as it is, from one stage to another          ToStage: a piece to the rank at its place; sums are made before
among meshes of other shapes                 Exchange: what each rank wants, of those who have it
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.request_rows import return_rows
from partc.passes.layouts.layouts import (
    REPLICAS,
    WORKER,
    Gathered,
    Layout,
    Owned,
    Partial,
    PerReplica,
    Replicate,
    RequestedRows,
    Split,
)
from partc.passes.lowering.exchange import exchange
from partc.passes.lowering.gather_owned import gather_owned, has_parameter_rows, take_owned_slices
from partc.passes.lowering.lowered_graph import Number, PartNumber, PieceCut, constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.widen import widen
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
    for axis in range(len(native.placements)):
        if lowering.graph.sums_before(tensor, axis) and isinstance(wanted.along(axis), Replicate):
            native = native.with_along(axis, Replicate())
    if _moves_between_splits(lowering, tensor, native, wanted):
        return exchange(lowering, tensor, native, wanted)
    shape = lowering.facts.shape(tensor)
    change = last_change(native, wanted, lambda layout: lowering.graph.meshes.divides(layout, shape))
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


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor's way into a layout: its layout before the last step, and the mesh axis that changes then."""

    before: Layout
    axis: int


def last_change(native: Layout, wanted: Layout, divides: Callable[[Layout], bool]) -> Change:
    """Return the last step from a layout to another on the same mesh.

    Local cuts come first, since they make what is sent smaller, and gathering last. Mesh axes that cut at
    one place lie within each other: only the innermost may be undone, or another be cut within it.
    `divides` tells whether a layout makes parts of equal size: those on the way do as well.
    """
    count = max(len(native.placements), len(wanted.placements))
    undone: list[int] = []
    cut: list[int] = []
    for place in {split for _, split in (*native.splits(), *wanted.splits())}:
        has, wants = ([a for a, split in layout.splits() if split == place] for layout in (native, wanted))
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(has, wants, strict=False)))
        if wants[shared:]:
            cut.append(wants[-1])
        elif has[shared:] and isinstance(wanted.along(has[shared]), Replicate):
            undone += [has[shared]] if divides(wanted.with_along(has[shared], place)) else []
    changing = [axis for axis in range(count) if native.along(axis) != wanted.along(axis)]
    pairs = {axis: (native.along(axis), wanted.along(axis)) for axis in changing}
    reduced = [axis for axis, pair in pairs.items() if not any(isinstance(p, Split) for p in pair)]
    if cut and not (undone or reduced):
        axis = max(cut, key=lambda a: (isinstance(native.along(a), Partial), a))
        source = native.along(axis)
        return Change(wanted.with_along(axis, source if isinstance(source, Partial) else Replicate()), axis)
    axis = min(undone or reduced)
    return Change(wanted.with_along(axis, native.along(axis)), axis)


def _change_axis(lowering: Lowering, tensor: str, wanted: Layout, change: Change) -> gs.Tensor:
    source, target = change.before.along(change.axis), wanted.along(change.axis)
    if isinstance(source, Partial):
        reduces = _all_reduce if isinstance(target, Replicate) else _reduce_scatter
        return reduces(lowering, tensor, wanted, change)
    if isinstance(source, Split):
        return _all_gather(lowering, tensor, wanted, change)
    whole = lowering.need(tensor, change.before)
    if isinstance(target, Split):
        part = lowering.split_locally(tensor, wanted, change.axis)
        return part if part is not None else _cut(lowering, tensor, whole, wanted, change)
    assert not (isinstance(source, PerReplica) and lowering.graph.replicas > 1), (
        f"{tensor} of one replica is no sum of all"
    )
    return whole  # a replica's own value, or the one term of a zero, is the whole


def _reduce_scatter(lowering: Lowering, tensor: str, wanted: Layout, change: Change) -> gs.Tensor:
    """Sum a partial tensor and keep a part."""
    split, partial = wanted.along(change.axis), change.before.along(change.axis)
    assert isinstance(split, Split)
    assert isinstance(partial, Partial)
    whole = wanted.with_along(change.axis, Replicate())
    graph = lowering.graph
    is_local = change.axis == graph.meshes.microbatch_axis  # each rank makes the sum itself
    if is_local or (tensor, change.axis) in graph.made_whole or not graph.has_fixed_pieces(tensor, whole):
        return _cut(lowering, tensor, lowering.need(tensor, whole), wanted, change)
    operand = lowering.need(tensor, change.before)
    result = _result(lowering, tensor, wanted)
    lowering.out.communicate(
        "ReduceScatter",
        [operand],
        [result],
        site=wanted.site,
        axis=change.axis,
        reduction=partial.reduction,
        cut=_cut_of(lowering, whole, split),
    )
    return result


def _cut_of(lowering: Lowering, whole: Layout, split: Split) -> PieceCut:
    """Return where a tensor that is laid out as `whole` is cut, as its shape is on a rank."""
    blocks = _local_blocks(lowering, whole, split)
    assert isinstance(blocks, int), "pieces are of fixed shapes"
    return PieceCut(split.axis, blocks, split.uneven)


def _all_reduce(lowering: Lowering, tensor: str, wanted: Layout, change: Change) -> gs.Tensor:
    assert (tensor, change.axis) in lowering.graph.made_whole, (
        f"{tensor} is wanted whole behind its aggregation"
    )
    placement = change.before.along(change.axis)
    assert isinstance(placement, Partial)
    operand = lowering.need(tensor, change.before)
    result = _result(lowering, tensor, wanted)
    lowering.out.communicate(
        "AllReduce", [operand], [result], site=wanted.site, axis=change.axis, reduction=placement.reduction
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


def _all_gather(lowering: Lowering, tensor: str, wanted: Layout, change: Change) -> gs.Tensor:
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
        lowering.out.communicate("AllGather", [piece], [result], site=wanted.site, axis=change.axis, cut=cut)
        return result
    gather = _join_microbatches if is_fixed else _gather_rows
    nbytes = lowering.out.nbytes
    nbytes.setdefault(piece.name, lowering.local_nbytes(tensor, change.before))
    if split.axis == 0 and split.outer == 1:
        result = _result(lowering, tensor, wanted)
        gather(lowering, piece, result, wanted.site, change.axis)
        return result
    fold = _Fold(lowering, tensor, wanted, split)
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
    lowering.out.communicate("AllGather", [piece], [result], site=site, axis=axis)


def _gather_rows(lowering: Lowering, piece: gs.Tensor, result: gs.Variable, site: Site, axis: int) -> None:
    counts = gs.Variable(f"{result.name}.counts", dtype=INT64)
    lowering.out.communicate("AllGatherRows", [piece], [result], received_counts=counts, site=site, axis=axis)


def _cut(lowering: Lowering, tensor: str, whole: gs.Tensor, wanted: Layout, change: Change) -> gs.Tensor:
    """Cut a part along a mesh axis out of a tensor that is whole there."""
    split = wanted.along(change.axis)
    assert isinstance(split, Split)
    name = lowering.value_name(tensor, wanted)
    if isinstance(whole, gs.Constant) and not split.uneven and _is_uniform(whole, split.axis):
        length = whole.values.shape[split.axis] // lowering.graph.meshes.size(wanted.site, change.axis)
        return gs.Constant(name, whole.values.take(range(length), axis=split.axis))
    sizes = lowering.local_sizes(tensor, change.before)
    if split.outer == 1:
        return _slice_part(lowering, whole, split, sizes, name, wanted.site, change.axis)
    fold = _Fold(lowering, tensor, change.before, split)
    front = fold.to_front(whole)
    factor = (sizes[split.axis] // fold.outer,)
    in_front = Split(0, uneven=split.uneven)
    part = _slice_part(lowering, front, in_front, factor, f"{name}.front", wanted.site, change.axis)
    return fold.back(part, name)


def _is_uniform(tensor: gs.Constant, axis: int) -> bool:
    first = tensor.values.take([0], axis=axis)
    return bool(np.array_equal(tensor.values, np.broadcast_to(first, tensor.values.shape)))


def _slice_part(
    lowering: Lowering,
    whole: gs.Tensor,
    split: Split,
    shape: tuple[int, ...],
    name: str,
    site: Site,
    mesh_axis: int,
) -> gs.Tensor:
    out, axis = lowering.out, split.axis
    position = lowering.coordinate(site, mesh_axis)
    ranks = lowering.graph.meshes.size(site, mesh_axis)
    along = constant(f"{name}.axis", [axis], np.int64)
    if split.uneven:
        part = PartNumber(mesh_axis, split.uneven, shape[axis] // split.uneven)
        ends = (out.numbers(site, (replace(part, tells=what),)) for what in ("start", "stop"))
        return out.emit("Slice", [whole, *ends, along], name, whole.dtype, site)
    varies = out.shapes.get(whole.name, shape)[axis] is None
    if isinstance(whole, gs.Constant) or (whole.name in lowering.facts.fixed_shapes and not varies):
        size: gs.Tensor = constant(f"{name}.size", [shape[axis] // ranks], np.int64)
    else:
        sizes = out.emit("Shape", [whole], f"{name}.sizes", INT64, site)
        length = out.emit("Gather", [sizes, along], f"{name}.length", INT64, site)
        parts = constant(f"{name}.ranks", [ranks], np.int64)
        size = out.emit("Div", [length, parts], f"{name}.size", INT64, site)
    start = out.emit("Mul", [position, size], f"{name}.start", INT64, site)
    end = out.emit("Add", [start, size], f"{name}.end", INT64, site)
    return out.emit("Slice", [whole, start, end, along], name, whole.dtype, site)


def _local_blocks(lowering: Lowering, layout: Layout, split: Split) -> Number:
    """Return how many of the blocks before a split factor a rank has under a layout."""
    within = [p for _, p in layout.splits() if p.axis == split.axis and p.outer < split.outer]
    kept = (p if p in within else Replicate() for p in layout.placements)
    return lowering.local_number(Layout(layout.site, *kept), split.axis, split.outer)


class _Fold:
    """Brings a factor of an axis (outer x factor x inner) to the front, and back.

    `layout` is whole along the mesh axis that divides the factor.
    """

    def __init__(self, lowering: Lowering, tensor: str, layout: Layout, split: Split) -> None:
        self.out = lowering.out
        self.site = layout.site
        self.lowering = lowering
        self.shape = lowering.local_sizes(tensor, layout)
        sizes = lowering.facts.shape(tensor)
        self.numbers = [lowering.local_number(layout, axis, size) for axis, size in enumerate(sizes)]
        self.axis = split.axis
        self.blocks = _local_blocks(lowering, layout, split)
        self.outer = lowering.largest(layout.site, self.blocks)
        others = [p for p in layout.placements if not isinstance(p, Replicate)]
        self.tensor = lowering.value_name(tensor, layout) if others or layout.site != WORKER else tensor
        own = "" if lowering.graph.configuration.is_one_mesh or "@" in self.tensor else f"@{layout.site}"
        self.name = f"{self.tensor}{own}.fold{split.axis}.{split.outer}"
        rank = len(self.shape) + (self.outer > 1)
        moved = self.axis + (self.outer > 1)
        self.order = [moved, *(axis for axis in range(rank) if axis != moved)]

    def to_front(self, tensor: gs.Tensor) -> gs.Tensor:
        name = f"{self.name}.{tensor.name}"
        if self.outer > 1:
            sizes = [*self.numbers[: self.axis], self.blocks, -1, *self.numbers[self.axis + 1 :]]
            tensor = self._reshape(tensor, sizes, f"{name}.apart")
        return self.out.emit("Transpose", [tensor], f"{name}.front", tensor.dtype, self.site, perm=self.order)

    def front_shape(self, split: Split | None, parts: int) -> tuple[int | None, ...]:
        """Return the shape with the factor in front, or of one of the parts into which it is split."""
        apart: list[int | None] = [n if isinstance(n, int) else None for n in self.numbers]
        inner = self.shape[self.axis] // self.outer
        apart[self.axis : self.axis + 1] = [self.blocks if isinstance(self.blocks, int) else None, inner]
        if self.outer == 1:
            del apart[self.axis]
        _, *rest = [apart[axis] for axis in self.order]
        varies = isinstance(self.numbers[self.axis], PartNumber) and isinstance(self.blocks, int)
        return (None if varies or (split is not None and split.uneven) else inner // parts, *rest)

    def back(self, tensor: gs.Tensor, name: str) -> gs.Tensor:
        inverse = [int(axis) for axis in np.argsort(self.order)]
        target = name if self.outer == 1 else f"{name}.apart"
        transposed = self.out.emit("Transpose", [tensor], target, tensor.dtype, self.site, perm=inverse)
        if self.outer == 1:
            return transposed
        sizes = [*self.numbers[: self.axis], -1, *self.numbers[self.axis + 1 :]]
        return self._reshape(transposed, sizes, name)

    def _reshape(self, tensor: gs.Tensor, sizes: list[Number], name: str) -> gs.Tensor:
        spelled = self.lowering.numbers(f"{name}.sizes", sizes, self.site)
        return self.out.emit("Reshape", [tensor, spelled], name, tensor.dtype, self.site)
