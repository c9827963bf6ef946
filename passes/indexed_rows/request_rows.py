"""Fetch rows of tables that servers own, in two halves, so that light ops can run in between.

    request  worker   ascending ids                    -> GatherRows -> host's server
             server   ascending ids of its host        -> AllToAllRows, cut by owner
             owner    Gather of its rows, then the nodes that the strategy moved here
    return   owner    AllToAllRows back
             server   rows of each worker              -> ScatterRows
             worker   rows in the order of its ids

With local aggregation ids are merged on the host, so that a row which several workers want crosses the
network once (parallax.txt, section 5.3.2). A node that makes rows smaller, such as a Slice or a
Cast to 16 bits, runs before they return (figure 10).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.exchange_rows import drawn_ids
from partc.passes.indexed_rows.expected_rows import Level, rows_at
from partc.passes.indexed_rows.route_rows import (
    INT64,
    all_to_all_rows,
    count_by_owner,
    count_from_start,
    gather_rows,
    scatter_rows,
    sort_ids,
    unique,
)
from partc.passes.layouts.decisions import Decision
from partc.passes.layouts.layouts import REPLICAS, Layout, RequestedRows, Split, served_rows
from partc.passes.lowering.lowered_graph import LoweredGraph, constant
from partc.passes.lowering.lowering import Lowering, RowRequest


def request_rows(lowering: Lowering, node: gs.Node, decision: Decision) -> gs.Tensor:
    """Return, on each owner, the rows that a Gather of the main computation requests of it.

    They are those of all Gathers that can ask at once: a recurrence looks up each step's words.
    """
    if node.name not in lowering.row_requests:
        _request(lowering, _asked_together(lowering, node, decision), decision)
    return lowering.row_requests[node.name].rows


def _request(lowering: Lowering, nodes: Sequence[gs.Node], decision: Decision) -> None:
    """Request the rows of Gathers, each of which can do so, as the first of them was decided."""
    out = lowering.out
    table, requested = nodes[0].inputs[0], decision.outputs[0].along(REPLICAS)
    assert isinstance(requested, RequestedRows)
    merge = lowering.graph.synchronised.chosen[requested.parameter].local_aggregation
    name = f"{nodes[0].name}.pull"
    layout = Layout("worker", *decision.inputs[1].placements)
    lowering.make_in_order(node.inputs[1].name for node in nodes[1:])
    ids = {node.name: lowering.need(node.inputs[1].name, layout) for node in nodes}
    flat = [
        _flatten(lowering, table.name, node.inputs[1].name, ids[node.name], f"{node.name}.pull")
        for node in nodes
    ]
    together = out.emit("Concat", flat, f"{name}.ids", INT64, "worker", axis=0) if flat[1:] else flat[0]
    own, inverse = unique(out, together, f"{name}.own", "worker")
    share, drawn = _count_drawn(lowering, nodes, decision, requested.parameter)
    (host_ids,), host_counts = gather_rows(out, [own], f"{name}.host")
    in_order, host_inverse = sort_ids(out, host_ids, f"{name}.host_unique", "server", merge=merge)
    counts = count_by_owner(out, in_order, requested.parameter, f"{name}.by_owner")
    (requested_ids,), requested_counts = all_to_all_rows(out, [in_order], counts, f"{name}.wanted")
    first = out.first_row(requested.parameter)
    local = out.emit("Sub", [requested_ids, first], f"{name}.local", INT64, "server")
    rows = lowering.need(table.name, served_rows(requested.parameter))
    found = out.emit("Gather", [rows, local], f"{name}.found", lowering.facts.dtypes[table.name], "server")
    out.asked_with[nodes[0].name] = tuple(node.name for node in nodes[1:])
    for node, positions in zip(nodes, _cut(out, inverse, flat, name), strict=True):
        lowering.row_requests[node.name] = RowRequest(
            ids[node.name], positions, host_inverse, host_counts, requested_counts, share, drawn, found
        )
    _expect_ids(lowering, requested, own, (host_ids, in_order, requested_ids))
    _expect_rows(lowering, nodes[0].outputs[0].name, requested, found)


def _count_drawn(
    lowering: Lowering, nodes: Sequence[gs.Node], decision: Decision, parameter: str
) -> tuple[float, float]:
    """Return the share of one worker's ids of a table that Gathers ask for at once, and how many these are.

    0 where only the data may tell.
    """
    parts = lowering.graph.replicas if isinstance(decision.inputs[1].along(REPLICAS), Split) else 1
    shapes = (lowering.facts.shape(node.inputs[1].name) for node in nodes)
    drawn = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes) / parts
    all_drawn = _all_drawn(lowering, parameter, drawn)
    return (drawn / all_drawn if all_drawn else 0.0), drawn


def _asked_together(lowering: Lowering, node: gs.Node, decision: Decision) -> list[gs.Node]:
    """Return a Gather, and all others that ask for rows of its table so, if ids of each come of data alone.

    What is read of the rows on servers is not what another Gather's rows are read for.
    """

    def can_ask(other: gs.Node) -> bool:
        asked = lowering.graph.decisions[other.name] if other.op == "Gather" else None
        return (
            asked is not None
            and other.inputs[0] is node.inputs[0]
            and asked.inputs == decision.inputs
            and isinstance(asked.outputs[0].along(REPLICAS), RequestedRows)
            and not _is_read_on_servers(lowering, other.outputs[0])
            and lowering.comes_of_data(other.inputs[1].name)
        )

    return [other for other in node.inputs[0].outputs if can_ask(other)] if can_ask(node) else [node]


def _is_read_on_servers(lowering: Lowering, rows: gs.Tensor) -> bool:
    return any(
        operand is rows and isinstance(layout.along(REPLICAS), RequestedRows)
        for reader in rows.outputs
        for operand, layout in zip(reader.inputs, lowering.graph.decisions[reader.name].inputs, strict=True)
    )


def _cut(
    out: LoweredGraph, positions: gs.Variable, flat: Sequence[gs.Tensor], name: str
) -> Sequence[gs.Variable]:
    """Cut the positions of ids that were joined where each Gather's begin."""
    if len(flat) == 1:
        return [positions]
    sizes = [out.emit("Shape", [ids], f"{ids.name}.size", INT64, "worker") for ids in flat]
    ends = out.emit("Concat", sizes, f"{name}.sizes", INT64, "worker", axis=0)
    parts = [gs.Variable(f"{name}.positions.{number}", dtype=INT64) for number in range(len(flat))]
    out.append(gs.Node("Split", f"{name}.cut", {"axis": 0}, [positions, ends], list(parts)), "worker")
    return parts


