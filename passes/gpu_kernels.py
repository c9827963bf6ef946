"""What segments for GPUs are rewritten to, so that their kernels are quick and can be replayed.

sizes, constants  where shapes are known: ONNX Runtime reads sizes on the CPU, computes there what depends on
                  them (its GetCpuPreferredNodes), and replays no segment with a node there
SumRows           in one order: the CUDA kernel of ScatterND adds in any, and copies of a table would differ
ConvWeightGrad    per tap: of ResNet-50's first weight at batch 8 cuDNN makes the other way, a convolution by
                  an image, in 11 ms on an H200
reductions        over the last axes, then over the first: over both at once cuDNN's take ten times as long
products          of few tiles and long sums in several parts, for a GPU computes as many tiles at once as it
                  has multiprocessors: those 49 taps took 12 ms
Concat            of 32 tensors at most, what CUDA's provider replays
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.passes.windows.read_windows import weight_gradient_of
from partc.passes.windows.window_functions import conv_weight_gradient

Shapes = dict[str, tuple[int, ...] | None]
_REDUCTIONS = frozenset({"ReduceSum", "ReduceMean"})
_NOT_FOLDED = frozenset({"Loop", "If", "Scan", "RandomNormal", "RandomUniform", "RandomNormalLike"})
_NOT_FOLDED |= {"RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
_MOST_CONSTANT_BYTES = 2**16
_MOST_JOINED = 32  # onnxruntime 1.31.1
_TILE = 32  # rows and columns that cuBLAS computes together where there are few
_TILES_AT_ONCE = 264  # two for each multiprocessor of an H200
_LEAST_SUMMED = 256  # entries of a part's sum


def rewrite_for_gpu(model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a segment for a GPU, and the same with the shapes of its values as far as they are known."""
    for function in model.functions:
        _replace_body(function, model.opset_import[0].version)
    model = inline_local_functions(model)
    graph = model.graph
    shapes = _shapes_of(infer_shapes(model, data_prop=True))
    _rewrite_nodes(graph, lambda node: _fixed_size(node, shapes, graph))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    _rewrite_nodes(graph, lambda node: _constant(node, constants, model))
    _rewrite_nodes(graph, lambda node: _split_reduction(node, shapes, constants, graph))
    summed = _read_once_by_sums(graph, constants)
    in_parts: dict[tuple[str, int, int], str] = {}
    _rewrite_nodes(graph, lambda node: _split_product(node, shapes, summed, in_parts, graph))
    _rewrite_nodes(graph, _split_concat)
    _name_nodes(graph)
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


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Name the nodes of functions' bodies, which have no names, after what they make."""
    taken = {node.name for node in graph.node}
    for node in graph.node:
        if not node.name:
            node.name = next(name for name in (node.output[0], f"{node.output[0]}.node") if name not in taken)
            taken.add(node.name)


# ---------------------------------------------------------------- nodes


