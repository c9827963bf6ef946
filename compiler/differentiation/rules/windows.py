"""How a convolution's or a pooling's windows lie on its input."""

from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.differentiation.forward_node import ForwardNode
from partc.runtime.errors import BadModel

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """One entry per spatial axis. Entry y of the output reads inputs y stride - before + t dilation.

    `before` and `after` are the entries that windows reach beyond the input's ends; `after` is
    negative where the last entries of the input are in no window.
    """

    kernel: Sizes
    strides: Sizes
    dilations: Sizes
    before: Sizes
    after: Sizes
    source: Sizes  # the input's spatial sizes
    target: Sizes  # the output's

    @property
    def spans(self) -> Sizes:
        """Entries from a window's first to its last."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def taps(self) -> int:
        """Entries in a window."""
        count = 1
        for size in self.kernel:
            count *= size
        return count

    @property
    def is_pointwise(self) -> bool:
        """Tell whether output y reads input y alone."""
        return self.taps == 1 and {*self.strides} == {1} and not any((*self.before, *self.after))

    def transposed(self) -> dict[str, Sizes]:
        """Return the attributes of the ConvTranspose that carries outputs back to inputs."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.before, *(max(0, a) for a in self.after)),
            "output_padding": tuple(max(0, -a) for a in self.after),
        }

    def forward(self) -> dict[str, Sizes]:
        """Return the attributes of the convolution itself, as it was before conversion."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.before, *(max(0, a) for a in self.after)),
        }

    def spelling(self) -> str:
        """Name the windows; different ones have different names."""
        text = "x".join(map(str, self.kernel))
        for letter, sizes in (("s", self.strides), ("d", self.dilations), ("p", (*self.before, *self.after))):
            text += letter + "x".join(str(size).replace("-", "m") for size in sizes)
        return text


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
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    reach = [(t - 1) * s + span for t, s, span in zip(target, strides, spans, strict=True)]
    padding = [r - x for r, x in zip(reach, source, strict=True)]
    before = _padding_before(at, padding)
    after = tuple(p - b for p, b in zip(padding, before, strict=True))
    return Windows(tuple(kernel), strides, dilations, before, after, source, target)


def _padding_before(at: ForwardNode, padding: Sequence[int]) -> Sizes:
    match at.attribute("auto_pad", "NOTSET"):
        case "SAME_UPPER":
            return tuple(max(0, p) // 2 for p in padding)
        case "SAME_LOWER":
            return tuple((max(0, p) + 1) // 2 for p in padding)
        case "VALID":
            return (0,) * len(padding)
        case _:
            return _sizes(at, "pads", (0,) * (2 * len(padding)))[: len(padding)]


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
