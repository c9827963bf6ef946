"""SumRows with sums of one order: CUDA's ScatterND adds in any, and replicas' tables would differ in bits."""

import onnx

from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS


def sum_rows_in_order(opset: int) -> onnx.FunctionProto:
    """Return SumRows, each sum made in the same order whatever the device.

    Rows are brought into the order of their ids, and each takes the sum of those before it with its id, of
    twice as many at every turn: a segmented scan (Hillis and Steele, Commun. ACM 29 (1986) 1170-1183).
    """
    body = onnx.parser.parse_function(
        f"""
        <opset_import: ["" : {opset}], domain: "{FUNCTION_DOMAIN}">
        {SUM_ROWS} (ids, rows) => (unique_ids, sums)
        {{
            unique_ids, first, inverse, count = Unique <sorted = 1> (ids)
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            two = Constant <value_int = 2> ()
            axis = Constant <value_ints = [0]> ()
            last_axis = Constant <value_ints = [1]> ()
            n = Shape (ids)
            length = Squeeze (n, axis)
            places = Range (zero, length, one)
            spread = Max (length, one)
            scaled = Mul (inverse, spread)
            keys = Add (scaled, places)
            sorted_keys, order = TopK <axis = 0, largest = 0, sorted = 1> (keys, n)
            of_row = Div (sorted_keys, spread)
            row_shape = Shape <start = 1> (rows)
            width = ReduceProd <keepdims = 1> (row_shape)
            flat_shape = Concat <axis = 0> (n, width)
            flat = Reshape <allowzero = 1> (rows, flat_shape)
            in_order = Gather <axis = 0> (flat, order)
            float_zero = Constant <value_float = 0.0> ()
            nothing = CastLike (float_zero, rows)
            padded_count = Concat <axis = 0> (count, last_axis)
            most = ReduceMax <keepdims = 0> (padded_count)
            goes_on = Less (one, most)
            step, scanned = Loop ("", goes_on, one, in_order) <body =
                scan (int64 turn, bool is_on, int64 s, so_far)
                    => (bool is_still_on, int64 next_s, next_so_far)
            {{
                shifted = Sub (places, s)
                source = Max (shifted, zero)
                id_there = Gather <axis = 0> (of_row, source)
                is_same = Equal (id_there, of_row)
                is_there = LessOrEqual (s, places)
                takes = And (is_same, is_there)
                column = Unsqueeze (takes, last_axis)
                there = Gather <axis = 0> (so_far, source)
                taken = Where (column, there, nothing)
                next_so_far = Add (so_far, taken)
                next_s = Mul (s, two)
                is_still_on = Less (next_s, most)
            }}>
            ends = CumSum (count, zero)
            last = Sub (ends, one)
            summed = Gather <axis = 0> (scanned, last)
            u = Shape (unique_ids)
            sums_shape = Concat <axis = 0> (u, row_shape)
            sums = Reshape <allowzero = 1> (summed, sums_shape)
        }}
        """
    )
    assert isinstance(body, onnx.FunctionProto)
    return body