def _fixed_size(node: onnx.NodeProto, shapes: Shapes, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return nothing for a known size, which becomes an initializer."""
    shape = shapes.get(node.input[0]) if node.op_type in ("Shape", "Size") and not node.domain else None
    if shape is None or _are_outputs(node, graph):
        return [node]
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    sizes = shape[attributes.get("start", 0) : attributes.get("end")]
    value = np.array(sizes if node.op_type == "Shape" else prod(shape), np.int64)
    graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    return []


def _constant(
    node: onnx.NodeProto, constants: dict[str, np.ndarray], model: onnx.ModelProto
) -> list[onnx.NodeProto]:
    """Return nothing for a node that reads constants alone: what it makes becomes initializers."""
    reads = [name for name in node.input if name]
    is_constant = node.op_type == "Constant" or (reads and all(name in constants for name in reads))
    if not is_constant or node.domain or _are_outputs(node, model.graph) or node.op_type in _NOT_FOLDED:
        return [node]
    empty = helper.make_empty_tensor_value_info
    graph = helper.make_graph([node], "constants", [*map(empty, reads)], [*map(empty, node.output)])
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    results = ReferenceEvaluator(alone).run(None, {name: constants[name] for name in reads})
    made = {name: np.asarray(result) for name, result in zip(node.output, results, strict=True)}
    if sum(array.nbytes for array in made.values()) > _MOST_CONSTANT_BYTES:
        return [node]
    constants.update(made)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in made.items())
    return []


def _are_outputs(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    """Tell whether a segment ends with something that a node makes: an initializer is no output of a run."""
    return any(output.name in node.output for output in graph.output)


def _split_reduction(
    node: onnx.NodeProto, shapes: Shapes, constants: dict[str, np.ndarray], graph: onnx.GraphProto
) -> list[onnx.NodeProto]:
    """Return two reductions for one over the first axis and the last ones, with others between them."""
    shape = shapes.get(node.input[0]) if node.op_type in _REDUCTIONS and not node.domain else None
    if shape is None or len(node.input) < 2 or node.input[1] not in constants:
        return [node]
    rank = len(shape)
    reduced = sorted({int(axis) % rank for axis in constants[node.input[1]]}) if rank else []
    last = reduced[1:]
    if not last or reduced[0] != 0 or last != [*range(rank - len(last), rank)] or len(reduced) == rank:
        return [node]
    keeps = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
    inner = f"{node.output[0]}/last"
    over_last, over_first = [node.input[0], _integers(graph, last)], [inner, _integers(graph, [0])]
    return [
        helper.make_node(node.op_type, over_last, [inner], inner, keepdims=keeps),
        helper.make_node(node.op_type, over_first, [node.output[0]], node.name, keepdims=keeps),
    ]


def _read_once_by_sums(graph: onnx.GraphProto, constants: dict[str, np.ndarray]) -> set[str]:
    """Return the tensors that nothing reads but a sum over the first axis, which it leaves out."""
    reads = Counter(name for node in graph.node for name in node.input)
    reads.update(output.name for output in graph.output)
    return {
        node.input[0]
        for node in graph.node
        if node.op_type == "ReduceSum" and len(node.input) == 2 and reads[node.input[0]] == 1
        if constants.get(node.input[1], np.array([])).tolist() == [0]
        if any(each.name == "keepdims" and each.i == 0 for each in node.attribute)
    }


def _split_product(
    node: onnx.NodeProto,
    shapes: Shapes,
    summed: set[str],
    in_parts: dict[tuple[str, int, int], str],
    graph: onnx.GraphProto,
) -> list[onnx.NodeProto]:
    """Return a product [b, m, k] [b, k, n], summed over b, as one of s b parts of k / s each.

    `in_parts`: operands on the left that are in parts already, (the image's name, m, parts) -> name.
    """
    if node.op_type != "MatMul" or node.domain or node.output[0] not in summed:
        return [node]
    left, right = (shapes.get(name) for name in node.input)
    if left is None or right is None or len(left) != 3 or len(right) != 3 or 0 in (*left, *right):
        return [node]
    (b, m, k), n = left, right[2]
    parts = _parts(k, b * -(-m // _TILE) * -(-n // _TILE))
    if parts == 1:
        return [node]
    nodes: list[onnx.NodeProto] = []
    name = node.output[0]
    image = (_source(node.input[0], graph), m, parts)
    if image not in in_parts:
        cut, turned, in_parts[image] = (f"{name}/left.{which}" for which in ("cut", "turned", "parts"))
        sizes, flat = (b, m, parts, k // parts), (b * parts, m, k // parts)
        nodes += [
            helper.make_node("Reshape", [node.input[0], _integers(graph, sizes)], [cut], cut),
            helper.make_node("Transpose", [cut], [turned], turned, perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [turned, _integers(graph, flat)], [in_parts[image]], in_parts[image]),
        ]
    other = f"{name}/right.parts"
    whole = _integers(graph, (b * parts, k // parts, n))
    nodes.append(helper.make_node("Reshape", [node.input[1], whole], [other], other))
    nodes.append(helper.make_node("MatMul", [in_parts[image], other], [name], node.name))
    return nodes


def _source(name: str, graph: onnx.GraphProto) -> str:
    """Return what a tensor is a reshaped image of: each tap flattens the same one."""
    return next(
        (node.input[0] for node in graph.node if name in node.output and node.op_type == "Reshape"), name
    )


def _parts(length: int, tiles: int) -> int:
    """Return into how many equal parts a sum of a length is cut where a product has so many tiles."""
    wanted = _TILES_AT_ONCE // max(1, tiles)
    most = length // _LEAST_SUMMED
    return max((parts for parts in range(1, min(wanted, most) + 1) if length % parts == 0), default=1)


def _split_concat(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return a Concat of many tensors as one of Concats."""
    if node.op_type != "Concat" or node.domain or len(node.input) <= _MOST_JOINED:
        return [node]
    axis = next(each.i for each in node.attribute if each.name == "axis")
    groups = [node.input[first : first + _MOST_JOINED] for first in range(0, len(node.input), _MOST_JOINED)]
    names = [f"{node.output[0]}/{len(node.input)}.{number}" for number in range(len(groups))]
    joined = [
        helper.make_node("Concat", group, [name], name, axis=axis)
        for group, name in zip(groups, names, strict=True)
    ]
    return [
        *joined,
        *_split_concat(helper.make_node("Concat", names, [node.output[0]], node.name, axis=axis)),
    ]


def _integers(graph: onnx.GraphProto, values: Sequence[int]) -> str:
    name = f"integers/{'x'.join(map(str, values))}"
    if all(tensor.name != name for tensor in graph.initializer):
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
    return name


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
