"""Gradient rules of Gather and GatherElements, and the indexed slices of a gathered table."""

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.tensor_types import Shape
from partc.passes.graph.operation_builder import AttributeValue


def indexed_slices(at: ForwardNode, dy: str) -> tuple[str, str]:
    """Return (ids int64[n], rows float[n, ...]) for a Gather along axis 0 of a table."""
    ids = at.x(1)
    if at.types[ids].element != TensorProto.INT64:
        ids = at.op("Cast", ids, to=TensorProto.INT64)
    # A negative id counts from the end: -1 and the last row's own id are one row.
    ids = at.op("Mod", ids, at.build.ints(at.static_shape(at.x(0))[0]))
    rank = at.rank(at.x(1))
    if rank == 1:
        return ids, dy
    row_shape = at.static_shape(at.x(0))[1:]
    return at.op("Reshape", ids, at.build.ints(-1)), at.op("Reshape", dy, at.build.ints(-1, *row_shape))


def gather_axis(at: ForwardNode) -> int:
    """Return a Gather's axis, counted from the front."""
    return at.integer("axis", 0) % at.rank(at.x(0))


def _gather(at: ForwardNode, dy: str) -> Gradients:
    axis = gather_axis(at)
    if padded := _pad_one_position(at, dy, axis):
        return {0: padded}
    if axis == 0:
        return {0: _scatter_rows(at, dy)}
    ids = at.op("Reshape", at.x(1), at.build.ints(-1))
    if at.rank(at.x(1)) == 0:
        dy = at.op("Unsqueeze", dy, at.build.ints(axis))
    elif at.rank(at.x(1)) > 1:
        dy = _flatten_axes(at, dy, axis, at.rank(at.x(1)))
    return {0: scatter_along_axis(at, dy, ids, axis)}


def _scatter_rows(at: ForwardNode, dy: str) -> str:
    row_axes = at.shape(at.x(0))[1:]
    ids = at.op("Reshape", at.x(1), at.build.ints(-1, 1))
    if at.types[at.x(1)].element != TensorProto.INT64:  # ScatterND reads no other
        ids = at.op("Cast", ids, to=TensorProto.INT64)
    if at.rank(at.x(1)) != 1:
        dy = at.op("Reshape", dy, _row_shape(at, row_axes))
    return add_to_zeros(at, "ScatterND", ids, dy)


def add_to_zeros(
    at: ForwardNode, op_type: str, indices: str, updates: str, **attributes: AttributeValue
) -> str:
    """Scatter updates, added up, into zeros shaped like the node's input 0.

    Numbers of 16 bits are added up in float32: onnxruntime has no such kernel for them, and they would round.
    """
    element, zeros = at.types[at.x(0)].element, at.zeros(at.x(0))
    if element not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return at.op(op_type, zeros, indices, updates, reduction="add", **attributes)
    wide_zeros, wide = (at.op("Cast", tensor, to=TensorProto.FLOAT) for tensor in (zeros, updates))
    summed = at.op(op_type, wide_zeros, indices, wide, reduction="add", **attributes)
    return at.op("Cast", summed, to=element)


def _row_shape(at: ForwardNode, row_axes: Shape) -> str:
    if all(isinstance(size, int) for size in row_axes):
        return at.build.ints(-1, *(size for size in row_axes if isinstance(size, int)))
    return at.op("Concat", at.build.ints(-1), at.op("Shape", at.x(0), start=1), axis=0)


def _pad_one_position(at: ForwardNode, dy: str, axis: int) -> str | None:
    """Put x[..., i, ...] back with a Pad, where i is a constant scalar and the axis' size is known."""
    position = at.constants.get(at.x(1))
    size = at.shape(at.x(0))[axis]
    if position is None or position.ndim or not isinstance(size, int):
        return None
    rank = at.rank(at.x(0))
    before = int(position) % size
    amounts = [0] * (2 * rank)
    amounts[axis], amounts[rank + axis] = before, size - 1 - before
    widened = at.op("Unsqueeze", dy, at.build.ints(axis))
    return at.op("Pad", widened, at.build.ints(*amounts), at.scalar(0, like=at.x(0)))


def _flatten_axes(at: ForwardNode, dy: str, axis: int, count: int) -> str:
    """Merge `count` axes of dy, from `axis` on, into one."""
    shape = at.shape_of(at.y())
    head = at.op("Slice", shape, at.build.ints(0), at.build.ints(axis))
    tail = at.op("Slice", shape, at.build.ints(axis + count), at.build.ints(np.iinfo(np.int64).max))
    return at.op("Reshape", dy, at.op("Concat", head, at.build.ints(-1), tail, axis=0))


def scatter_along_axis(at: ForwardNode, dy: str, ids: str, axis: int) -> str:
    """Add the slices of dy along `axis` to zeros shaped like the node's input 0, at ids int64[k]."""
    others = [a for a in range(at.rank(at.x(0))) if a != axis]
    positions = at.op("Unsqueeze", ids, at.build.ints(*others)) if others else ids
    positions = at.op("Expand", positions, at.op("Shape", dy))
    return add_to_zeros(at, "ScatterElements", positions, dy, axis=axis)


def _gather_elements(at: ForwardNode, dy: str) -> Gradients:
    """One index along the axis becomes a comparison, much faster than a scatter."""
    axis = at.integer("axis", 0) % at.rank(at.x(0))
    size = at.shape(at.x(0))[axis]
    if at.shape(at.x(1))[axis] == 1 and isinstance(size, int) and _same_elsewhere(at, axis):
        return {0: at.op("Where", _is_index(at, axis, size), dy, at.scalar(0, like=at.x(0)))}
    return {0: add_to_zeros(at, "ScatterElements", at.x(1), dy, axis=axis)}


def _same_elsewhere(at: ForwardNode, axis: int) -> bool:
    """GatherElements may read less than the whole of the other axes; then a comparison does not fit."""
    data, index = at.shape(at.x(0)), at.shape(at.x(1))
    sizes = [pair for a, pair in enumerate(zip(data, index, strict=True)) if a != axis]
    return all(d is not None and d == i for d, i in sizes)


def _is_index(at: ForwardNode, axis: int, size: int) -> str:
    """Return bool[..., size, ...]: true where a position along `axis` is the one that was read."""
    bounds = [at.build.constant(np.array(bound, np.int64)) for bound in (0, size, 1)]
    positions = at.op("Range", *bounds)
    trailing = at.rank(at.x(0)) - 1 - axis
    if trailing:
        positions = at.op("Unsqueeze", positions, at.build.ints(*range(1, trailing + 1)))
    index = at.x(1)
    if at.types[index].element != TensorProto.INT64:
        index = at.op("Cast", index, to=TensorProto.INT64)
    # Mod with the divisor's sign: a negative index counts from the end.
    positive_index = at.op("Mod", index, at.build.constant(np.array(size, np.int64)))
    return at.op("Equal", positions, positive_index)


RULES: Mapping[str, Rule] = {
    "Gather": of_first_output(_gather),
    "GatherElements": of_first_output(_gather_elements),
}
