"""Send indexed slices to the servers that own their rows, and fetch rows from there.

    push   worker   SumRows of its own slices          -> GatherRows -> host's server
           server   SumRows of its host's slices       -> AllToAllRows, cut by owner
           owner    SumRows of what all hosts sent     =  the gradient of its rows
    pull   worker   Unique ids                         -> GatherRows -> host's server
           server   Unique ids of its host             -> AllToAllRows, cut by owner
           owner    Gather of its rows                 -> AllToAllRows back
           server   rows of each worker                -> ScatterRows
           worker   rows in the order of its ids

So a row crosses the network once per host and direction (parallax.txt, section 5.3.2: local
aggregation). Ids are ascending after Unique, and owners hold ascending ranges, so cutting by owner
is counting.
"""

from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_slices import DOMAIN, SUM_ROWS, pairs_of
from partc.passes.lowering.lowered_graph import LoweredGraph, constant
from partc.passes.sharding.decide_layouts import Decision
from partc.passes.sharding.layouts import Layout, Owned, Partial, Replicate, Split
from partc.passes.sharding.sharding_rules import is_sum_rows
from partc.passes.training_graph import Gradient
from partc.runtime.program import Site

if TYPE_CHECKING:
    from partc.passes.lowering.lower import Lowering

INT64 = np.dtype(np.int64)
WORKER_WHOLE = Layout("worker", Replicate())


def needs_exchange(lowering: "Lowering", node: gs.Node) -> bool:
    """Tell whether a node on the workers sums or scatters slices of a parameter that is all-reduced."""
    adds = node.op == "ScatterND" and node.attrs.get("reduction") == "add"
    if not (is_sum_rows(node) or adds) or node.name in lowering.graph.main:
        return False
    gradient = _gradient_of(lowering, node.inputs[-1].name)
    if gradient is None or lowering.graph.synchronised.method[gradient.parameter] != "all_reduce":
        return False
    parts = [part for pair in _pairs(lowering, gradient) for part in pair]
    return any(lowering.graph.layout(part) != WORKER_WHOLE for part in parts)


def _gradient_of(lowering: "Lowering", rows: str) -> Gradient | None:
    gradients = lowering.graph.training.gradients.values()
    return next((gradient for gradient in gradients if gradient.rows == rows), None)


def reduce_slices(lowering: "Lowering", node: gs.Node) -> list[gs.Tensor]:
    """All-reduce indexed slices as a dense gradient; for SumRows: every id, and its summed row.

    Exact where the sparse update is the identity at zero gradient.
    """
    out = lowering.out
    gradient = _gradient_of(lowering, node.inputs[-1].name)
    assert gradient is not None
    total = _all_reduced(lowering, gradient)
    if not is_sum_rows(node):
        return [_add_to_data(lowering, node, total)]
    name = f"{gradient.parameter}.gradient"
    rows = lowering.graph.training.variables[gradient.parameter].shape[0]
    bounds = [constant(f"{name}.{k}", v, np.int64) for k, v in (("from", 0), ("to", rows))]
    step = constant(f"{name}.step", 1, np.int64)
    all_ids = out.emit("Range", [*bounds, step], f"{name}.ids", INT64, "worker")
    return [all_ids, total]


def _all_reduced(lowering: "Lowering", gradient: Gradient) -> gs.Variable:
    """Scatter each replica's own slices into zeros, and all-reduce them, once."""
    if gradient.parameter in lowering.reduced:
        return lowering.reduced[gradient.parameter]
    out = lowering.out
    parameter = lowering.graph.training.variables[gradient.parameter]
    ids, rows = _own_slices(lowering, gradient)
    name = f"{gradient.parameter}.gradient"
    shape = constant(f"{name}.shape", list(parameter.shape), np.int64)
    zero = gs.Constant(f"{name}.zero", np.zeros((), dtype=parameter.dtype))
    zeros = out.emit("Expand", [zero, shape], f"{name}.zeros", parameter.dtype, "worker")
    last = constant(f"{name}.last", [1], np.int64)
    positions = out.emit("Unsqueeze", [ids, last], f"{name}.positions", INT64, "worker")
    operands = [zeros, positions, rows]
    term = out.emit("ScatterND", operands, f"{name}.term", parameter.dtype, "worker", reduction="add")
    total = gs.Variable(f"{name}.sum", dtype=parameter.dtype)
    for value in (term, total):
        out.shapes[value.name] = parameter.shape
        out.nbytes[value.name] = int(np.prod(parameter.shape)) * parameter.dtype.itemsize
    out.communicate("AllReduce", [term], [total], site="worker", reduction="sum")
    lowering.reduced[gradient.parameter] = total
    return total


