"""Read and write a table of which every rank has some rows, by ids of the whole: masked and offset.

before   rows = Gather (table [V, d], ids)

after    local = Sub (ids, first_row)        inside = 0 <= local < row_count
         read = Gather (part [row_count, d], Where (inside, local, 0))
         rows = Where (inside, read, 0)              partial(sum) over the mesh axis that splits the rows

The gradient goes the other way: ids outside the part add zeros to its row 0, and the result is split.

Where a decision splits the rows of operand 0 along a mesh axis, lowering writes these nodes in place of the
op: `write_gather` with the rank's own part as the table, the ids whole along that axis, and partial(sum) as
its output's placement there; `write_scatter` with the part of the data, ids and updates whole along that
axis, and Split(axis) as its output's.

first_row and row_count are int64[1] and differ between ranks. On one device they are 0 and V: the op itself.
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.node_writer import NodeWriter

BOOL = np.dtype(np.bool_)


@dataclass(frozen=True, slots=True)
class TableShard:
    """A rank's rows of a table: the first and their number, both int64[1], and how many the whole has."""

    first_row: gs.Tensor
    row_count: gs.Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class _Local:
    """Ids as positions in a part, 0 for those outside; `is_known` tells ids of the whole table's rows."""

    positions: gs.Tensor
    inside: gs.Tensor
    is_known: gs.Tensor


def _localise(write: NodeWriter, ids: gs.Tensor, ids_rank: int, part: TableShard) -> _Local:
    """Return where ids lie in the part. Negative ids count from the end of the whole."""
    dtype = np.dtype(ids.dtype)
    zero, end = write.scalar(0, dtype), write.scalar(part.rows, dtype)
    is_negative = write.op("Less", ids, zero, dtype=BOOL)
    from_front = write.op("Where", is_negative, write.op("Add", ids, end), ids, dtype=dtype)
    first, count = (_bound(write, bound, ids_rank, dtype) for bound in (part.first_row, part.row_count))
    local = write.op("Sub", from_front, first)
    inside = _is_within(write, local, count)
    positions = write.op("Where", inside, local, zero, dtype=dtype)
    return _Local(positions, inside, _is_within(write, from_front, end))


def _bound(write: NodeWriter, bound: gs.Tensor, ids_rank: int, dtype: np.dtype) -> gs.Tensor:
    """Return a bound in the ids' element type; a scalar id must stay one."""
    return write.cast(write.op("Squeeze", bound, write.ints(0)) if ids_rank == 0 else bound, dtype)


def _is_within(write: NodeWriter, ids: gs.Tensor, end: gs.Tensor) -> gs.Tensor:
    at_least = write.op("GreaterOrEqual", ids, write.scalar(0, np.dtype(ids.dtype)), dtype=BOOL)
    return write.op("And", at_least, write.op("Less", ids, end, dtype=BOOL))


def _widened(write: NodeWriter, mask: gs.Tensor, mask_rank: int, axes: int) -> gs.Tensor:
    """Give a mask over ids axes of size 1 behind it, for what a row consists of."""
    return write.op("Unsqueeze", mask, write.ints(*range(mask_rank, mask_rank + axes))) if axes else mask


# ---------------------------------------------------------------- reading


def write_gather(
    write: NodeWriter,
    table: gs.Tensor,
    ids: gs.Tensor,
    part: TableShard,
    *,
    axis: int,
    ranks: tuple[int, int],
    out: gs.Tensor | None = None,
) -> gs.Tensor:
    """Write the rows of a part, at their ids' places, and zeros at other ids: [.., ids.., ..], partial(sum).

    `axis`: the indexed one of the table, from the front. `ranks`: how many axes table and ids have. An
    id that is of no row, which ONNX Runtime refuses, gives NaN in floats on every rank (zero in integers).
    """
    table_rank, ids_rank = ranks
    dtype, behind = np.dtype(table.dtype), table_rank - 1 - axis
    local = _localise(write, ids, ids_rank, part)
    read = write.op("Gather", table, local.positions, axis=axis)
    missing = write.scalar(np.nan if dtype.kind == "f" else 0, dtype)
    nothing = write.op("Where", local.is_known, write.scalar(0, dtype), missing, dtype=dtype)
    mask, rest = (_widened(write, tensor, ids_rank, behind) for tensor in (local.inside, nothing))
    return write.op("Where", mask, read, rest, dtype=dtype, out=out)


# ---------------------------------------------------------------- writing


def write_scatter(
    write: NodeWriter, ids: gs.Tensor, updates: gs.Tensor, part: TableShard, *, ids_rank: int, row_axes: int
) -> tuple[gs.Tensor, gs.Tensor]:
    """Write positions in a part and updates that are zero where the id is not in it, to be added there.

    `row_axes`: how many axes updates have behind those of the ids. Many ids share row 0 then: where an op
    adds duplicates on several threads without care, as ONNX Runtime's ScatterND does, it needs one thread.
    """
    local = _localise(write, ids, ids_rank, part)
    mask = _widened(write, local.inside, ids_rank, row_axes)
    zero = write.scalar(0, np.dtype(updates.dtype))
    return local.positions, write.op("Where", mask, updates, zero, dtype=np.dtype(updates.dtype))