def run_on_requested_rows(lowering: Lowering, node: gs.Node, decision: Decision) -> gs.Tensor:
    """Emit a node that can_run_on_rows where the rows are: the ids' axes have become axis 0."""
    out = lowering.out
    requested = decision.inputs[0].along(REPLICAS)
    assert isinstance(requested, RequestedRows)
    rows = lowering.need(node.inputs[0].name, Layout("server", requested))
    folded = requested.ids_rank - 1
    name = f"{node.outputs[0].name}.asked"
    operands: list[gs.Tensor] = [rows]
    attributes = dict(node.attrs)
    for index, operand in enumerate(node.inputs[1:], 1):
        value = lowering.facts.fixed_value(operand.name)
        if value is None:
            assert not operand.name
            operands.append(gs.Variable.empty())
            continue
        is_axes = node.op == "Slice" and index == 3
        axes = np.where(value < 0, value, value - folded) if is_axes else value
        operands.append(gs.Constant(f"{name}.{index}", np.asarray(axes, dtype=np.asarray(value).dtype)))
    if node.op == "Gather" and attributes.get("axis", 0) > 0:
        attributes["axis"] -= folded
    dtype = lowering.facts.dtypes[node.outputs[0].name]
    result = out.emit(node.op, operands, name, dtype, "server", **attributes)
    _expect_rows(lowering, node.outputs[0].name, requested, result)
    return result