def _add_to_data(lowering: "Lowering", node: gs.Node, total: gs.Variable) -> gs.Tensor:
    """Add what a ScatterND adds row by row to its data, which is often zero."""
    data, result = node.inputs[0].name, node.outputs[0].name
    if data in lowering.graph.zeros:
        lowering.out.meanings[total.name] = (result, WORKER_WHOLE)
        return total
    name = lowering.value_name(result, WORKER_WHOLE)
    return lowering.out.emit("Add", [lowering.need(data, WORKER_WHOLE), total], name, total.dtype, "worker")


def push_slices(lowering: "Lowering", owned: Owned) -> tuple[gs.Variable, gs.Variable]:
    """Return a parameter's (unique ids, summed rows) on the servers that own them."""
    gradient = lowering.graph.training.gradients[owned.parameter]
    out, name = lowering.out, f"{owned.parameter}.push"
    if name in lowering.exchanged:
        return lowering.exchanged[name]
    pairs = _pairs(lowering, gradient)
    ids, rows = _own_slices(lowering, gradient)
    ids = _count_from_start(lowering, owned.parameter, ids, f"{name}.own")
    ids, rows = _sum_rows(out, ids, rows, f"{name}.own", "worker")
    _expect(lowering, pairs, ids, rows)
    ids, rows, _ = _exchange(out, "GatherRows", [ids, rows], f"{name}.host")
    ids, rows = _sum_rows(out, ids, rows, f"{name}.host_sum", "server")
    counts = _count_by_owner(out, ids, owned.parameter, f"{name}.by_owner")
    _expect(lowering, pairs, ids, rows)
    ids, rows, _ = _exchange(out, "AllToAllRows", [ids, rows, counts], f"{name}.all")
    lowering.exchanged[name] = _sum_rows(out, ids, rows, f"{name}.sum", "server")
    return lowering.exchanged[name]


def _expect(lowering: "Lowering", pairs: list[tuple[str, str]], ids: gs.Variable, rows: gs.Variable) -> None:
    """Tell the cost model how many bytes a rank's summed slices take, all ids being distinct."""
    for value, tensors in ((ids, [ids for ids, _ in pairs]), (rows, [rows for _, rows in pairs])):
        lowering.out.nbytes[value.name] = sum(_own_bytes(lowering, tensor) for tensor in tensors)


def _own_bytes(lowering: "Lowering", tensor: str) -> int:
    is_split = isinstance(lowering.graph.layout(tensor).placement, Split)
    return lowering.facts.nbytes(tensor) // (lowering.graph.replicas if is_split else 1)


def _pairs(lowering: "Lowering", gradient: Gradient) -> list[tuple[str, str]]:
    assert gradient.ids is not None and gradient.rows is not None
    return pairs_of(lowering.source(gradient.ids), lowering.source(gradient.rows))


def _own_slices(lowering: "Lowering", gradient: Gradient) -> tuple[gs.Tensor, gs.Tensor]:
    """Return this replica's own slices: the sum over all replicas is the gradient."""
    assert gradient.rows is not None
    pairs = [_own_pair(lowering, *pair) for pair in _pairs(lowering, gradient)]
    if len(pairs) == 1:
        return pairs[0]
    name = f"{gradient.parameter}.own"
    out = lowering.out
    ids = out.emit("Concat", [ids for ids, _ in pairs], f"{name}_ids", INT64, "worker", axis=0)
    dtype = lowering.facts.dtypes[gradient.rows]
    rows = out.emit("Concat", [rows for _, rows in pairs], f"{name}_rows", dtype, "worker", axis=0)
    return ids, rows


def _own_pair(lowering: "Lowering", ids: str, rows: str) -> tuple[gs.Tensor, gs.Tensor]:
    id_layout, row_layout = lowering.graph.layout(ids), lowering.graph.layout(rows)
    are_alike = id_layout == row_layout and isinstance(row_layout.placement, Split)
    are_terms = id_layout == WORKER_WHOLE and isinstance(row_layout.placement, Partial)
    if are_alike or are_terms:
        return lowering.need(ids, id_layout), lowering.need(rows, row_layout)
    # Every replica has all the slices: each contributes its share of every row.
    whole = lowering.need(rows, WORKER_WHOLE)
    dtype = lowering.facts.dtypes[rows]
    share = constant(f"{rows}.share", 1.0 / lowering.graph.replicas, dtype)
    term = lowering.out.emit("Mul", [whole, share], f"{rows}.share_of_whole", dtype, "worker")
    return lowering.need(ids, WORKER_WHOLE), term


