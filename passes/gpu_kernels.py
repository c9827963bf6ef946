"""What segments for GPUs are rewritten to, so that their kernels are quick and can be replayed.

sizes           constants where shapes are known: ONNX Runtime reads sizes on the CPU, computes there what
                depends on them (its GetCpuPreferredNodes), and replays no segment with a node there
SumRows         in one order: the CUDA kernel of ScatterND adds in any, and copies of a table would differ
ConvWeightGrad  per tap: of ResNet-50's first weight at batch 8 cuDNN makes the other way, a convolution by
                an image, in 11 ms on an H200
reductions      over the last axes, then over the first: over both at once cuDNN's take ten times as long
"""

from collections.abc import Callable
from math import prod

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.inliner import inline_local_functions

from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.passes.windows.read_windows import weight_gradient_of
from partc.passes.windows.window_functions import conv_weight_gradient

Shapes = dict[str, tuple[int, ...] | None]
_REDUCTIONS = frozenset({"ReduceSum", "ReduceMean"})


def rewrite_for_gpu(model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a segment for a GPU, and the same with the shapes of its values as far as they are known."""
    for function in model.functions:
        _replace_body(function, model.opset_import[0].version)
    model = inline_local_functions(model)
    shapes = _shapes_of(infer_shapes(model, data_prop=True))
    _rewrite_nodes(model.graph, lambda node: _fixed_size(node, shapes, model.graph))
    _rewrite_nodes(model.graph, lambda node: _split_reduction(node, shapes, model.graph))
    return model, infer_shapes(model, data_prop=True)


def _shapes_of(inferred: onnx.ModelProto) -> Shapes:
    graph = inferred.graph
    shapes: Shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        is_known = kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim)
        shapes[value.name] = tuple(dim.dim_value for dim in kind.shape.dim) if is_known else None
    return shapes


def _rewrite_nodes(graph: onnx.GraphProto, rewrite: Callable[[onnx.NodeProto], list[onnx.NodeProto]]) -> None:
    nodes = [new for node in graph.node for new in rewrite(node)]
    del graph.node[:]
    graph.node.extend(nodes)


# ---------------------------------------------------------------- nodes


def _fixed_size(node: onnx.NodeProto, shapes: Shapes, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return nothing for a known size, which becomes an initializer; an output of the segment stays."""
    shape = shapes.get(node.input[0]) if node.op_type in ("Shape", "Size") and not node.domain else None
    if shape is None or any(output.name == node.output[0] for output in graph.output):
        return [node]
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    sizes = shape[attributes.get("start", 0) : attributes.get("end")]
    value = np.array(sizes if node.op_type == "Shape" else prod(shape), np.int64)
    graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    return []


def _split_reduction(node: onnx.NodeProto, shapes: Shapes, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return two reductions for one over the first axis and the last ones, with others between them."""
    shape = shapes.get(node.input[0]) if node.op_type in _REDUCTIONS and not node.domain else None
    if shape is None or len(node.input) < 2:
        return [node]
    axes = _constant(node.input[1], graph)
    rank = len(shape)
    reduced = sorted({int(axis) % rank for axis in axes}) if axes is not None and rank else []
    last = reduced[1:]
    if not last or reduced[0] != 0 or last != [*range(rank - len(last), rank)] or len(reduced) == rank:
        return [node]
    keeps = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
    inner, ends, first = (f"{node.output[0]}/{suffix}" for suffix in ("last", "last.axes", "first.axes"))
    for name, values in ((ends, last), (first, [0])):
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
    return [
        helper.make_node(node.op_type, [node.input[0], ends], [inner], inner, keepdims=keeps),
        helper.make_node(node.op_type, [inner, first], [node.output[0]], node.name, keepdims=keeps),
    ]


def _constant(name: str, graph: onnx.GraphProto) -> np.ndarray | None:
    for tensor in graph.initializer:
        if tensor.name == name:
            return numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output:
            (attribute,) = node.attribute
            value = helper.get_attribute_value(attribute)
            return numpy_helper.to_array(value) if attribute.name == "value" else np.array(value)
    return None


# ---------------------------------------------------------------- functions


def _replace_body(function: onnx.FunctionProto, opset: int) -> None:
    if function.domain != FUNCTION_DOMAIN:
        return
    if function.name == SUM_ROWS:
        function.CopyFrom(sum_rows_in_order(opset))
    elif (found := weight_gradient_of(function.name)) is not None:
        windows, weight, group = found
        function.CopyFrom(conv_weight_gradient(windows, weight, group, opset, per_tap=True))


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
