"""Gradient rules of convolution and pooling: each calls a model-local function, see window_functions."""

from collections.abc import Mapping

from partc.compiler.training.rules import window_functions as functions
from partc.compiler.training.rules.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.training.rules.reduction import count_along
from partc.compiler.training.rules.windows import declared_after, windows_of


def _conv(at: ForwardNode, dy: str) -> Gradients:
    x, weight = at.x(0), at.x(1)
    sizes = at.static_shape(weight)
    windows, group = windows_of(at, sizes[2:]), at.integer("group", 1)
    gradients = {}
    if 0 in at.wanted:
        function = functions.conv_data_gradient(windows, group, at.opset)
        gradients[0] = at.call_function(function, (dy, weight), like=x)
    if 1 in at.wanted:
        function = functions.conv_weight_gradient(windows, sizes, group, at.opset)
        gradients[1] = at.call_function(function, (x, dy), like=weight)
    if 2 in at.wanted:
        gradients[2] = at.op("ReduceSum", dy, at.build.ints(0, *range(2, at.rank(x))), keepdims=0)
    return gradients


def _max_pool(at: ForwardNode, dy: str) -> Gradients:
    windows = windows_of(at, _kernel(at))
    dtype = at.types[at.x(0)].dtype
    function = functions.max_pool_gradient(windows, dtype, at.opset)
    return {0: at.call_function(function, (at.x(0), dy), like=at.x(0))}


def _average_pool(at: ForwardNode, dy: str) -> Gradients:
    windows = windows_of(at, _kernel(at))
    channels = at.static_sizes(at.x(0), 1)[0]
    counted = None
    if at.integer("count_include_pad", 0):
        # What ceil_mode adds behind the declared padding does not count.
        counted = windows.before, declared_after(at, windows)
    dtype = at.types[at.x(0)].dtype
    function = functions.average_pool_gradient(windows, channels, counted, dtype, at.opset)
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
    "MaxPool": of_first_output(_max_pool),
    "AveragePool": of_first_output(_average_pool),
    "GlobalAveragePool": of_first_output(_global_average_pool),
    "GlobalMaxPool": of_first_output(_global_max_pool),
    "LRN": of_first_output(_lrn),
}
