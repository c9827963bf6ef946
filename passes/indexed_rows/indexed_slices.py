"""Indexed slices: gradients as (ids, rows), and the one op that partc adds to sum them.

    SumRows  ids int64[n], rows float[n, ...] -> unique_ids int64[u], sums float[u, ...]

It is a model-local ONNX function, so every file that uses it stays standard ONNX.
"""

from collections.abc import Iterable
from functools import cache

import onnx
import onnx_graphsurgeon as gs

from partc.passes.graph.training_graph import Gradient, TrainingGraph

FUNCTION_DOMAIN = "partc"
SUM_ROWS = "SumRows"


def sum_rows_function(opset: int) -> onnx.FunctionProto:
    """Return SumRows: the rows of equal ids summed, ids ascending."""
    body = onnx.parser.parse_function(
        f"""
        <opset_import: ["" : {opset}], domain: "{FUNCTION_DOMAIN}">
        {SUM_ROWS} (ids, rows) => (unique_ids, sums)
        {{
            unique_ids, first, inverse, count = Unique <sorted = 1> (ids)
            row_shape = Shape <start = 1> (rows)
            u = Shape (unique_ids)
            sums_shape = Concat <axis = 0> (u, row_shape)
            zero = Constant <value_float = 0.0> ()
            typed_zero = CastLike (zero, rows)
            zeros = Expand (typed_zero, sums_shape)
            last = Constant <value_ints = [1]> ()
            positions = Unsqueeze (inverse, last)
            sums = ScatterND <reduction = "add"> (zeros, positions, rows)
        }}
        """
    )
    assert isinstance(body, onnx.FunctionProto)
    return body


def functions_of(training: TrainingGraph) -> dict[str, onnx.FunctionProto]:
    """Return by name what a distributed step may call: it may sum rows where the graph does not."""
    return {f.name: f for f in (_sum_rows(training.opset), *training.functions)}


_sum_rows = cache(sum_rows_function)


def parts_of(tensor: gs.Tensor) -> list[gs.Tensor]:
    """Return the operands of the Concat along axis 0 that makes a tensor, or the tensor itself.

    A table that is read twice has the slices of both reads one behind the other.
    """
    if tensor.inputs and tensor.inputs[0].op == "Concat" and tensor.inputs[0].attrs["axis"] == 0:
        return list(tensor.inputs[0].inputs)
    return [tensor]


def pairs_of(ids: gs.Tensor, rows: gs.Tensor) -> list[tuple[str, str]]:
    """Return the names of the (ids, rows) that indexed slices are joined from."""
    all_ids, all_rows = parts_of(ids), parts_of(rows)
    if len(all_ids) != len(all_rows):
        return [(ids.name, rows.name)]
    return [(one.name, other.name) for one, other in zip(all_ids, all_rows, strict=True)]


def gradient_read_by(node: gs.Node, gradients: Iterable[Gradient]) -> Gradient | None:
    """Return the gradient whose rows a SumRows or ScatterND reads.

    Tables of one column that are added up share their rows, and differ in their ids alone.
    """
    candidates = [gradient for gradient in gradients if any(t.name == gradient.rows for t in node.inputs)]
    if len(candidates) > 1:
        behind = {name for tensor in node.inputs for name in _names_behind(tensor)}
        candidates = [gradient for gradient in candidates if gradient.ids in behind]
    return candidates[0] if candidates else None


def _names_behind(tensor: gs.Tensor) -> set[str]:
    """Return a tensor's name, and those of what its node reads."""
    return {tensor.name} | {read.name for node in tensor.inputs for read in node.inputs}
