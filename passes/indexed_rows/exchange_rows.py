"""Sum indexed slices over the replicas: on the servers that own their rows, or by AllReduce.

    push   worker   SumRows of its own slices          -> GatherRows -> host's server
           server   SumRows of its host's slices       -> AllToAllRows, cut by owner
           owner    SumRows of what all hosts sent     =  the gradient of its rows

So a row crosses the network once per host (parallax.txt, section 5.3.2: local aggregation); without
local aggregation the host's server only sorts what its workers sent.
"""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.training_graph import Gradient
from partc.passes.indexed_rows.expected_rows import Level, rows_at
from partc.passes.indexed_rows.indexed_slices import gradient_read_by, pairs_of
from partc.passes.indexed_rows.route_rows import (
    INT64,
    all_to_all_rows,
    count_by_owner,
    count_from_start,
    gather_rows,
    sort_rows,
    sum_rows,
)
from partc.passes.layouts.layouts import REPLICAS, WORKER, Layout, Partial, Replicate, Split
from partc.passes.lowering.lowered_graph import constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.rules.sharding_rules import is_sum_rows
from partc.runtime.plan.program import Site


def needs_exchange(lowering: Lowering, node: gs.Node, site: Site) -> bool:
    """Tell whether a node on the workers sums or scatters slices of a parameter that is all-reduced."""
    adds = node.op == "ScatterND" and node.attrs.get("reduction") == "add"
    if not (is_sum_rows(node) or adds) or node.name in lowering.graph.main:
        return False
    gradient = gradient_read_by(node, lowering.graph.training.gradients.values())
    if gradient is None or lowering.graph.synchronised.method(gradient.parameter) != "all_reduce":
        return False
    parts = [part for pair in _pairs(lowering, gradient) for part in pair]
    return any(lowering.graph.layout(part) != Layout(site) for part in parts)


def reduce_slices(lowering: Lowering, node: gs.Node, site: Site) -> list[gs.Tensor]:
    """All-reduce indexed slices as a dense gradient; for SumRows: every id, and its summed row.

    Exact where the sparse update is the identity at zero gradient.
    """
    out = lowering.out
    gradient = gradient_read_by(node, lowering.graph.training.gradients.values())
    assert gradient is not None
    total = _all_reduced(lowering, gradient, site)
    if not is_sum_rows(node):
        return [_add_to_data(lowering, node, total, site)]
    name = f"{gradient.parameter}.gradient"
    rows = lowering.graph.training.variables[gradient.parameter].shape[0]
    bounds = [constant(f"{name}.{k}", v, np.int64) for k, v in (("from", 0), ("to", rows))]
    step = constant(f"{name}.step", 1, np.int64)
    all_ids = out.emit("Range", [*bounds, step], f"{name}.ids", INT64, site)
    return [all_ids, total]


def _all_reduced(lowering: Lowering, gradient: Gradient, site: Site) -> gs.Variable:
    """Scatter each replica's own slices into zeros, and all-reduce them, once."""
    if gradient.parameter in lowering.reduced:
        return lowering.reduced[gradient.parameter]
    out = lowering.out
    parameter = lowering.graph.training.variables[gradient.parameter]
    ids, rows = _own_slices(lowering, gradient, site)
    name = f"{gradient.parameter}.gradient"
    shape = constant(f"{name}.shape", list(parameter.shape), np.int64)
    zero = gs.Constant(f"{name}.zero", np.zeros((), dtype=parameter.dtype))
    zeros = out.emit("Expand", [zero, shape], f"{name}.zeros", parameter.dtype, site)
    last = constant(f"{name}.last", [1], np.int64)
    positions = out.emit("Unsqueeze", [ids, last], f"{name}.positions", INT64, site)
    operands = [zeros, positions, rows]
    term = out.emit("ScatterND", operands, f"{name}.term", parameter.dtype, site, reduction="add")
    total = gs.Variable(f"{name}.sum", dtype=parameter.dtype)
    for value in (term, total):
        out.shapes[value.name] = parameter.shape
        out.nbytes[value.name] = int(np.prod(parameter.shape)) * parameter.dtype.itemsize
    out.communicate("AllReduce", [term], [total], site=site, axes=(REPLICAS,), reduction="sum")
    lowering.reduced[gradient.parameter] = total
    return total


def _add_to_data(lowering: Lowering, node: gs.Node, total: gs.Variable, site: Site) -> gs.Tensor:
    """Add what a ScatterND adds row by row to its data, which is often zero."""
    data, result = node.inputs[0].name, node.outputs[0].name
    if data in lowering.graph.zeros:
        lowering.out.meanings[total.name] = (result, Layout(site))
        return total
    name = lowering.value_name(result, Layout(site))
    return lowering.out.emit("Add", [lowering.need(data, Layout(site)), total], name, total.dtype, site)


