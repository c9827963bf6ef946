"""Bring what servers own to the workers whole, and take it back.

rows of the parameter itself   Pull, and ToServers with a Slice of the owned rows
any other rows (slices of a    ShareRows among the servers, SpreadRows on each host;
gradient, a part of a table)   FeedRows, and the owner's part found by the counts of the former
"""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.exchange_rows import push_slices
from partc.passes.indexed_rows.route_rows import INT64
from partc.passes.layouts.laid_out_graph import WHOLE_ON_WORKERS
from partc.passes.layouts.layouts import served_rows
from partc.passes.lowering.lowered_graph import constant
from partc.passes.lowering.lowering import Lowering


def gather_owned(lowering: Lowering, tensor: str, parameter: str) -> gs.Tensor:
    """Return on every worker what the servers own of a tensor."""
    target = WHOLE_ON_WORKERS
    piece = lowering.need(tensor, served_rows(parameter))
    out = lowering.out
    result = gs.Variable(lowering.value_name(tensor, target), dtype=piece.dtype)
    if lowering.graph.has_rows_of(tensor, parameter):
        out.communicate("Pull", [piece], [result], owner=parameter)
        return result
    shared = gs.Variable(f"{result.name}.shared", dtype=piece.dtype)
    counts = gs.Variable(f"{result.name}.shared.counts", dtype=INT64)
    out.nbytes.setdefault(piece.name, lowering.facts.nbytes(tensor))
    out.nbytes[shared.name] = out.nbytes[piece.name]
    out.communicate("ShareRows", [piece], [shared], received_counts=counts)
    spread = gs.Variable(f"{result.name}.counts", dtype=INT64)
    out.communicate("SpreadRows", [shared], [result], received_counts=spread)
    lowering.gathered.setdefault(parameter, counts)
    return result


def take_owned_slices(lowering: Lowering, tensor: str, parameter: str) -> gs.Tensor:
    """Return each server's part of what workers computed from all servers' slices."""
    out = lowering.out
    whole = lowering.need(tensor, WHOLE_ON_WORKERS)
    fed = gs.Variable(f"{tensor}.fed", dtype=whole.dtype)
    out.nbytes.setdefault(whole.name, lowering.facts.nbytes(tensor))
    counts = gs.Variable(f"{tensor}.fed.counts", dtype=INT64)
    out.communicate("FeedRows", [whole], [fed], received_counts=counts)
    name = f"{tensor}.own.{parameter}"
    ends, first = out.row_ends(parameter), out.first_row(parameter)
    is_before = out.emit("LessOrEqual", [ends, first], f"{name}.is_before", np.dtype(bool), "server")
    ones = out.emit("Cast", [is_before], f"{name}.ones", INT64, "server", to=7)
    before = out.emit("Mul", [lowering.gathered[parameter], ones], f"{name}.before", INT64, "server")
    axis = constant(f"{name}.axis", [0], np.int64)
    start = out.emit("ReduceSum", [before, axis], f"{name}.start", INT64, "server", keepdims=1)
    ids, _ = push_slices(lowering, parameter)
    length = out.emit("Shape", [ids], f"{name}.length", INT64, "server", start=0, end=1)
    end = out.emit("Add", [start, length], f"{name}.end", INT64, "server")
    value = lowering.value_name(tensor, served_rows(parameter))
    return out.emit("Slice", [fed, start, end, axis], value, whole.dtype, "server")


def slice_owned_rows(lowering: Lowering, node: gs.Node, parameter: str) -> gs.Tensor:
    """Cut rows [start, end) of a variable where they are: every owner has those of its range."""
    out = lowering.out
    rows = lowering.need(node.inputs[0].name, served_rows(parameter))
    first, count = out.first_row(parameter), out.row_count(parameter)
    bounds = row_range(lowering, node)
    zero = constant(f"{node.name}.zero", [0], np.int64)
    local: list[gs.Tensor] = []
    for bound, row in zip(("start", "end"), bounds, strict=True):
        name = f"{node.name}.{bound}"
        spelled = constant(f"{name}.row", [row], np.int64)
        offset = out.emit("Sub", [spelled, first], f"{name}.offset", INT64, "server")
        inside = out.emit("Max", [offset, zero], f"{name}.inside", INT64, "server")
        local.append(out.emit("Min", [inside, count], f"{name}.local", INT64, "server"))
    value = lowering.value_name(node.outputs[0].name, served_rows(parameter))
    return out.emit("Slice", [rows, *local, zero], value, rows.dtype, "server")


def row_range(lowering: Lowering, node: gs.Node) -> tuple[int, int]:
    """Return the first row that a Slice of axis 0 keeps, and the one behind the last."""
    rows = lowering.facts.shape(node.inputs[0].name)[0]
    bounds = [lowering.facts.fixed_value(tensor.name) for tensor in node.inputs[1:3]]
    first, last = (int(np.ravel(bound)[0]) for bound in bounds if bound is not None)
    start, end, _ = slice(first, last).indices(rows)
    return start, max(start, end)
