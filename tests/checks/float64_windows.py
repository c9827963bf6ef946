"""Convolutions and averages in float64: ONNX Runtime, which has no kernels for them, is given products.

    Conv           y = W [(g), o, c k] times the windows of x [n, (g), c k, y]
    ConvTranspose  the Conv of x, spread by its strides, with the kernel turned round
    AveragePool    the mean of each window
    LpPool         the norm of each window
    LRN            x over a power of the sum of squares in neighbouring channels

Every model that is opened is written so: segments, the single device's graph, and what the compiler asks ONNX
Runtime about. Plans are not touched. Images have two axes.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import helper

DOMAIN = "tests.float64"
PLAIN = ort.InferenceSession


def _count(name: str, size: str, step: int, place: int) -> str:
    """Count 0, step, 2 step, .. along one of four axes."""
    shape = ", ".join("-1" if axis == place else "1" for axis in range(4))
    return f"""
    {name}_end = Squeeze ({size})
    {name}_plain = Range (zero, {name}_end, one)
    {name}_step = Constant <value_int = {step}> ()
    {name}_stepped = Mul ({name}_plain, {name}_step)
    {name}_shape = Constant <value_ints = [{shape}]> ()
    {name} = Reshape ({name}_stepped, {name}_shape)"""


def _windows(strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int]) -> str:
    """Say `columns` [n, c, k0 k1 y0 y1], of `x` and `kernel`; `target` is the result's spatial sizes."""
    before, after = list(pads[:2]), list(pads[2:])
    return f"""
    pads = Constant <value_ints = {[0, 0, *before, 0, 0, *after]}> ()
    strides = Constant <value_ints = {list(strides)}> ()
    dilations = Constant <value_ints = {list(dilations)}> ()
    ones = Constant <value_ints = [1, 1]> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    flat = Constant <value_ints = [-1]> ()
    flat_images = Constant <value_ints = [0, 0, -1]> ()
    padded = Pad (x, pads)
    image = Shape <start = 2, end = 4> (padded)
    kernel_1 = Sub (kernel, ones)
    last = Mul (kernel_1, dilations)
    reach = Sub (image, last)
    room = Sub (reach, ones)
    steps = Div (room, strides)
    target = Add (steps, ones)
    k0, k1 = Split <axis = 0, num_outputs = 2> (kernel)
    y0, y1 = Split <axis = 0, num_outputs = 2> (target)
    h, w = Split <axis = 0, num_outputs = 2> (image)
    {_count("tap_rows", "k0", dilations[0], 0)}
    {_count("tap_columns", "k1", dilations[1], 1)}
    {_count("rows", "y0", strides[0], 2)}
    {_count("columns_of", "y1", strides[1], 3)}
    all_rows = Add (tap_rows, rows)
    all_columns = Add (tap_columns, columns_of)
    row_starts = Mul (all_rows, w)
    places = Add (row_starts, all_columns)
    index = Reshape (places, flat)
    pixels = Reshape (padded, flat_images)
    columns = Gather <axis = 2> (pixels, index)
    positions = ReduceProd <keepdims = 1> (target)
    taps = ReduceProd <keepdims = 1> (kernel)"""


def _convolve(group: int) -> str:
    """Say `y`, of `columns` and `weight`."""
    return f"""
    kept = Constant <value_ints = [0]> ()
    group = Constant <value_ints = [{group}]> ()
    by_group = Concat <axis = 0> (kept, group, flat, positions)
    grouped = Reshape (columns, by_group)
    out_channels = Shape <start = 0, end = 1> (weight)
    of_group = Div (out_channels, group)
    weight_sizes = Concat <axis = 0> (group, of_group, flat)
    matrix = Reshape (weight, weight_sizes)
    products = MatMul (matrix, grouped)
    samples = Shape <start = 0, end = 1> (x)
    sizes = Concat <axis = 0> (samples, out_channels, target)
    y = Reshape (products, sizes)"""


def _conv(node: onnx.NodeProto) -> str:
    strides, dilations, pads, group = _attributes(node)
    return f"""(x, weight) => (y) {{
    kernel = Shape <start = 2, end = 4> (weight)
    {_windows(strides, dilations, pads)}
    {_convolve(group)}
}}"""