def return_rows(lowering: Lowering, tensor: str, requested: RequestedRows) -> gs.Tensor:
    """Return the rows on the workers that requested them, in the shape of the tensor."""
    out = lowering.out
    rows = lowering.need(tensor, Layout("server", requested))
    request = lowering.row_requests[requested.gather]
    name = rows.name
    if name not in lowering.returned:
        (back,), _ = all_to_all_rows(out, [rows], request.requested_counts, f"{name}.back")
        spread = out.emit("Gather", [back, request.host_inverse], f"{name}.spread", rows.dtype, "server")
        host = _expected(lowering, requested.parameter, request, "host")
        worker = _expected(lowering, requested.parameter, request, "worker")
        out.nbytes[spread.name] = round(out.nbytes[rows.name] * worker / max(host, 1.0))
        lowering.returned[name] = scatter_rows(out, spread, request.host_counts, f"{name}.scattered")
    own = lowering.returned[name]
    ordered = out.emit("Gather", [own, request.inverse], f"{tensor}.ordered", rows.dtype, "worker")
    return _unflatten(lowering, tensor, requested, request.ids, ordered)


def _flatten(lowering: Lowering, table: str, indices: str, ids: gs.Tensor, name: str) -> gs.Tensor:
    out = lowering.out
    wide = ids
    if ids.dtype != INT64:
        wide = out.emit("Cast", [ids], f"{name}.int64", INT64, "worker", to=7)
    wrapped = count_from_start(lowering, table, wide, name)
    if len(lowering.facts.shape(indices)) == 1:
        return wrapped
    flat = constant(f"{name}.flat_shape", [-1], np.int64)
    return out.emit("Reshape", [wrapped, flat], f"{name}.flat", INT64, "worker")


def _unflatten(
    lowering: Lowering, tensor: str, requested: RequestedRows, ids: gs.Tensor, rows: gs.Tensor
) -> gs.Tensor:
    """Give the rows, one per id, the ids' axes."""
    out = lowering.out
    name = lowering.value_name(tensor, Layout("worker", requested.returned))
    if requested.ids_rank == 1:
        return out.emit("Identity", [rows], name, rows.dtype, "worker")
    tail = constant(f"{name}.tail", list(lowering.facts.shape(tensor)[requested.ids_rank :]), np.int64)
    sizes = out.emit("Shape", [ids], f"{name}.ids_shape", INT64, "worker")
    shape = out.emit("Concat", [sizes, tail], f"{name}.shape", INT64, "worker", axis=0)
    return out.emit("Reshape", [rows, shape], name, rows.dtype, "worker")


def _all_drawn(lowering: Lowering, parameter: str, drawn: float) -> float:
    gradient = lowering.graph.training.gradients[parameter]
    return max(drawn, drawn_ids(lowering, parameter)) if gradient.is_sparse else drawn


def _expected(lowering: Lowering, parameter: str, request: RowRequest, level: Level) -> float:
    """Return the rows that a Gather is expected to ask for at a level: its share of the table's."""
    if not request.share:
        return 0.0
    return request.share * rows_at(lowering.expected, parameter, level, request.drawn / request.share)


def _expect_ids(
    lowering: Lowering, requested: RequestedRows, own: gs.Variable, on_host: Iterable[gs.Variable]
) -> None:
    """Tell the cost model how many bytes a request's ids take, on a worker and on hosts."""
    request = lowering.row_requests[requested.gather]
    levels: list[tuple[gs.Variable, Level]] = [(own, "worker"), *((ids, "host") for ids in on_host)]
    for ids, level in levels:
        count = _expected(lowering, requested.parameter, request, level)
        lowering.out.nbytes[ids.name] = round(count * INT64.itemsize)


def _expect_rows(lowering: Lowering, tensor: str, requested: RequestedRows, rows: gs.Variable) -> None:
    """Tell the cost model how many bytes the rows take that one owner sends."""
    width = lowering.facts.shape(tensor)[requested.ids_rank :]
    row_bytes = int(np.prod(width, dtype=np.int64)) * np.dtype(rows.dtype).itemsize
    count = _expected(lowering, requested.parameter, lowering.row_requests[requested.gather], "host")
    lowering.out.nbytes[rows.name] = round(count * row_bytes)
    lowering.out.shapes[rows.name] = (None, *width)
