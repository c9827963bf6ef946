"""Gradient rules of convolution and pooling: each calls a model-local function, see window_functions.

How the windows lie on the input is read of the forward node first.
"""

from collections.abc import Mapping, Sequence

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.rules.reduction import count_along
from partc.passes.windows import window_functions as functions
from partc.passes.windows.windows import AxisSizes, Windows, lay_transposed_windows, lay_windows
from partc.runtime.errors import BadModel


def windows_of(at: ForwardNode, kernel: Sequence[int]) -> Windows:
    """Read the windows of a Conv or pooling node; the spatial sizes must be known."""
    source, target = at.static_sizes(at.x(0), 2), at.static_sizes(at.y(), 2)
    rank = len(kernel)
    strides = _sizes(at, "strides", (1,) * rank)
    dilations = _sizes(at, "dilations", (1,) * rank)
    if {len(sizes) for sizes in (source, target, strides, dilations)} != {rank}:
        raise BadModel(
            f"windows of {rank} axes over {len(source)}, {len(strides)} strides, {len(dilations)} dilations",
            at=at.place,
            fix="give the kernel, strides and dilations a size for each axis behind the channels",
        )
    auto_pad = at.attribute("auto_pad", "NOTSET")
    assert isinstance(auto_pad, str)
    pads = _sizes(at, "pads", (0,) * (2 * rank))
    return lay_windows(kernel, strides, dilations, pads, auto_pad, source, target)


def transposed_windows_of(at: ForwardNode, kernel: Sequence[int]) -> Windows:
    """Read the windows of a ConvTranspose: those of the convolution that carries its output to its input."""
    rank = len(kernel)
    auto_pad = at.attribute("auto_pad", "NOTSET")
    assert isinstance(auto_pad, str)
    return lay_transposed_windows(
        kernel,
        _sizes(at, "strides", (1,) * rank),
        _sizes(at, "dilations", (1,) * rank),
        None if at.attribute("output_shape") is not None else _sizes(at, "pads", (0,) * (2 * rank)),
        auto_pad,
        _sizes(at, "output_padding", (0,) * rank),
        at.static_sizes(at.y(), 2),
        at.static_sizes(at.x(0), 2),
    )


def declared_after(at: ForwardNode, windows: Windows) -> AxisSizes:
    """Return the padding behind each axis, without what ceil_mode adds."""
    if at.attribute("auto_pad", "NOTSET") != "NOTSET":
        return tuple(max(0, a) for a in windows.after)
    rank = len(windows.kernel)
    return _sizes(at, "pads", (0,) * (2 * rank))[rank:]


def _sizes(at: ForwardNode, name: str, default: AxisSizes) -> AxisSizes:
    value = at.attribute(name, default)
    assert isinstance(value, Sequence)
    return tuple(int(size) for size in value)


def _conv(at: ForwardNode, dy: str) -> Gradients:
    x, weight = at.x(0), at.x(1)
    sizes = at.static_shape(weight)
    windows, group = windows_of(at, sizes[2:]), at.integer("group", 1)
    gradients = {}
    if 0 in at.gradient_inputs:
        function = functions.conv_data_gradient(windows, group, at.opset)
        gradients[0] = at.call_function(function, (dy, weight), like=x)
    if 1 in at.gradient_inputs:
        function = functions.conv_weight_gradient(windows, sizes, group, at.opset)
        gradients[1] = at.call_function(function, (x, dy), like=weight)
    if 2 in at.gradient_inputs:
        gradients[2] = at.op("ReduceSum", dy, at.build.ints(0, *range(2, at.rank(x))), keepdims=0)
    return gradients


def _transposed_conv(at: ForwardNode, dy: str) -> Gradients:
    """The data's gradient is a convolution, of dy; the weight's is that of this convolution's weight."""
    x, weight = at.x(0), at.x(1)
    sizes = at.static_shape(weight)
    windows, group = transposed_windows_of(at, sizes[2:]), at.integer("group", 1)
    gradients = {}
    if 0 in at.gradient_inputs:
        dy_read = _without_unread_end(at, dy, windows)
        gradients[0] = at.op("Conv", dy_read, weight, group=group, **windows.forward())
    if 1 in at.gradient_inputs:
        function = functions.conv_weight_gradient(windows, sizes, group, at.opset)
        gradients[1] = at.call_function(function, (dy, x), like=weight)
    if 2 in at.gradient_inputs:
        gradients[2] = at.op("ReduceSum", dy, at.build.ints(0, *range(2, at.rank(x))), keepdims=0)
    return gradients