def pull_rows(lowering: "Lowering", node: gs.Node, decision: Decision) -> gs.Tensor:
    """Return the rows that a worker's Gather wants from a table that servers own."""
    out = lowering.out
    table, indices = node.inputs
    layout = lowering.graph.layout(table.name)
    owned = layout.placement
    assert isinstance(owned, Owned)
    ids = lowering.need(indices.name, Layout("worker", decision.inputs[1]))
    name = f"{node.name}.pull"
    flat = _flatten(lowering, table.name, indices.name, ids, name)
    unique, inverse = _unique(out, flat, f"{name}.own", "worker")
    _expect_ids(lowering, indices.name, decision, unique)
    host_ids, host_counts = _exchange(out, "GatherRows", [unique], f"{name}.host")
    host_unique, host_inverse = _unique(out, host_ids, f"{name}.host_unique", "server")
    counts = _count_by_owner(out, host_unique, owned.parameter, f"{name}.by_owner")
    _expect_ids(lowering, indices.name, decision, host_unique)
    wanted, wanted_counts = _exchange(out, "AllToAllRows", [host_unique, counts], f"{name}.wanted")
    first = out.place(f"{owned.parameter}.first")
    local = out.emit("Sub", [wanted, first], f"{name}.local", INT64, "server")
    dtype = lowering.facts.dtypes[table.name]
    rows = out.emit("Gather", [lowering.need(table.name, layout), local], f"{name}.found", dtype, "server")
    _expect_rows(lowering, table.name, wanted, host_unique, rows)
    back, _ = _exchange(out, "AllToAllRows", [rows, wanted_counts], f"{name}.back")
    spread = out.emit("Gather", [back, host_inverse], f"{name}.spread", dtype, "server")
    _expect_rows(lowering, table.name, unique, unique, spread)
    (own,) = _exchange(out, "ScatterRows", [spread, host_counts], f"{name}.scattered")
    ordered = out.emit("Gather", [own, inverse], f"{name}.ordered", dtype, "worker")
    return _unflatten(lowering, node, decision, ids, ordered)


def _count_from_start(lowering: "Lowering", table: str, ids: gs.Tensor, name: str) -> gs.Variable:
    """Turn negative ids, which count from the table's end, into others: owners hold ranges.

    What lies before the table's start is moved behind its end, where no owner is, so that it is
    noticed as an error and not read from some owner's end.
    """
    out = lowering.out
    zero = constant(f"{name}.zero", 0, np.int64)
    end = constant(f"{name}.table_rows", lowering.facts.shape(table)[0], np.int64)
    is_negative = out.emit("Less", [ids, zero], f"{name}.is_negative", np.dtype(bool), "worker")
    from_end = out.emit("Add", [ids, end], f"{name}.from_end", INT64, "worker")
    inside = out.emit("Where", [is_negative, from_end, ids], f"{name}.inside", INT64, "worker")
    is_stray = out.emit("Less", [inside, zero], f"{name}.is_stray", np.dtype(bool), "worker")
    return out.emit("Where", [is_stray, end, inside], f"{name}.from_start", INT64, "worker")


def _flatten(lowering: "Lowering", table: str, indices: str, ids: gs.Tensor, name: str) -> gs.Tensor:
    out = lowering.out
    wide = ids
    if ids.dtype != INT64:
        wide = out.emit("Cast", [ids], f"{name}.int64", INT64, "worker", to=7)
    wrapped = _count_from_start(lowering, table, wide, name)
    if len(lowering.facts.shape(indices)) == 1:
        return wrapped
    flat = constant(f"{name}.flat_shape", [-1], np.int64)
    return out.emit("Reshape", [wrapped, flat], f"{name}.flat", INT64, "worker")


