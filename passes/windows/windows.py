"""How a convolution's or a pooling's windows lie on its input, or on a rank's part of it.

    entry y of the output reads entries y stride - before + t dilation of the input, 0 <= t < kernel

Where the input has as many entries as the output times the stride, an equal part of the output reads the
same part of the input, and of its neighbours' parts always as many entries: the halo.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

AxisSizes = tuple[int, ...]
# The padding, before and after each axis, that an average counts as zeros; None: it counts none.
CountedPadding = tuple[AxisSizes, AxisSizes] | None


@dataclass(frozen=True, slots=True)
class Windows:
    """One entry per spatial axis. Entry y of the output reads inputs y stride - before + t dilation.

    `before` and `after` are the entries that windows reach beyond the input's ends; `after` is
    negative where the last entries of the input are in no window.
    """

    kernel: AxisSizes
    strides: AxisSizes
    dilations: AxisSizes
    before: AxisSizes
    after: AxisSizes
    source: AxisSizes  # the input's spatial sizes
    target: AxisSizes  # the output's
    varies: AxisSizes = ()  # axes of which `source` and `target` are the most that a rank has

    @property
    def spans(self) -> AxisSizes:
        """Entries from a window's first to its last."""
        return spans_of(self.kernel, self.dilations)

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

    def transposed(self) -> dict[str, AxisSizes]:
        """Return the attributes of the ConvTranspose that carries outputs back to inputs."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.before, *(max(0, a) for a in self.after)),
            "output_padding": tuple(max(0, -a) for a in self.after),
        }

    def forward(self) -> dict[str, AxisSizes]:
        """Return the attributes of the convolution itself, as it was before conversion."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.before, *(max(0, a) for a in self.after)),
        }

    @property
    def rounds_up(self) -> bool:
        """Tell whether a pooling's windows reach so far that only ceil_mode can say it."""
        return any(after >= size for after, size in zip(self.after, self.kernel, strict=True))

    @property
    def pool_pads(self) -> AxisSizes:
        """Return the padding of the pooling: less than a kernel, to which ceil_mode adds the rest."""
        after = (min(max(0, after), size - 1) for after, size in zip(self.after, self.kernel, strict=True))
        return *self.before, *after

    def can_pool(self, is_counted: bool = False) -> bool:
        """Tell whether a pooling can say the padding: less than a kernel, and what ceil_mode adds.

        `is_counted`: an average counts padding, but not what ceil_mode adds.
        """
        ends = zip(self.before, self.after, self.kernel, self.strides, strict=True)
        return all(
            before < size and after < size + (0 if is_counted else stride - 1)
            for before, after, size, stride in ends
        )

    def pooling(self) -> dict[str, AxisSizes | int]:
        """Return the attributes of the pooling, as those of a convolution where ceil_mode is not needed."""
        return {**self.forward(), **({"pads": self.pool_pads, "ceil_mode": 1} if self.rounds_up else {})}

    def spelling(self) -> str:
        """Name the windows; different ones have different names."""
        text = "x".join(map(str, self.kernel))
        for letter, sizes in (("s", self.strides), ("d", self.dilations), ("p", (*self.before, *self.after))):
            text += letter + "x".join(str(size).replace("-", "m") for size in sizes)
        return text + "".join(f"v{axis}" for axis in self.varies)

    # ------------------------------------------------------------ parts of an axis

    def has_parts(self, axis: int) -> bool:
        """Tell whether an equal part of the output reads the same part of the input, and a constant halo."""
        stride, before, after = self.strides[axis], self.before[axis], self.after[axis]
        return self.source[axis] == self.target[axis] * stride and before >= 0 and after > -stride

    def halo(self, axis: int) -> tuple[int, int]:
        """Return the entries of the input before and behind a part that the part's windows read."""
        return self.before[axis], max(0, self.after[axis])

    def halo_back(self, axis: int) -> tuple[int, int]:
        """Return the entries of the output before and behind a part whose windows read the part's inputs."""
        stride, before = self.strides[axis], self.before[axis]
        return max(0, (self.spans[axis] - 1 - before) // stride), max(0, (before - 1) // stride + 1)

    def halo_of_readers(self, axis: int) -> tuple[int, int]:
        """Return the entries of the input around a part that all windows read which read the part's own."""
        (first, last), stride = self.halo_back(axis), self.strides[axis]
        return first * stride + self.before[axis], max(0, last * stride + self.after[axis])

    def entries_read(self, axis: int, start: int, stop: int) -> tuple[int, int]:
        """Return the entries of the input that windows [start, stop) read, padding included."""
        stride, before = self.strides[axis], self.before[axis]
        return start * stride - before, (stop - 1) * stride - before + self.spans[axis]

    def readers(self, axis: int, start: int, stop: int) -> tuple[int, int]:
        """Return the windows that read entries [start, stop) of the input; some other one where none does."""
        stride, before = self.strides[axis], self.before[axis]
        first = -(-(start + before - self.spans[axis] + 1) // stride)
        last = (stop - 1 + before) // stride
        first = min(max(first, 0), self.target[axis] - 1)
        return first, max(min(last + 1, self.target[axis]), first + 1)

    def entries_of_readers(self, axis: int, start: int, stop: int) -> tuple[int, int]:
        """Return the entries of the input that all windows read which read entries [start, stop)."""
        return self.entries_read(axis, *self.readers(axis, start, stop))

    def varying(self, axis: int, windows: int, cut: tuple[int, int] = (0, 0)) -> "Windows":
        """Return so many windows along an axis, or fewer: of what they read, entries are cut at both ends."""
        reach = (windows - 1) * self.strides[axis] + self.spans[axis]
        before, after = cut
        return replace(
            self,
            before=_replaced(self.before, axis, before),
            after=_replaced(self.after, axis, after),
            source=_replaced(self.source, axis, reach - before - after),
            target=_replaced(self.target, axis, windows),
            varies=(*self.varies, axis),
        )

    def of_part(self, axis: int, parts: int) -> "Windows":
        """Return the windows of a part on its inputs and their halo: nothing is padded."""
        source, target = self.source[axis] // parts, self.target[axis] // parts
        return self._laid(axis, source + sum(self.halo(axis)), target, 0)

    def back_to_part(self, axis: int, parts: int) -> "Windows":
        """Return the windows on a part of the input, of a part of the output and its halo."""
        first, last = self.halo_back(axis)
        source, target = self.source[axis] // parts, self.target[axis] // parts + first + last
        return self._laid(axis, source, target, self.before[axis] + first * self.strides[axis])

    def of_readers(self, axis: int, parts: int) -> "Windows":
        """Return the windows that read a part of the input, on all that they read: nothing is padded."""
        source = self.source[axis] // parts + sum(self.halo_of_readers(axis))
        return self._laid(axis, source, self.target[axis] // parts + sum(self.halo_back(axis)), 0)

    def _laid(self, axis: int, source: int, target: int, before: int) -> "Windows":
        reach = (target - 1) * self.strides[axis] + self.spans[axis]
        return replace(
            self,
            before=_replaced(self.before, axis, before),
            after=_replaced(self.after, axis, reach - source - before),
            source=_replaced(self.source, axis, source),
            target=_replaced(self.target, axis, target),
        )


def lay_windows(
    kernel: Sequence[int],
    strides: AxisSizes,
    dilations: AxisSizes,
    pads: AxisSizes,
    auto_pad: str,
    source: AxisSizes,
    target: AxisSizes,
) -> Windows:
    """Return the windows of a Conv or pooling node, by its attributes and its spatial sizes."""
    reach = [
        (t - 1) * s + span for t, s, span in zip(target, strides, spans_of(kernel, dilations), strict=True)
    ]
    padding = [r - x for r, x in zip(reach, source, strict=True)]
    before = _padding_before(auto_pad, pads, padding)
    after = tuple(p - b for p, b in zip(padding, before, strict=True))
    return Windows(tuple(kernel), strides, dilations, before, after, source, target)


def lay_transposed_windows(
    kernel: Sequence[int],
    strides: AxisSizes,
    dilations: AxisSizes,
    pads: AxisSizes | None,
    auto_pad: str,
    output_padding: AxisSizes,
    source: AxisSizes,
    target: AxisSizes,
) -> Windows:
    """Return the windows of a ConvTranspose: those of the convolution that carries its output to its input.

    `source`, `target`: the spatial sizes of its output, and of its input. `pads`: None where the output's
    sizes are what is given, from which padding follows; odd ones are laid as ONNX Runtime does.
    """
    reach = [
        (t - 1) * s + span for t, s, span in zip(target, strides, spans_of(kernel, dilations), strict=True)
    ]
    padding = [r + b - x for r, b, x in zip(reach, output_padding, source, strict=True)]
    if auto_pad == "VALID":
        before: AxisSizes = (0,) * len(padding)
    elif auto_pad == "NOTSET" and pads is not None:
        before = pads[: len(padding)]
    elif auto_pad == "SAME_UPPER":
        before = tuple(p // 2 for p in padding)
    else:
        before = tuple(p - p // 2 for p in padding)
    after = tuple(r - x - b for r, x, b in zip(reach, source, before, strict=True))
    return Windows(tuple(kernel), strides, dilations, before, after, source, target)


def entries_averaged(windows: Windows, axis: int, counted: CountedPadding) -> list[int]:
    """Return over how many entries each window averages along an axis."""
    before, after = (0, 0) if counted is None else (counted[0][axis], counted[1][axis])
    stride, dilation, first = windows.strides[axis], windows.dilations[axis], windows.before[axis]
    reads = (
        range(y * stride - first, y * stride - first + windows.spans[axis], dilation)
        for y in range(windows.target[axis])
    )
    return [sum(-before <= entry < windows.source[axis] + after for entry in window) for window in reads]


def averages_alike(windows: Windows, axis: int, counted: CountedPadding) -> bool:
    """Tell whether all windows of an average have as many entries along an axis: then parts do too."""
    before, after = (0, 0) if counted is None else (counted[0][axis], counted[1][axis])
    return windows.before[axis] <= before and windows.after[axis] <= after


def spans_of(kernel: Sequence[int], dilations: Sequence[int]) -> AxisSizes:
    """Return the entries from a window's first to its last."""
    return tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))


def _padding_before(auto_pad: str, pads: AxisSizes, padding: Sequence[int]) -> AxisSizes:
    match auto_pad:
        case "SAME_UPPER":
            return tuple(max(0, p) // 2 for p in padding)
        case "SAME_LOWER":
            return tuple((max(0, p) + 1) // 2 for p in padding)
        case "VALID":
            return (0,) * len(padding)
        case _:
            return pads[: len(padding)]


def _replaced(sizes: AxisSizes, axis: int, size: int) -> AxisSizes:
    return (*sizes[:axis], size, *sizes[axis + 1 :])
