"""Ops that put values in places, or scale them, written as others: Col2Im, MaxUnpool, AffineGrid and more."""

from collections.abc import Sequence
from math import prod

import numpy as np
from onnx import numpy_helper

from partc.compiler.differentiation.forward_node import ForwardNode
from partc.runtime.errors import UnsupportedModel


def expand_col2im(at: ForwardNode) -> Sequence[str]:
    """Emit the sum of columns [n, c k, l] in an image: ConvTranspose with one 1 in every filter."""
    image, block = (_constant(at, index) for index in (1, 2))
    axes = len(block)
    strides = at.attribute("strides") or [1] * axes
    dilations = at.attribute("dilations") or [1] * axes
    pads = at.attribute("pads") or [0] * (2 * axes)
    assert isinstance(strides, Sequence) and isinstance(dilations, Sequence) and isinstance(pads, Sequence)
    padded = [size + int(pads[i]) + int(pads[i + axes]) for i, size in enumerate(image)]
    spans = [(k - 1) * int(d) + 1 for k, d in zip(block, dilations, strict=True)]
    counts = [(p - s) // int(t) + 1 for p, s, t in zip(padded, spans, strides, strict=True)]
    remainders = [p - s - (n - 1) * int(t) for p, s, n, t in zip(padded, spans, counts, strides, strict=True)]
    taps, columns = prod(block), at.static_sizes(at.x(0), 1)[0]
    filters = np.tile(np.eye(taps), (columns // taps, 1)).reshape(columns, 1, *block)
    weight = at.build.constant(filters.astype(at.types[at.x(0)].dtype))
    laid_out = at.op("Reshape", at.x(0), at.build.ints(0, columns, *counts))
    return (
        at.op(
            "ConvTranspose",
            laid_out,
            weight,
            group=columns // taps,
            kernel_shape=block,
            strides=list(strides),
            dilations=list(dilations),
            pads=list(pads),
            output_padding=remainders,
        ),
    )


def expand_max_unpool(at: ForwardNode) -> Sequence[str]:
    """Emit zeros with the values of x at flat places in the whole output."""
    if at.x(2):
        raise UnsupportedModel(
            "a MaxUnpool with output_shape, which onnx and onnxruntime read differently",
            at=at.place,
            fix="leave output_shape out",
        )
    shape = at.static_shape(at.y())
    like = at.types[at.x(0)]
    zero = numpy_helper.from_array(np.zeros(1, like.dtype))
    zeros = at.op("ConstantOfShape", at.build.ints(prod(shape)), value=zero)
    flat = [at.op("Reshape", at.x(index), at.build.ints(-1)) for index in (0, 1)]
    flat_output = at.op("ScatterElements", zeros, flat[1], flat[0], axis=0)
    return (at.op("Reshape", flat_output, at.build.ints(*shape)),)


def expand_affine_grid(at: ForwardNode) -> Sequence[str]:
    """Emit theta [n, d, d + 1] times the places of all pixels, [n, .., d], from last axis to first."""
    space = _constant(at, 1)[2:]
    aligned = at.integer("align_corners", 0)
    ends = [1.0 if aligned else 1 - 1 / size for size in space]
    lines = [np.linspace(-end, end, size) for end, size in zip(ends, space, strict=True)]
    coordinates = [axis.ravel() for axis in np.meshgrid(*lines, indexing="ij")][::-1]
    base = np.stack([*coordinates, np.ones(prod(space))], axis=1)
    pixels = at.build.constant(base.astype(at.types[at.x(0)].dtype))
    grid = at.op("MatMul", pixels, at.op("Transpose", at.x(0), perm=[0, 2, 1]))
    return (at.op("Reshape", grid, at.build.ints(0, *space, len(space))),)


def expand_dequantize(at: ForwardNode) -> Sequence[str]:
    """Emit (x - zero point) scale, one scale for all or for each entry of an axis."""
    if at.integer("block_size", 0):
        raise UnsupportedModel("a scale per block", at=at.place, fix="use a scale per axis")
    scale, element = at.x(1), at.types[at.x(1)].element
    x = at.op("Cast", at.x(0), to=element)
    operands = [scale] if not at.x(2) else [scale, at.op("Cast", at.x(2), to=element)]
    if at.rank(scale) == 1 and at.shape(scale) != (1,):
        axis, rank = at.integer("axis", 1), at.rank(at.x(0))
        behind = at.build.ints(*range(1, rank - axis % rank))
        operands = [at.op("Unsqueeze", operand, behind) for operand in operands]
    for zero_point in operands[1:]:
        x = at.op("Sub", x, zero_point)
    return (at.op("Mul", x, operands[0]),)


def expand_tensor_scatter(at: ForwardNode) -> Sequence[str]:
    """Emit a cache [b, .., n along an axis, ..] with an update written from each row's first place on."""
    cache, update, rank = at.x(0), at.x(1), at.rank(at.x(0))
    axis = at.integer("axis", -2) % rank
    size, length = at.static_sizes(cache, axis)[0], at.static_sizes(update, axis)[0]
    row = [1] * rank
    row[axis] = length
    positions = at.build.constant(np.arange(length).reshape(row))
    if at.x(2):
        positions = at.op("Add", positions, at.op("Reshape", at.x(2), at.build.ints(-1, *[1] * (rank - 1))))
    if at.attribute("mode", "linear") == "circular":
        positions = at.op("Mod", positions, at.build.constant(np.array(size, np.int64)))
    everywhere = at.op("Expand", positions, at.op("Shape", update))
    return (at.op("ScatterElements", cache, everywhere, update, axis=axis),)


def _constant(at: ForwardNode, index: int) -> list[int]:
    value = at.constant_input(index)
    assert value is not None
    return [int(size) for size in value]