def _unflatten(
    lowering: "Lowering", node: gs.Node, decision: Decision, ids: gs.Tensor, rows: gs.Tensor
) -> gs.Tensor:
    """Give the rows, one per id, the shape of the Gather's output."""
    out = lowering.out
    table, indices = node.inputs
    name = lowering.value_name(node.outputs[0].name, Layout("worker", decision.outputs[0]))
    if len(lowering.facts.shape(indices.name)) == 1:
        return out.emit("Identity", [rows], name, rows.dtype, "worker")
    tail = constant(f"{name}.tail", list(lowering.facts.shape(table.name)[1:]), np.int64)
    sizes = out.emit("Shape", [ids], f"{name}.ids_shape", INT64, "worker")
    shape = out.emit("Concat", [sizes, tail], f"{name}.shape", INT64, "worker", axis=0)
    return out.emit("Reshape", [rows, shape], name, rows.dtype, "worker")


def _expect_ids(lowering: "Lowering", indices: str, decision: Decision, ids: gs.Variable) -> None:
    share = lowering.graph.replicas if isinstance(decision.inputs[1], Split) else 1
    lowering.out.nbytes[ids.name] = lowering.facts.nbytes(indices) // share


def _expect_rows(
    lowering: "Lowering", table: str, ids: gs.Variable, like: gs.Variable, rows: gs.Variable
) -> None:
    row_bytes = lowering.facts.nbytes(table) // lowering.facts.shape(table)[0]
    lowering.out.nbytes[rows.name] = lowering.out.nbytes[like.name] // INT64.itemsize * row_bytes
    lowering.out.nbytes.setdefault(ids.name, lowering.out.nbytes[like.name])


def _sum_rows(
    out: LoweredGraph, ids: gs.Tensor, rows: gs.Tensor, name: str, site: Site
) -> tuple[gs.Variable, gs.Variable]:
    outputs = gs.Variable(f"{name}.ids", dtype=INT64), gs.Variable(f"{name}.rows", dtype=rows.dtype)
    node = gs.Node(SUM_ROWS, f"{name}.node", {}, [ids, rows], list(outputs), domain=DOMAIN)
    out.append(node, site)
    return outputs


def _unique(out: LoweredGraph, ids: gs.Tensor, name: str, site: Site) -> tuple[gs.Variable, gs.Variable]:
    unique, inverse = gs.Variable(f"{name}.ids", dtype=INT64), gs.Variable(f"{name}.inverse", dtype=INT64)
    outputs = [unique, gs.Variable.empty(), inverse]
    out.append(gs.Node("Unique", f"{name}.node", {"sorted": 1}, [ids], outputs), site)
    return unique, inverse


def _exchange(out: LoweredGraph, op: str, inputs: list[gs.Tensor], name: str) -> tuple[gs.Variable, ...]:
    """Append a row communication: one result per value, and the sizes unless rows are scattered."""
    counted = op in ("AllToAllRows", "ScatterRows")
    values = inputs[:-1] if counted else inputs
    results = [gs.Variable(f"{name}.{index}", dtype=value.dtype) for index, value in enumerate(values)]
    if op != "ScatterRows":
        results.append(gs.Variable(f"{name}.counts", dtype=INT64))
    out.communicate(op, inputs, results)
    return tuple(results)


def _count_by_owner(out: LoweredGraph, ids: gs.Tensor, parameter: str, name: str) -> gs.Tensor:
    """Count the ids below each owner's end, then take differences: int64[servers]."""
    ends = out.place(f"{parameter}.ends")
    out.shapes[ends.name] = (None,)
    last = constant(f"{name}.last", [1], np.int64)
    column = out.emit("Unsqueeze", [ids, last], f"{name}.column", INT64, "server")
    below = out.emit("Less", [column, ends], f"{name}.below", np.dtype(bool), "server")
    ones = out.emit("Cast", [below], f"{name}.ones", INT64, "server", to=7)
    first = constant(f"{name}.axis", [0], np.int64)
    totals = out.emit("ReduceSum", [ones, first], f"{name}.totals", INT64, "server", keepdims=0)
    starts = constant(f"{name}.zero", [0], np.int64)
    head = constant(f"{name}.head", [-1], np.int64)
    begin = constant(f"{name}.begin", [0], np.int64)
    before = out.emit("Slice", [totals, begin, head, first], f"{name}.before", INT64, "server")
    shifted = out.emit("Concat", [starts, before], f"{name}.shifted", INT64, "server", axis=0)
    return out.emit("Sub", [totals, shifted], f"{name}.counts", INT64, "server")