def _without_unread_end(at: ForwardNode, image: str, windows: Windows) -> str:
    """Cut the entries beyond the last window, where they are as many as to make room for another."""
    ends = {
        axis + 2: after
        for axis, (after, stride) in enumerate(zip(windows.after, windows.strides, strict=True))
        if after <= -stride
    }
    if not ends:
        return image
    starts = at.build.ints(*(0 for _ in ends))
    return at.op("Slice", image, starts, at.build.ints(*ends.values()), at.build.ints(*ends))


def _max_pool(at: ForwardNode, dy: str) -> Gradients:
    windows = windows_of(at, _kernel(at))
    dtype = at.types[at.x(0)].dtype
    function = functions.max_pool_gradient(windows, dtype, at.opset)
    return {0: at.call_function(function, (at.x(0), dy), like=at.x(0))}


def _average_pool(at: ForwardNode, dy: str) -> Gradients:
    windows = windows_of(at, _kernel(at))
    channels = at.static_sizes(at.x(0), 1)[0]
    counted_padding = None
    if at.integer("count_include_pad", 0):
        # What ceil_mode adds behind the declared padding does not count.
        counted_padding = windows.before, declared_after(at, windows)
    dtype = at.types[at.x(0)].dtype
    function = functions.average_pool_gradient(windows, channels, counted_padding, dtype, at.opset)
    return {0: at.call_function(function, (dy,), like=at.x(0))}


def _kernel(at: ForwardNode) -> tuple[int, ...]:
    kernel = at.attribute("kernel_shape")
    assert isinstance(kernel, list)
    return tuple(int(size) for size in kernel)


def _global_average_pool(at: ForwardNode, dy: str) -> Gradients:
    pixels = count_along(at, at.x(0), tuple(range(2, at.rank(at.x(0)))))
    return {0: at.op("Expand", at.op("Div", dy, pixels), at.shape_of(at.x(0)))}


def _global_max_pool(at: ForwardNode, dy: str) -> Gradients:
    """Entries that tie share the gradient equally."""
    x = at.x(0)
    ones = at.op("Cast", at.op("Equal", x, at.y()), to=at.types[x].element)
    ties = at.op("ReduceSum", ones, at.build.ints(*range(2, at.rank(x))), keepdims=1)
    return {0: at.op("Mul", ones, at.op("Div", dy, ties))}


def _lp_pool(at: ForwardNode, dy: str) -> Gradients:
    dtype, power = at.types[at.x(0)].dtype, at.integer("p", 2)
    channels = at.static_sizes(at.x(0), 1)[0]
    function = functions.lp_pool_gradient(windows_of(at, _kernel(at)), channels, power, dtype, at.opset)
    return {0: at.call_function(function, (at.x(0), at.y(), dy), like=at.x(0))}


def _global_lp_pool(at: ForwardNode, dy: str) -> Gradients:
    """dx = sign(x) |x|^(p-1) y^(1-p) dy, taken as 0 at the origin."""
    x, power = at.x(0), at.integer("p", 2)
    zero, one = (at.scalar(value, like=x) for value in (0, 1))
    norm = at.op("Where", at.op("Equal", at.y(), zero), one, at.y())
    steepness = at.op("Div", dy, at.op("Pow", norm, at.scalar(power - 1, like=x)))
    size = at.op("Pow", at.op("Abs", x), at.scalar(power - 1, like=x))
    return {0: at.op("Mul", at.op("Mul", at.op("Sign", x), size), steepness)}


def _lrn(at: ForwardNode, dy: str) -> Gradients:
    function = functions.lrn_gradient(
        at.integer("size", 1),
        at.number("alpha", 1e-4),
        at.number("beta", 0.75),
        at.number("bias", 1.0),
        at.static_sizes(at.x(0), 1),
        at.types[at.x(0)].dtype,
        at.opset,
    )
    return {0: at.call_function(function, (at.x(0), dy), like=at.x(0))}


RULES: Mapping[str, Rule] = {
    "Conv": of_first_output(_conv),
    "ConvTranspose": of_first_output(_transposed_conv),
    "MaxPool": of_first_output(_max_pool),
    "AveragePool": of_first_output(_average_pool),
    "GlobalAveragePool": of_first_output(_global_average_pool),
    "GlobalMaxPool": of_first_output(_global_max_pool),
    "LpPool": of_first_output(_lp_pool),
    "GlobalLpPool": of_first_output(_global_lp_pool),
    "LRN": of_first_output(_lrn),
}