def _conv_transpose(node: onnx.NodeProto) -> str:
    """Spread x by its strides, pad it by the kernel's span less one, and convolve with the kernel turned."""
    strides, dilations, pads, group = _attributes(node)
    more = _ints(node, "output_padding", [0, 0])
    kernel = _ints(node, "kernel_shape", [])
    assert len(kernel) == 2, f"{node.name}: a ConvTranspose that does not tell its kernel"
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    around = [r - p for r, p in zip(reach, pads[:2], strict=True)]
    around += [r - p + m for r, p, m in zip(reach, pads[2:], more, strict=True)]
    windows = _windows((1, 1), dilations, around)
    spread = [*[0] * 9, strides[0] - 1, 0, strides[1] - 1]
    cut = [*[0] * 6, 1 - strides[0], 1 - strides[1]]
    return f"""(given, given_weight) => (y) {{
    spread_axes = Constant <value_ints = [3, 5]> ()
    apart = Unsqueeze (given, spread_axes)
    zeros_behind = Constant <value_ints = {spread}> ()
    spread_apart = Pad (apart, zeros_behind)
    images = Shape <start = 0, end = 2> (given)
    small = Shape <start = 2, end = 4> (given)
    spread_by = Constant <value_ints = {list(strides)}> ()
    large = Mul (small, spread_by)
    spread_sizes = Concat <axis = 0> (images, large)
    spread = Reshape (spread_apart, spread_sizes)
    nothing_behind = Constant <value_ints = {cut}> ()
    x = Pad (spread, nothing_behind)
    of_groups = Constant <value_ints = [{group}, -1]> ()
    out_of_group = Shape <start = 1, end = 2> (given_weight)
    tap_count = Constant <value_ints = [{kernel[0] * kernel[1]}]> ()
    weight_apart = Concat <axis = 0> (of_groups, out_of_group, tap_count)
    grouped_weight = Reshape (given_weight, weight_apart)
    exchanged = Transpose <perm = [0, 2, 1, 3]> (grouped_weight)
    backwards = Constant <value_ints = {list(range(kernel[0] * kernel[1]))[::-1]}> ()
    turned = Gather <axis = 3> (exchanged, backwards)
    in_channels = Shape <start = 0, end = 1> (given_weight)
    groups = Constant <value_ints = [{group}]> ()
    in_of_group = Div (in_channels, groups)
    rest = Constant <value_ints = [-1]> ()
    kernel = Constant <value_ints = {list(kernel)}> ()
    turned_sizes = Concat <axis = 0> (rest, in_of_group, kernel)
    weight = Reshape (turned, turned_sizes)
    {windows}
    {_convolve(group)}
}}"""


def _average_pool(node: onnx.NodeProto) -> str:
    strides, dilations, pads, _ = _attributes(node)
    assert not any(a.name == "ceil_mode" and a.i for a in node.attribute), "windows beyond the padding"
    counts_padding = any(a.name == "count_include_pad" and a.i for a in node.attribute)
    kernel = _ints(node, "kernel_shape", [])
    entries = "counted = Identity (taps)"
    if not counts_padding:
        entries = """
    own = Shape <start = 2, end = 4> (x)
    full = ConstantOfShape <value = int64[1] {1}> (own)
    padding = Constant <value_ints = EDGES> ()
    full_padded = Pad (full, padding)
    full_flat = Reshape (full_padded, flat)
    present = Gather (full_flat, index)
    present_sizes = Concat <axis = 0> (taps, positions)
    present_apart = Reshape (present, present_sizes)
    counted = ReduceSum <keepdims = 0> (present_apart, kept)""".replace("EDGES", str(list(pads)))
    return f"""(x) => (y) {{
    kernel = Constant <value_ints = {list(kernel)}> ()
    {_windows(strides, dilations, pads)}
    kept = Constant <value_ints = [0]> ()
    apart_sizes = Concat <axis = 0> (kept, kept, taps, positions)
    apart = Reshape (columns, apart_sizes)
    tap_axis = Constant <value_ints = [2]> ()
    sums = ReduceSum <keepdims = 0> (apart, tap_axis)
    {entries}
    number = CastLike (counted, x)
    means = Div (sums, number)
    images = Shape <start = 0, end = 2> (x)
    sizes = Concat <axis = 0> (images, target)
    y = Reshape (means, sizes)
}}"""


def _lp_pool(node: onnx.NodeProto) -> str:
    strides, dilations, pads, _ = _attributes(node)
    kernel = _ints(node, "kernel_shape", [])
    power = next((a.i for a in node.attribute if a.name == "p"), 2)
    return f"""(x) => (y) {{
    kernel = Constant <value_ints = {list(kernel)}> ()
    {_windows(strides, dilations, pads)}
    kept = Constant <value_ints = [0]> ()
    apart_sizes = Concat <axis = 0> (kept, kept, taps, positions)
    apart = Reshape (columns, apart_sizes)
    tap_axis = Constant <value_ints = [2]> ()
    p = Constant <value_float = {float(power)}> ()
    power = CastLike (p, x)
    one_wide = CastLike (one, x)
    root_wide = Div (one_wide, power)
    sizes_of = Abs (apart)
    powers = Pow (sizes_of, power)
    sums = ReduceSum <keepdims = 0> (powers, tap_axis)
    norms = Pow (sums, root_wide)
    images = Shape <start = 0, end = 2> (x)
    sizes = Concat <axis = 0> (images, target)
    y = Reshape (norms, sizes)
}}"""


