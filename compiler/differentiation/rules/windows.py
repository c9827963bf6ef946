"""Read how the windows of a convolution's or a pooling's forward node lie on its input."""

from collections.abc import Sequence

from partc.compiler.differentiation.forward_node import ForwardNode
from partc.passes.windows.windows import Sizes, Windows, lay_windows
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
    source, target = at.static_sizes(at.y(), 2), at.static_sizes(at.x(0), 2)
    rank = len(kernel)
    strides, dilations = _sizes(at, "strides", (1,) * rank), _sizes(at, "dilations", (1,) * rank)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    reach = [(t - 1) * s + span for t, s, span in zip(target, strides, spans, strict=True)]
    behind = _sizes(at, "output_padding", (0,) * rank)
    padding = [r + b - x for r, b, x in zip(reach, behind, source, strict=True)]
    before = _transposed_padding_before(at, padding)
    after = tuple(r - x - b for r, x, b in zip(reach, source, before, strict=True))
    return Windows(tuple(kernel), strides, dilations, before, after, source, target)


def _transposed_padding_before(at: ForwardNode, padding: Sequence[int]) -> Sizes:
    """Where the output's shape is what is given, padding follows from it; odd ones as ONNX Runtime does."""
    mode = at.attribute("auto_pad", "NOTSET")
    if mode == "VALID":
        return (0,) * len(padding)
    if mode == "NOTSET" and at.attribute("output_shape") is None:
        return _sizes(at, "pads", (0,) * (2 * len(padding)))[: len(padding)]
    if mode == "SAME_UPPER":
        return tuple(p // 2 for p in padding)
    return tuple(p - p // 2 for p in padding)


def declared_after(at: ForwardNode, windows: Windows) -> Sizes:
    """Return the padding behind each axis, without what ceil_mode adds."""
    if at.attribute("auto_pad", "NOTSET") != "NOTSET":
        return tuple(max(0, a) for a in windows.after)
    rank = len(windows.kernel)
    return _sizes(at, "pads", (0,) * (2 * rank))[rank:]


def _sizes(at: ForwardNode, name: str, default: Sizes) -> Sizes:
    value = at.attribute(name, default)
    assert isinstance(value, Sequence)
    return tuple(int(size) for size in value)
