"""Route rows by id: the steps that pulls and pushes share, and sorting with and without merging.

Ids are ascending before they are cut by owner, and owners hold ascending ranges, so cutting by
owner is counting.
"""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.passes.lowering.lowered_graph import LoweredGraph, constant
from partc.passes.lowering.lowering import Lowering
from partc.runtime.plan.program import Site

INT64 = np.dtype(np.int64)


def count_from_start(lowering: Lowering, table: str, ids: gs.Tensor, name: str) -> gs.Variable:
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


def sort_ids(
    out: LoweredGraph, ids: gs.Tensor, name: str, site: Site, *, merge: bool
) -> tuple[gs.Variable, gs.Variable]:
    """Return ids in ascending order, equal ones merged or kept, and where each given id went."""
    if merge:
        return unique(out, ids, name, site)
    in_order, order = _in_order(out, ids, name, site)
    (_, inverse) = _in_order(out, order, f"{name}.order", site)
    return in_order, inverse


def sort_rows(
    out: LoweredGraph, ids: gs.Tensor, rows: gs.Tensor, name: str, site: Site, *, merge: bool
) -> tuple[gs.Variable, gs.Variable]:
    """Return slices with ascending ids, rows of equal ids summed or kept apart."""
    if merge:
        return sum_rows(out, ids, rows, name, site)
    in_order, order = _in_order(out, ids, name, site)
    return in_order, out.emit("Gather", [rows, order], f"{name}.rows", rows.dtype, site)


def _in_order(out: LoweredGraph, values: gs.Tensor, name: str, site: Site) -> tuple[gs.Variable, gs.Variable]:
    """Return int64 values in ascending order, and the position that each came from."""
    size = out.emit("Shape", [values], f"{name}.size", INT64, site)
    outputs = gs.Variable(f"{name}.ids", dtype=INT64), gs.Variable(f"{name}.positions", dtype=INT64)
    attributes = {"axis": 0, "largest": 0, "sorted": 1}
    out.append(gs.Node("TopK", f"{name}.node", attributes, [values, size], list(outputs)), site)
    return outputs


def sum_rows(
    out: LoweredGraph, ids: gs.Tensor, rows: gs.Tensor, name: str, site: Site
) -> tuple[gs.Variable, gs.Variable]:
    """Return slices with ascending ids, each once, and the sum of its rows."""
    outputs = gs.Variable(f"{name}.ids", dtype=INT64), gs.Variable(f"{name}.rows", dtype=rows.dtype)
    node = gs.Node(SUM_ROWS, f"{name}.node", {}, [ids, rows], list(outputs), domain=FUNCTION_DOMAIN)
    out.append(node, site)
    return outputs


def unique(out: LoweredGraph, ids: gs.Tensor, name: str, site: Site) -> tuple[gs.Variable, gs.Variable]:
    """Return ids in ascending order, each once, and where each given id went."""
    once, first, inverse = (gs.Variable(f"{name}.{of}", dtype=INT64) for of in ("ids", "first", "inverse"))
    out.append(gs.Node("Unique", f"{name}.node", {"sorted": 1}, [ids], [once, first, inverse]), site)
    return once, inverse


def gather_rows(
    out: LoweredGraph, values: list[gs.Tensor], name: str
) -> tuple[list[gs.Variable], gs.Variable]:
    """Bring rows to the host's server: one result per value, and how many came from each worker."""
    return _exchange(out, "GatherRows", values, None, name)


def all_to_all_rows(
    out: LoweredGraph, values: list[gs.Tensor], counts: gs.Tensor, name: str
) -> tuple[list[gs.Variable], gs.Variable]:
    """Exchange rows among servers: one result per value, and how many came from each."""
    return _exchange(out, "AllToAllRows", values, counts, name)


def _exchange(
    out: LoweredGraph, op: str, values: list[gs.Tensor], counts: gs.Tensor | None, name: str
) -> tuple[list[gs.Variable], gs.Variable]:
    results = _results(values, name)
    received = gs.Variable(f"{name}.counts", dtype=INT64)
    out.communicate(op, values, results, counts=counts, received_counts=received)
    return results, received


def scatter_rows(out: LoweredGraph, rows: gs.Tensor, counts: gs.Tensor, name: str) -> gs.Variable:
    """Give the host's workers the rows that are theirs, in order."""
    (result,) = _results([rows], name)
    out.communicate("ScatterRows", [rows], [result], counts=counts)
    return result


def _results(values: list[gs.Tensor], name: str) -> list[gs.Variable]:
    return [gs.Variable(f"{name}.{index}", dtype=value.dtype) for index, value in enumerate(values)]


def count_by_owner(out: LoweredGraph, ids: gs.Tensor, parameter: str, name: str) -> gs.Tensor:
    """Count the ids below each owner's end, then take differences: int64[servers]."""
    ends = out.row_ends(parameter)
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
