"""Indexed slices: gradients as (ids, rows), and the one op that partc adds to sum them.

    SumRows  ids int64[n], rows float[n, ...] -> unique_ids int64[u], sums float[u, ...]

It is a model-local ONNX function, so every file that uses it stays standard ONNX.
"""

import onnx
from onnx import helper

DOMAIN = "partc"
SUM_ROWS = "SumRows"


def sum_rows_function(opset: int) -> onnx.FunctionProto:
    """Return SumRows: the rows of equal ids summed, ids ascending."""
    body = onnx.parser.parse_function(
        f"""
        <opset_import: ["" : {opset}], domain: "{DOMAIN}">
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


def sum_rows_node(ids: str, rows: str, unique_ids: str, sums: str, name: str) -> onnx.NodeProto:
    """Return the node that calls SumRows."""
    return helper.make_node(SUM_ROWS, [ids, rows], [unique_ids, sums], name=name, domain=DOMAIN)
