"""Read and write a table of which every rank has some rows, by ids of the whole: masked and offset.

before   rows = Gather (table [V, d], ids)

after    local = Sub (ids, first_row)        inside = 0 <= local < row_count
         read = Gather (part [row_count, d], Where (inside, local, 0))
         rows = Where (inside, read, 0)              partial(sum) over the mesh axis that splits the rows

The gradient goes the other way: ids outside the part add zeros to its row 0, and the result is split.

Sharding rules keep an indexed axis whole, so nothing asks for this by itself. Where a decision splits the
rows of operand 0 along a mesh axis, lowering is to emit these nodes instead of the op: `write_gather` with
the rank's own part as the table, the ids whole along that axis, and partial(sum) as its output's placement
there; `write_scatter` with the part of the data, ids and updates whole along that axis, and Split(axis) as
its output's. `expand_gather` and `expand_scatter` do so in place in a graph whose ops read a part already.

first_row and row_count are int64[1] and differ between ranks. On one device they are 0 and V: the op itself.
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.node_writer import NodeWriter, Rewriting
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS

BOOL = np.dtype(np.bool_)


@dataclass(frozen=True, slots=True)
class Part:
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


def _localise(write: NodeWriter, ids: gs.Tensor, ids_rank: int, part: Part) -> _Local:
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
    part: Part,
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


def expand_gather(
    graph: gs.Graph, node: gs.Node, facts: Facts, *, rows: int, first_row: str, row_count: str
) -> list[str]:
    """Replace a Gather that reads a part of a table of `rows` rows; return the names of what is written.

    `first_row`, `row_count`: tensors int64[1] of the graph, made its inputs where it has none of that name.
    """
    at, part = _begin(graph, node, facts, rows, first_row, row_count)
    ranks = len(at.shape(0)), len(at.shape(1))
    write_gather(at, at.x(0), at.x(1), part, axis=at.axis(0, ranks[0]), ranks=ranks, out=at.y())
    return _finish(graph, node, at)


# ---------------------------------------------------------------- writing


def write_scatter(
    write: NodeWriter, ids: gs.Tensor, updates: gs.Tensor, part: Part, *, ids_rank: int, row_axes: int
) -> tuple[gs.Tensor, gs.Tensor]:
    """Write positions in a part and updates that are zero where the id is not in it, to be added there.

    `row_axes`: how many axes updates have behind those of the ids. Many ids share row 0 then: where an op
    adds duplicates on several threads without care, as ONNX Runtime's ScatterND does, it needs one thread.
    """
    local = _localise(write, ids, ids_rank, part)
    mask = _widened(write, local.inside, ids_rank, row_axes)
    zero = write.scalar(0, np.dtype(updates.dtype))
    return local.positions, write.op("Where", mask, updates, zero, dtype=np.dtype(updates.dtype))


def can_expand_scatter(node: gs.Node, facts: Facts) -> bool:
    """Tell whether a node adds rows by id: SumRows, or ScatterND or ScatterElements with reduction add."""
    if node.op == SUM_ROWS and node.domain == FUNCTION_DOMAIN:
        return True
    if node.attrs.get("reduction", "none") != "add":
        return False
    is_by_row = node.op == "ScatterND" and facts.shape(node.inputs[1].name)[-1] == 1
    return bool(is_by_row or node.op == "ScatterElements")


def expand_scatter(
    graph: gs.Graph, node: gs.Node, facts: Facts, *, rows: int, first_row: str, row_count: str
) -> list[str]:
    """Replace a node that adds rows to a part of a table of `rows` rows; return the names of what is written.

    Needs: `can_expand_scatter`. A SumRows returns positions in the part, and row 0 even where no id is of it.
    """
    at, part = _begin(graph, node, facts, rows, first_row, row_count)
    if node.op == SUM_ROWS:
        row_axes = len(at.shape(1)) - 1
        positions, sums = write_scatter(at, at.x(0), at.x(1), part, ids_rank=1, row_axes=row_axes)
        _write_again(at, [positions, sums])
    else:
        ids_rank = len(at.shape(1))
        row_axes = 0
        ids = at.x(1)
        if node.op == "ScatterND":  # its ids have an axis of size 1 at the end
            ids, ids_rank, row_axes = at.op("Squeeze", ids, at.ints(-1)), ids_rank - 1, len(at.shape(0)) - 1
        positions, updates = write_scatter(at, ids, at.x(2), part, ids_rank=ids_rank, row_axes=row_axes)
        if node.op == "ScatterND":
            positions = at.op("Unsqueeze", positions, at.ints(-1))
        _write_again(at, [at.x(0), positions, updates])
    return _finish(graph, node, at)


def _write_again(at: Rewriting, inputs: list[gs.Tensor]) -> None:
    """Write the node itself, on other operands."""
    outputs = [at.y(index) for index in range(2 if at.makes(1) else 1)]
    name = at.fresh(at.node.op)
    at.nodes.append(gs.Node(at.node.op, name, dict(at.node.attrs), inputs, outputs, domain=at.node.domain))


# ---------------------------------------------------------------- graphs


def _begin(
    graph: gs.Graph, node: gs.Node, facts: Facts, rows: int, first_row: str, row_count: str
) -> tuple[Rewriting, Part]:
    tensors = graph.tensors()
    taken = {*tensors, *(other.name for other in graph.nodes)}
    bounds = []
    for name in (first_row, row_count):
        if name not in tensors:
            tensors[name] = gs.Variable(name, dtype=np.int64, shape=(1,))
            graph.inputs.append(tensors[name])
        bounds.append(tensors[name])
    return Rewriting(node, facts, frozenset(), taken), Part(bounds[0], bounds[1], rows)


def _finish(graph: gs.Graph, node: gs.Node, at: Rewriting) -> list[str]:
    place = next(index for index, other in enumerate(graph.nodes) if other is node)
    graph.nodes[place : place + 1] = at.nodes
    return [written.name for written in at.nodes]
