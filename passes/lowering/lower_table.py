"""Read and write a table of which every rank of a mesh axis has some rows, by ids of the whole."""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.expand_gather import TableShard, write_gather, write_scatter
from partc.passes.graph.node_writer import NodeWriter
from partc.passes.layouts.decisions import Decision
from partc.passes.layouts.layouts import Split
from partc.passes.lowering.lowered_graph import FactorPart, PartNumber, constant
from partc.passes.lowering.lowering import Lowering, tag

INT64 = np.dtype(np.int64)


def cuts_table(decision: Decision) -> bool:
    """Tell whether a node is decided to work on a part of a table's rows."""
    return any(axis.cuts_table for axis in decision.axes)


def lower_table(lowering: Lowering, node: gs.Node, decision: Decision) -> gs.Tensor:
    """Return the rows that a Gather finds in a rank's part, or the part to which a ScatterND adds rows."""
    operands = [lowering.need(t.name, layout) for t, layout in zip(node.inputs, decision.inputs, strict=True)]
    result = node.outputs[0].name
    value = lowering.value_name(result, decision.made[0])
    write = NodeWriter(set(), f"{node.name}@{tag(decision.made[0])}")
    part = _part(lowering, node, decision)
    out = gs.Variable(value, dtype=lowering.facts.dtypes[result])
    shapes = [lowering.facts.shape(tensor.name) for tensor in node.inputs]
    if node.op == "Gather":
        table, ids = operands
        ranks = len(shapes[0]), len(shapes[1])
        write_gather(write, table, ids, part, axis=0, ranks=ranks, out=out)
    else:
        table, positions, updates = operands
        ids = write.op("Squeeze", positions, write.ints(-1))
        ids, updates = write_scatter(
            write, ids, updates, part, ids_rank=len(shapes[1]) - 1, row_axes=len(shapes[0]) - 1
        )
        again = write.op("Unsqueeze", ids, write.ints(-1))
        write.op(node.op, table, again, updates, out=out, **node.attrs)
    for written in write.nodes:
        lowering.out.append(written, decision.site)
    lowering.out.original[write.nodes[-1].name] = node.name
    return out


def _part(lowering: Lowering, node: gs.Node, decision: Decision) -> TableShard:
    axis = next(number for number, along in enumerate(decision.axes) if along.cuts_table)
    rows = lowering.facts.shape(node.inputs[0].name)[0]
    parts = lowering.graph.meshes.size(decision.site, axis)
    split = decision.inputs[0].along(axis)
    if isinstance(split, Split) and split.uneven:  # of a factor: [B, T] made one has rows of T entries
        rows_per_part = (FactorPart(split.uneven, (axis,)),), rows // split.uneven
        own = PartNumber(*rows_per_part, "start"), PartNumber(*rows_per_part)
        first, count = (lowering.out.numbers(decision.site, (number,)) for number in own)
        return TableShard(first, count, rows)
    count = constant(f"{node.name}.row_count.{axis}", [rows // parts], np.int64)
    name = f"{node.name}.first_row.{axis}"
    position = lowering.coordinate(decision.site, axis)
    first = lowering.out.emit("Mul", [position, count], name, INT64, decision.site)
    return TableShard(first, count, rows)
