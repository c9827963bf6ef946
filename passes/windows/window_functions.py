"""Model-local functions for the gradients of convolution, pooling and LRN.

    ConvWeightGrad   x [n, (g c), ..], dy [n, (g o), ..] -> dW [(g o), c, kernel..]   sums n
    ConvDataGrad     dy [n, (g o), ..], W [(g o), c, kernel..] -> dx [n, (g c), ..]   sums o
    MaxPoolGrad      x [n, c, ..], dy [n, c, ..] -> dx [n, c, ..]
    AveragePoolGrad  dy [n, c, ..] -> dx [n, c, ..]
    LpPoolGrad       x [n, c, ..], y [n, c, ..], dy [n, c, ..] -> dx [n, c, ..]
    LRNGrad          x [n, c, ..], dy [n, c, ..] -> dx [n, c, ..]                     mixes c

All are linear in dy. A function's name begins with its kind and spells its attributes: equal calls
share a body. Bodies are standard ops, and hold no batch size.
"""

from itertools import product
from math import prod

import numpy as np
import onnx
from onnx import numpy_helper

from partc.passes.graph.operation_builder import FunctionBuilder
from partc.passes.windows.windows import CountedPadding, Windows, entries_averaged

# A convolution of so few channels is cheapest with batch and channels exchanged: DESIGN.md section 8.
FEW_CHANNELS = 4


# ---------------------------------------------------------------- convolution


def conv_data_gradient(windows: Windows, group: int, opset: int) -> onnx.FunctionProto:
    """Return ConvDataGrad(dy, W) -> dx."""
    b = FunctionBuilder(("dy", "W", "dx"))
    if group == 1 and windows.is_pointwise:
        # A tenth to a third faster than ConvTranspose in ONNX Runtime, 1 thread.
        spatial = range(2, 2 + len(windows.kernel))
        b.call("Conv", ("dy", b.op("Transpose", "W", perm=[1, 0, *spatial])), ("dx",))
    else:
        b.call("ConvTranspose", ("dy", "W"), ("dx",), group=group, **windows.transposed())
    return b.finish(f"ConvDataGrad_{windows.spelling()}g{group}", ("dy", "W"), ("dx",), opset)


def conv_weight_gradient(
    windows: Windows, weight: tuple[int, ...], group: int, opset: int, *, per_tap: bool = False
) -> onnx.FunctionProto:
    """Return ConvWeightGrad(x, dy) -> dW, for a weight [g o, c, kernel..]. `per_tap`: in any case."""
    b = FunctionBuilder(("x", "dy", "dW"))
    if group == 1 and weight[1] <= FEW_CHANNELS and windows.taps > 1 and not per_tap:
        _exchange_batch_and_channels(b, windows)
    else:
        _multiply_per_tap(b, windows, weight, group)
    sizes = "_".join("x".join(map(str, sizes)) for sizes in (weight[:2], windows.source))
    name = f"ConvWeightGrad_{windows.spelling()}g{group}_{sizes}"
    return b.finish(name, ("x", "dy"), ("dW",), opset)


def _exchange_batch_and_channels(b: FunctionBuilder, windows: Windows) -> None:
    """dW[o, c] = the convolution of channel c of x with channel o of dy, over the batch."""
    order = [1, 0, *range(2, 2 + len(windows.kernel))]
    image = _cut_unused_ends(b, b.op("Transpose", "x", perm=order), windows)
    kernel = b.op("Transpose", "dy", perm=order)
    correlation = b.op(
        "Conv",
        image,
        kernel,
        strides=windows.dilations,
        dilations=windows.strides,
        pads=windows.forward()["pads"],
    )
    b.call("Transpose", (correlation,), ("dW",), perm=order)


def _cut_unused_ends(b: FunctionBuilder, image: str, windows: Windows) -> str:
    cuts = {axis: a for axis, a in enumerate(windows.after) if a < 0}
    if not cuts:
        return image
    ends = b.ints(*cuts.values())
    return b.op("Slice", image, b.ints(*(0 for _ in cuts)), ends, b.ints(*(axis + 2 for axis in cuts)))


def _multiply_per_tap(b: FunctionBuilder, windows: Windows, weight: tuple[int, ...], group: int) -> None:
    """dW[:, :, t] = sum over samples and positions of dy times x shifted by tap t, transposed."""
    o, c = weight[0] // group, weight[1]
    padded = _pad(b, windows)
    # Gathering all samples into one product moves pixels (o + c); summing theirs moves o c.
    gathers = group == 1 and prod(windows.target) * (o + c) <= o * c
    products = []
    for tap in product(*(range(k) for k in windows.kernel)):
        shifted = _shift(b, padded, windows, tap)
        if gathers:
            products.append(b.op("Gemm", _by_channel(b, "dy"), _by_channel(b, shifted), transB=1))
        else:
            products.append(_sum_of_products(b, shifted, (group, o, c)))
    if len(products) > 1:
        columns = [b.op("Unsqueeze", tap_product, b.ints(-1)) for tap_product in products]
        products = [b.op("Concat", *columns, axis=-1)]
    # Channels of a single group may be a part of them all: what the op has been given.
    sizes = weight if group > 1 else (0, 0, *weight[2:])
    b.call("Reshape", (products[0], b.ints(*sizes)), ("dW",))


