"""Read the windows of a node: of a convolution or pooling by its attributes, of their gradients by the name.

ConvWeightGrad_3x3s1x1d1x1p1x1x1x1g1_64x32_56x56     kernel, strides, dilations, pads, groups, ..
"""

import re
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN
from partc.passes.windows.windows import (
    AxisSizes,
    CountedPadding,
    Windows,
    lay_transposed_windows,
    lay_windows,
)

_NUMBERS = r"m?\d+(?:xm?\d+)*"
FUNCTION_NAME = re.compile(
    rf"(?P<kind>ConvDataGrad|ConvWeightGrad|MaxPoolGrad|AveragePoolGrad|LpPoolGrad)"
    rf"(?:_counting(?P<counted>{_NUMBERS}))?(?:_p(?P<power>\d+))?(?:_c(?P<channels>\d+))?"
    rf"_(?P<kernel>{_NUMBERS})s(?P<strides>{_NUMBERS})d(?P<dilations>{_NUMBERS})p(?P<pads>{_NUMBERS})"
    rf"(?:g(?P<group>\d+))?(?:_.*)?"
)

_WEIGHT_SIZES = re.compile(rf"_({_NUMBERS})_({_NUMBERS})$")


@dataclass(frozen=True, slots=True)
class WindowGradient:
    """What the name of a gradient function says. `counted`: the padding that an average counts as zeros."""

    kind: str
    windows: Windows
    group: int = 1
    channels: int = 0
    power: int = 0
    counted: CountedPadding = None


def windows_of(node: gs.Node, facts: Facts) -> Windows | None:
    """Return the windows of a Conv or pooling node; None where a spatial size may vary."""
    image, result = node.inputs[0].name, node.outputs[0].name
    source, target = _space(image, facts), _space(result, facts)
    kernel = _kernel(node, facts)
    if source is None or target is None or len(kernel) != len(source) or len(target) != len(source):
        return None
    rank = len(kernel)
    return lay_windows(
        kernel,
        tuple(node.attrs.get("strides", (1,) * rank)),
        tuple(node.attrs.get("dilations", (1,) * rank)),
        tuple(node.attrs.get("pads", (0,) * (2 * rank))),
        node.attrs.get("auto_pad", "NOTSET"),
        source,
        target,
    )


def transposed_windows_of(node: gs.Node, facts: Facts) -> Windows | None:
    """Return the windows of the convolution that carries a ConvTranspose's output to its input.

    None where a spatial size may vary, or the output is larger than what windows and the padding say.
    """
    source, target = _space(node.outputs[0].name, facts), _space(node.inputs[0].name, facts)
    kernel = facts.shape(node.inputs[1].name)[2:]
    if source is None or target is None or len(kernel) != len(source):
        return None
    rank = len(kernel)
    windows = lay_transposed_windows(
        kernel,
        tuple(node.attrs.get("strides", (1,) * rank)),
        tuple(node.attrs.get("dilations", (1,) * rank)),
        None if "output_shape" in node.attrs else tuple(node.attrs.get("pads", (0,) * (2 * rank))),
        node.attrs.get("auto_pad", "NOTSET"),
        tuple(node.attrs.get("output_padding", (0,) * rank)),
        source,
        target,
    )
    ends = zip(windows.before, windows.after, windows.strides, strict=True)
    return windows if all(before >= 0 and after > -stride for before, after, stride in ends) else None


def counted_padding(node: gs.Node, windows: Windows) -> CountedPadding:
    """Return the padding that an AveragePool counts: the declared one, not what ceil_mode adds."""
    if not node.attrs.get("count_include_pad", 0):
        return None
    rank = len(windows.kernel)
    pads = tuple(node.attrs.get("pads", (0,) * (2 * rank)))
    if node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
        pads = windows.forward()["pads"]
    return pads[:rank], pads[rank:]


def gradient_of(node: gs.Node, facts: Facts) -> WindowGradient | None:
    """Return what a gradient function is of; None where it is none of these, or a spatial size may vary."""
    match = FUNCTION_NAME.fullmatch(node.op) if node.domain == FUNCTION_DOMAIN else None
    if match is None:
        return None
    kind = match["kind"]
    images = [node.inputs[0], node.inputs[-1] if kind != "ConvDataGrad" else node.inputs[0]]
    if kind != "ConvWeightGrad":
        images[0] = node.outputs[0]
    source, target = (_space(image.name, facts) for image in images)
    if source is None or target is None:
        return None
    rank, pads = len(source), _numbers(match["pads"])
    windows = Windows(
        _numbers(match["kernel"]),
        _numbers(match["strides"]),
        _numbers(match["dilations"]),
        pads[:rank],
        pads[rank:],
        source,
        target,
    )
    counted = None if match["counted"] is None else _numbers(match["counted"])
    return WindowGradient(
        kind,
        windows,
        int(match["group"] or 1),
        int(match["channels"] or 0),
        int(match["power"] or 0),
        None if counted is None else (counted[:rank], counted[rank:]),
    )


def weight_gradient_of(name: str) -> tuple[Windows, tuple[int, ...], int] | None:
    """Return a ConvWeightGrad's windows, the sizes of the weight and the groups; None for other names."""
    match = FUNCTION_NAME.fullmatch(name)
    sizes = _WEIGHT_SIZES.search(name)
    if match is None or match["kind"] != "ConvWeightGrad" or sizes is None:
        return None
    channels, source = (_numbers(part) for part in sizes.groups())
    rank, pads, kernel = len(source), _numbers(match["pads"]), _numbers(match["kernel"])
    strides, dilations = _numbers(match["strides"]), _numbers(match["dilations"])
    reach = zip(source, pads[:rank], pads[rank:], kernel, strides, dilations, strict=True)
    target = tuple((s + b + a - (k - 1) * d - 1) // stride + 1 for s, b, a, k, stride, d in reach)
    windows = Windows(kernel, strides, dilations, pads[:rank], pads[rank:], source, target)
    return windows, (*channels, *kernel), int(match["group"])


def _kernel(node: gs.Node, facts: Facts) -> AxisSizes:
    if node.op == "Conv":
        return facts.shape(node.inputs[1].name)[2:]
    return tuple(node.attrs["kernel_shape"])


def _space(tensor: str, facts: Facts) -> AxisSizes | None:
    """Return the spatial sizes of an image that do not follow a symbolic size."""
    rank = len(facts.shape(tensor))
    sizes = tuple(size for axis in range(2, rank) if (size := facts.fixed_size(tensor, axis)) is not None)
    return sizes if rank > 2 and len(sizes) == rank - 2 else None


def _numbers(text: str) -> AxisSizes:
    return tuple(int(number.replace("m", "-")) for number in text.split("x"))