def _lrn(node: onnx.NodeProto) -> str:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    size = given["size"]
    before = (size - 1) // 2
    pads = [0, before, 0, 0, 0, size - 1 - before, 0, 0]
    shifts = "".join(
        f"""
    start_{n} = Constant <value_ints = [{n}]> ()
    end_{n} = Add (start_{n}, channels)
    part_{n} = Slice (padded, start_{n}, end_{n}, channel_axis)"""
        for n in range(size)
    )
    return f"""(x) => (y) {{
    squared = Mul (x, x)
    pads = Constant <value_ints = {pads}> ()
    padded = Pad (squared, pads)
    channels = Shape <start = 1, end = 2> (x)
    channel_axis = Constant <value_ints = [1]> ()
    {shifts}
    sums = Sum ({", ".join(f"part_{n}" for n in range(size))})
    alpha_32 = Constant <value_float = {given.get("alpha", 1e-4) / size}> ()
    alpha = CastLike (alpha_32, x)
    bias_32 = Constant <value_float = {given.get("bias", 1.0)}> ()
    bias = CastLike (bias_32, x)
    beta_32 = Constant <value_float = {given.get("beta", 0.75)}> ()
    beta = CastLike (beta_32, x)
    scaled = Mul (alpha, sums)
    biased = Add (bias, scaled)
    power = Pow (biased, beta)
    y = Div (x, power)
}}"""


def _global_average_pool(_: onnx.NodeProto) -> str:
    return """(x) => (y) {
    space = Constant <value_ints = [2, 3]> ()
    y = ReduceMean <keepdims = 1> (x, space)
}"""


WRITTEN: dict[str, Callable[[onnx.NodeProto], str]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "LRN": _lrn,
    "GlobalAveragePool": _global_average_pool,
}


def _attributes(node: onnx.NodeProto) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
    auto_pad = next((a.s for a in node.attribute if a.name == "auto_pad"), b"NOTSET")
    assert auto_pad == b"NOTSET", f"{node.name}: write the padding out"
    strides, dilations = _ints(node, "strides", [1, 1]), _ints(node, "dilations", [1, 1])
    pads = _ints(node, "pads", [0, 0, 0, 0])
    assert len(strides) == len(dilations) == 2 and len(pads) == 4, f"{node.name}: an image of other axes"
    group = next((a.i for a in node.attribute if a.name == "group"), 1)
    return strides, dilations, pads, group


def _ints(node: onnx.NodeProto, name: str, default: list[int]) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == name), default)


# ---------------------------------------------------------------- models


def without_windows(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose convolutions and averages, in functions too, are functions of products."""
    bodies = [model.graph, *model.functions]
    if not any(_is_window(node) for body in bodies for node in body.node):
        return model
    written = onnx.ModelProto()
    written.CopyFrom(model)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    made: dict[str, onnx.FunctionProto] = {}
    for body in (written.graph, *written.functions):
        nodes = [new for node in body.node for new in _written(node, made, opset)]
        del body.node[:]
        body.node.extend(nodes)
    for function in written.functions:
        function.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    written.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    written.functions.extend(made.values())
    return written


def _is_window(node: onnx.NodeProto) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in WRITTEN


def _written(
    node: onnx.NodeProto, made: dict[str, onnx.FunctionProto], opset: int
) -> Iterable[onnx.NodeProto]:
    if not _is_window(node):
        return [node]
    text = WRITTEN[node.op_type](node)
    name = next((name for name, function in made.items() if function.doc_string == text), None)
    if name is None:
        name = f"{node.op_type}{len(made)}"
        head = f'<domain: "{DOMAIN}", opset_import: ["": {opset}]> {name} '
        function = onnx.parser.parse_function(head + text)
        function.doc_string = text
        made[name] = function
    if len(node.input) < 3 or not node.input[2]:
        return [helper.make_node(name, list(node.input[:2]), list(node.output), domain=DOMAIN)]
    result, shape, bias = (f"{node.output[0]}.{part}" for part in ("unbiased", "bias_shape", "bias"))
    return [
        helper.make_node(name, list(node.input[:2]), [result], domain=DOMAIN),
        helper.make_node("Constant", [], [shape], value_ints=[1, -1, 1, 1]),
        helper.make_node("Reshape", [node.input[2], shape], [bias]),
        helper.make_node("Add", [result, bias], list(node.output)),
    ]


class _Float64Session(PLAIN):  # type: ignore[misc]
    def __init__(self, model: str | bytes, *arguments: object, **options: object) -> None:
        is_file = isinstance(model, str | Path)
        proto = onnx.load(model) if is_file else onnx.ModelProto.FromString(model)
        written = without_windows(proto)
        super().__init__(model if written is proto else written.SerializeToString(), *arguments, **options)


def open_in_float64(patch: pytest.MonkeyPatch) -> None:
    """Let whatever is opened while the patch lasts be without float64 windows."""
    patch.setattr(ort, "InferenceSession", _Float64Session)