def _by_channel(b: FunctionBuilder, image: str) -> str:
    """Return [channels, samples and positions] of an image [n, channels, ..]."""
    rows = b.op("Reshape", image, b.ints(0, 0, -1))
    return b.op("Reshape", b.op("Transpose", rows, perm=[1, 0, 2]), b.ints(0, -1))


def _sum_of_products(b: FunctionBuilder, shifted: str, sizes: tuple[int, int, int]) -> str:
    """Return [(g) o, c]: one product per sample (and group), summed."""
    group, o, c = sizes
    left, right = (b.ints(0, group, size, -1) if group > 1 else b.ints(0, 0, -1) for size in (o, c))
    order = [0, 1, 3, 2] if group > 1 else [0, 2, 1]
    transposed = b.op("Transpose", b.op("Reshape", shifted, right), perm=order)
    of_samples = b.op("MatMul", b.op("Reshape", "dy", left), transposed)
    return b.op("ReduceSum", of_samples, b.ints(0), keepdims=0)


def _pad(b: FunctionBuilder, windows: Windows) -> str:
    after = [max(0, a) for a in windows.after]
    if not any(windows.before) and not any(after):
        return "x"
    return b.op("Pad", "x", b.ints(0, 0, *windows.before, 0, 0, *after))


def _shift(b: FunctionBuilder, padded: str, windows: Windows, tap: tuple[int, ...]) -> str:
    """Return what tap t of every window reads, shaped like dy."""
    starts = [t * d for t, d in zip(tap, windows.dilations, strict=True)]
    lengths = [(y - 1) * s + 1 for y, s in zip(windows.target, windows.strides, strict=True)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    sizes = [
        size + before + max(0, after)
        for size, before, after in zip(windows.source, windows.before, windows.after, strict=True)
    ]
    if not any(starts) and ends == sizes and set(windows.strides) == {1}:
        return padded
    for axis in windows.varies:  # counted from behind, where the last window ends
        ends[axis] = ends[axis] - sizes[axis] or np.iinfo(np.int64).max
    axes = b.ints(*range(2, 2 + len(tap)))
    return b.op("Slice", padded, b.ints(*starts), b.ints(*ends), axes, b.ints(*windows.strides))


# ---------------------------------------------------------------- pooling


def max_pool_gradient(windows: Windows, dtype: np.dtype, opset: int) -> onnx.FunctionProto:
    """Return MaxPoolGrad(x, dy) -> dx: each window's gradient goes to its one winner.

    MaxPool's Indices count through all images. Numbers of 16 bits are added up in float32.
    """
    b = FunctionBuilder(("x", "dy", "dx"))
    winners = b.op("Reshape", b.call("MaxPool", ("x",), 2, **windows.pooling())[1], b.ints(-1))
    gradients = b.op("Reshape", "dy", b.ints(-1))
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    if wide != dtype:
        gradients = b.op("Cast", gradients, to=onnx.TensorProto.FLOAT)
    zero = numpy_helper.from_array(np.zeros(1, wide))
    zeros = b.op("ConstantOfShape", b.op("Reshape", b.op("Size", "x"), b.ints(1)), value=zero)
    sums = b.op("ScatterElements", zeros, winners, gradients, axis=0, reduction="add")
    if wide != dtype:
        sums = b.op("CastLike", sums, "dy")
    b.call("Reshape", (sums, b.op("Shape", "x")), ("dx",))
    return b.finish(_pool_name("MaxPoolGrad", windows, dtype), ("x", "dy"), ("dx",), opset)


def average_pool_gradient(
    windows: Windows, channels: int, counted_padding: CountedPadding, dtype: np.dtype, opset: int
) -> onnx.FunctionProto:
    """Return AveragePoolGrad(dy) -> dx: each window's gradient in equal shares to its entries."""
    b = FunctionBuilder(("dy", "dx"))
    share = b.constant((1 / _entries(windows, counted_padding)).astype(dtype))
    images = b.op("Reshape", b.op("Mul", "dy", share), _image_shape(b, windows, "dy", 1))
    ones = b.constant(np.ones((1, 1, *windows.kernel), dtype))
    dx = b.op("ConvTranspose", images, ones, **windows.transposed())
    b.call("Reshape", (dx, _image_shape(b, windows, dx, channels)), ("dx",))
    suffix = "" if counted_padding is None else "_counting" + "x".join(map(str, sum(counted_padding, ())))
    kind = f"AveragePoolGrad{suffix}_c{channels}"
    return b.finish(_pool_name(kind, windows, dtype), ("dy",), ("dx",), opset)


def _image_shape(b: FunctionBuilder, windows: Windows, image: str, channels: int) -> str:
    """Return the shape of the images [n, channels, ..] that an image's pixels are."""
    if windows.varies:
        return b.op("Concat", b.ints(-1, channels), b.op("Shape", image, start=2), axis=0)
    return b.ints(-1, channels, *(windows.target if image == "dy" else windows.source))


def lp_pool_gradient(
    windows: Windows, channels: int, power: int, dtype: np.dtype, opset: int
) -> onnx.FunctionProto:
    """Return LpPoolGrad(x, y, dy) -> dx = sign(x) |x|^(p-1) sum of dy y^(1-p) over the windows of x.

    A window of zeros has no slope: it gives 0. Of parts of different sizes, `around` int64[2 rank] tells what
    the sums lack before and behind each rank's x; less than 0: have too much.
    """
    operands = ("x", "y", "dy", "around") if windows.varies else ("x", "y", "dy")
    b = FunctionBuilder((*operands, "dx"))
    zero, one, lower = (b.constant(np.array(value, dtype)) for value in (0, 1, power - 1))
    norm = b.op("Where", b.op("Equal", "y", zero), one, "y")
    steepness = b.op("Div", "dy", b.op("Pow", norm, lower))
    images = b.op("Reshape", steepness, _image_shape(b, windows, "dy", 1))
    ones = b.constant(np.ones((1, 1, *windows.kernel), dtype))
    dx = b.op("ConvTranspose", images, ones, **windows.transposed())
    dx = b.op("Reshape", dx, _image_shape(b, windows, dx, channels))
    if windows.varies:
        dx = b.op("Pad", dx, "around")
    slope = b.op("Mul", b.op("Sign", "x"), b.op("Pow", b.op("Abs", "x"), lower))
    b.call("Mul", (slope, dx), ("dx",))
    name = _pool_name(f"LpPoolGrad_p{power}_c{channels}", windows, dtype)
    return b.finish(name, operands, ("dx",), opset)


def _pool_name(kind: str, windows: Windows, dtype: np.dtype) -> str:
    return f"{kind}_{windows.spelling()}_{'x'.join(map(str, windows.source))}_{dtype}"


def _entries(windows: Windows, counted_padding: CountedPadding) -> np.ndarray:
    """Entries that each window averages over, float64[target..]."""
    counts = np.ones((1,) * len(windows.kernel))
    for axis in range(len(windows.kernel)):
        along = entries_averaged(windows, axis, counted_padding)
        if axis in windows.varies:
            assert len({*along}) == 1, "averages of parts are of equally many entries"
            along = along[:1]
        shape = [1] * len(windows.kernel)
        shape[axis] = len(along)
        counts = counts * np.array(along, np.float64).reshape(shape)
    return counts


# ---------------------------------------------------------------- local response normalisation


def lrn_gradient(
    size: int, alpha: float, beta: float, bias: float, image: tuple[int, ...], dtype: np.dtype, opset: int
) -> onnx.FunctionProto:
    """Return LRNGrad(x, dy) -> dx, for images [c, ..].

        y_i = x_i s_i^-beta,  s_i = bias + alpha mean of x_j^2 over the window of i
        dx_j = dy_j s_j^-beta - 2 alpha beta x_j mean of dy_i x_i s_i^(-beta-1) over the i that see j

    A mean over channels is an AveragePool of one column over [n, 1, c, pixels], padding counted.
    """
    b = FunctionBuilder(("x", "dy", "dx"))

    def constant(value: float) -> str:
        return b.constant(np.array(value, dtype))

    below, above = (size - 1) // 2, size // 2
    columns = b.ints(0, 1, image[0], -1)
    x, dy = (b.op("Reshape", name, columns) for name in ("x", "dy"))
    mean = _mean_over_channels(b, b.op("Mul", x, x), size, (below, above))
    s = b.op("Add", b.op("Mul", mean, constant(alpha)), constant(bias))
    direct = b.op("Mul", dy, b.op("Pow", s, constant(-beta)))
    window_sum = _mean_over_channels(b, b.op("Div", b.op("Mul", direct, x), s), size, (above, below))
    indirect = b.op("Mul", b.op("Mul", x, window_sum), constant(2 * alpha * beta))
    b.call("Reshape", (b.op("Sub", direct, indirect), b.op("Shape", "x")), ("dx",))
    values = "_".join(f"{value:.9g}" for value in (alpha, beta, bias)).replace(".", "d").replace("-", "m")
    return b.finish(f"LRNGrad_{size}_{values}_c{image[0]}_{dtype}", ("x", "dy"), ("dx",), opset)


def _mean_over_channels(b: FunctionBuilder, columns: str, size: int, pads: tuple[int, int]) -> str:
    below, above = pads
    return b.op(
        "AveragePool", columns, kernel_shape=(size, 1), pads=(below, 0, above, 0), count_include_pad=1
    )
