"""Backward ops of PyTorch that its exporter cannot translate, as ops that it can.

convolution    dx = the transposed convolution of dy      dw[tap] = sum over samples and pixels of x[tap] dy
max pooling    dx = dy scattered to the positions that were taken
mean pooling   dx = dy / window, through the transposed convolution with ones
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from partc.runtime.errors import UnsupportedModel

Ints = Sequence[int]


def _convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = dw = db = None
    geometry = (stride, padding, dilation)
    if output_mask[0] and transposed:
        dx = torch.ops.aten.convolution(dy, weight, None, *geometry, False, [0] * len(stride), groups)
    elif output_mask[0]:
        unread_ends = [
            size + 2 * p - d * (k - 1) - 1 - s * (target - 1)
            for size, target, k, s, p, d in zip(
                x.shape[2:], dy.shape[2:], weight.shape[2:], *geometry, strict=True
            )
        ]
        dx = torch.ops.aten.convolution(dy, weight, None, *geometry, True, unread_ends, groups)
    if output_mask[1]:
        wide, narrow = (dy, x) if transposed else (x, dy)
        dw = _weight_gradient(wide, narrow, weight.shape[2:], geometry, groups)
    if output_mask[2]:
        db = dy.sum([0, *range(2, dy.dim())])
    return dx, dw, db


def _weight_gradient(
    wide: Tensor, narrow: Tensor, kernel: Ints, geometry: tuple[Ints, Ints, Ints], groups: int
) -> Tensor:
    """Return dw[out, in / groups, ..], one product a tap; `wide` is what the windows slide over."""
    stride, padding, dilation = geometry
    padded = pad(wide, [side for p in reversed(padding) for side in (p, p)])
    rows = narrow.reshape(narrow.shape[0], groups, narrow.shape[1] // groups, -1)
    taps = []
    for tap in product(*map(range, kernel)):
        window = padded
        for axis, (at, s, d) in enumerate(zip(tap, stride, dilation, strict=True), start=2):
            start = at * d
            missing = start + (narrow.shape[axis] - 1) * s + 1 - window.shape[axis]
            assert missing <= 0, "windows lie within the padded input"
            window = torch.ops.aten.slice(window, axis, start, start + (narrow.shape[axis] - 1) * s + 1, s)
        columns = window.reshape(window.shape[0], groups, window.shape[1] // groups, -1)
        taps.append(torch.matmul(rows, columns.transpose(2, 3)).sum(0))
    stacked = torch.stack(taps, -1)
    return stacked.reshape(narrow.shape[1], wide.shape[1] // groups, *kernel)


def _max_pool_backward(
    dy: Tensor,
    x: Tensor,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    zeros = torch.zeros_like(x).flatten(2)
    return zeros.scatter_add(2, indices.flatten(2), dy.flatten(2)).reshape(x.shape)


def _average_pool_backward(
    dy: Tensor,
    x: Tensor,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    if ceil_mode or (any(padding) and not count_include_pad):
        raise UnsupportedModel(
            "average pooling with ceil_mode, or with padding that does not count",
            at=f"avg_pool of kernel {list(kernel)}, padding {list(padding)}",
            fix="pool with ceil_mode=False and count_include_pad=True",
        )
    stride = stride or kernel
    window = divisor_override or torch.Size(kernel).numel()
    channels = x.shape[1]
    ones = dy.new_ones((channels, 1, *kernel)) / window
    ones_axes = [1] * len(kernel)
    sizes = zip(x.shape[2:], dy.shape[2:], kernel, stride, padding, strict=True)
    unread_ends = [size + 2 * p - k - s * (target - 1) for size, target, k, s, p in sizes]
    return torch.ops.aten.convolution(dy, ones, None, stride, padding, ones_axes, True, unread_ends, channels)


def _empty(size: Ints, physical_layout: Ints, **options: torch.dtype) -> Tensor:
    """Return a tensor that is filled later: in ONNX its strides mean nothing."""
    return torch.zeros(size, dtype=options.get("dtype"))


WRITTEN_OUT: dict[object, Callable[..., object]] = {
    torch.ops.aten.avg_pool2d_backward.default: _average_pool_backward,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.empty_permuted.default: _empty,
    torch.ops.aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
}