def push_slices(lowering: Lowering, parameter: str) -> tuple[gs.Variable, gs.Variable]:
    """Return a parameter's (unique ids, summed rows) on the servers that own them."""
    gradient = lowering.graph.training.gradients[parameter]
    out, name = lowering.out, f"{parameter}.push"
    if name in lowering.exchanged:
        return lowering.exchanged[name]
    ids, rows = _own_slices(lowering, gradient, WORKER)
    ids = count_from_start(lowering, parameter, ids, f"{name}.own")
    ids, rows = sum_rows(out, ids, rows, f"{name}.own", "worker")
    _expect(lowering, parameter, "worker", ids, rows)
    (ids, rows), _ = gather_rows(out, [ids, rows], f"{name}.host")
    _expect(lowering, parameter, "host", ids, rows)
    merge = lowering.graph.synchronised.chosen[parameter].local_aggregation
    ids, rows = sort_rows(out, ids, rows, f"{name}.host_sum", "server", merge=merge)
    counts = count_by_owner(out, ids, parameter, f"{name}.by_owner")
    _expect(lowering, parameter, "host", ids, rows)
    (ids, rows), _ = all_to_all_rows(out, [ids, rows], counts, f"{name}.all")
    _expect(lowering, parameter, "host", ids, rows)
    ids, rows = sum_rows(out, ids, rows, f"{name}.sum", "server")
    _expect(lowering, parameter, "owned", ids, rows)
    lowering.exchanged[name] = ids, rows
    return ids, rows


def _expect(lowering: Lowering, parameter: str, level: Level, ids: gs.Variable, rows: gs.Variable) -> None:
    """Tell the cost model how many bytes slices take at a level."""
    count = rows_at(lowering.expected, parameter, level, drawn_ids(lowering, parameter))
    row_bytes = lowering.facts.nbytes(parameter) / max(1, lowering.facts.shape(parameter)[0])
    lowering.out.nbytes[ids.name] = round(count * INT64.itemsize)
    lowering.out.nbytes[rows.name] = round(count * row_bytes)


def drawn_ids(lowering: Lowering, parameter: str) -> float:
    """Return how many ids one worker's slices of a parameter have."""
    gradient = lowering.graph.training.gradients[parameter]
    return sum(_own_bytes(lowering, ids) / INT64.itemsize for ids, _ in _pairs(lowering, gradient))


def _own_bytes(lowering: Lowering, tensor: str) -> int:
    is_split = isinstance(lowering.graph.layout(tensor).along(REPLICAS), Split)
    return lowering.facts.nbytes(tensor) // (lowering.graph.replicas if is_split else 1)


def _pairs(lowering: Lowering, gradient: Gradient) -> list[tuple[str, str]]:
    assert gradient.ids is not None and gradient.rows is not None
    return pairs_of(lowering.source(gradient.ids), lowering.source(gradient.rows))


def _own_slices(lowering: Lowering, gradient: Gradient, site: Site) -> tuple[gs.Tensor, gs.Tensor]:
    """Return this replica's own slices, of all micro-batches: the sum over all replicas is the gradient."""
    assert gradient.rows is not None
    pairs = [_own_pair(lowering, *pair, site) for pair in _pairs(lowering, gradient)]
    if len(pairs) == 1:
        return pairs[0]
    name = f"{gradient.parameter}.own"
    out = lowering.out
    ids = out.emit("Concat", [ids for ids, _ in pairs], f"{name}_ids", INT64, site, axis=0)
    dtype = lowering.facts.dtypes[gradient.rows]
    rows = out.emit("Concat", [rows for _, rows in pairs], f"{name}_rows", dtype, site, axis=0)
    return ids, rows


def _own_pair(lowering: Lowering, ids: str, rows: str, site: Site) -> tuple[gs.Tensor, gs.Tensor]:
    id_layout, row_layout = (_of_all_microbatches(lowering, tensor, site) for tensor in (ids, rows))
    are_alike = id_layout == row_layout and isinstance(row_layout.along(REPLICAS), Split)
    are_terms = id_layout.is_whole and isinstance(row_layout.along(REPLICAS), Partial)
    if are_alike or are_terms:
        return lowering.need(ids, id_layout), lowering.need(rows, row_layout)
    # Every replica has all the slices: each contributes its share of every row.
    whole = lowering.need(rows, Layout(site))
    dtype = lowering.facts.dtypes[rows]
    share = constant(f"{rows}.share", 1.0 / lowering.graph.replicas, dtype)
    term = lowering.out.emit("Mul", [whole, share], f"{rows}.share_of_whole", dtype, site)
    return lowering.need(ids, Layout(site)), term


def _of_all_microbatches(lowering: Lowering, tensor: str, site: Site) -> Layout:
    """Return how a site has a tensor, its micro-batches together."""
    layout = Layout(site, *lowering.graph.layout(tensor).placements)
    axis = lowering.graph.meshes.microbatch_axis
    return layout if axis is None else layout.with_along(axis, Replicate())
