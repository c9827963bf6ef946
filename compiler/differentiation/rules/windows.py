"""Read how the windows of a convolution's or a pooling's forward node lie on its input."""

from collections.abc import Sequence

from partc.compiler.differentiation.forward_node import ForwardNode
from partc.passes.windows.windows import Sizes, Windows, lay_transposed_windows, lay_windows
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
