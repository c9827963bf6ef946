"""GridSample written as primitive ops: all taps of all positions in one GatherElements.

    position   x = denormalised grid            [n, 1, p] per axis, p output pixels
    taps       floor(x) + 0, 1 (linear), - 1 .. 2 (cubic), round(x) (nearest)      [n, t, p]
    weights    a polynomial of x - floor(x) per tap

The gradient flows to the image through the taps, to the grid through the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import TensorProto

from partc.compiler.differentiation.forward_node import ForwardNode

# Keys, IEEE Trans. Acoust. Speech Signal Process. 29 (1981) 1153-1160, with the slope of PyTorch.
CUBIC = -0.75


@dataclass(frozen=True, slots=True)
class _Interpolation:
    """Distances of the taps from the first position, and the weights' coefficients [tap, power]."""

    taps: tuple[int, ...]
    coefficients: tuple[tuple[float, ...], ...]


INTERPOLATIONS = {
    "nearest": _Interpolation((0,), ((1.0,),)),
    "linear": _Interpolation((0, 1), ((1.0, -1.0), (0.0, 1.0))),
    "cubic": _Interpolation(
        (-1, 0, 1, 2),
        (
            (0.0, CUBIC, -2 * CUBIC, CUBIC),
            (1.0, 0.0, -(CUBIC + 3), CUBIC + 2),
            (0.0, -CUBIC, 2 * CUBIC + 3, -(CUBIC + 2)),
            (0.0, 0.0, CUBIC, -CUBIC),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class _Axis:
    """Taps along one axis of the image: int64[n, t, p] and float[n, t, p]."""

    indices: str
    weights: str


def expand_grid_sample(at: ForwardNode) -> Sequence[str]:
    """Emit GridSample on an image [n, c, ..] and a grid [n, .., axes], its axes from last to first."""
    sizes, pixels = at.static_sizes(at.x(0), 1), at.static_sizes(at.x(1), 1)[:-1]
    channels, space = sizes[0], sizes[1:]
    flat_grid = at.op("Reshape", at.x(1), at.build.ints(0, 1, prod(pixels), len(space)))
    parts = at.build.call("Split", (flat_grid,), len(space), axis=-1, num_outputs=len(space))
    positions = [at.op("Squeeze", part, at.build.ints(-1)) for part in parts[::-1]]
    axes = [_axis(at, *pair) for pair in zip(positions, space, strict=True)]
    taps = len(_interpolation(at).taps) ** len(space)
    indices, weights = _combine(at, axes, space)
    wide = at.op("Reshape", indices, at.build.ints(0, 1, taps * prod(pixels)))
    wide = at.op("Expand", wide, at.build.ints(1, channels, 1))
    image = at.op("Reshape", at.x(0), at.build.ints(0, 0, -1))
    pixel_values = at.op("GatherElements", image, wide, axis=2)
    pixel_values = at.op("Reshape", pixel_values, at.build.ints(0, 0, taps, prod(pixels)))
    weights = at.op("Reshape", weights, at.build.ints(0, 1, taps, prod(pixels)))
    result = at.op("ReduceSum", at.op("Mul", pixel_values, weights), at.build.ints(2), keepdims=0)
    return (at.op("Reshape", result, at.build.ints(0, 0, *pixels)),)


def _interpolation(at: ForwardNode) -> _Interpolation:
    mode = str(at.attribute("mode", "linear")).removeprefix("bi")
    return INTERPOLATIONS[mode]


def _combine(at: ForwardNode, axes: Sequence[_Axis], space: Sequence[int]) -> tuple[str, str]:
    """Return positions in the flat image and weights, [n, t, t, .., p]."""
    indices = weights = ""
    for place, axis in enumerate(axes):
        others = at.build.ints(*(1 + other for other in range(len(axes)) if other != place))
        stride = at.build.constant(np.array(prod(space[place + 1 :]), np.int64))
        index = at.op("Unsqueeze", at.op("Mul", axis.indices, stride), others)
        weight = at.op("Unsqueeze", axis.weights, others)
        indices = at.op("Add", indices, index) if indices else index
        weights = at.op("Mul", weights, weight) if weights else weight
    return indices, weights


def _axis(at: ForwardNode, grid: str, size: int) -> _Axis:
    """Return the taps of one axis, from its part [n, 1, p] of the grid."""
    interpolation, dtype = _interpolation(at), at.types[at.x(0)].dtype
    position = _position(at, grid, size)
    base = at.op("Round" if len(interpolation.taps) == 1 else "Floor", position)
    taps = at.build.constant(np.array(interpolation.taps, dtype).reshape(1, -1, 1))
    weights = _weights(at, at.op("Sub", position, base), interpolation)
    indices = at.op("Add", base, taps)
    zero, last = (at.scalar(value, like=at.x(0)) for value in (0, size - 1))
    padding = at.attribute("padding_mode", "zeros")
    if padding == "zeros":
        inside = at.op("And", at.op("GreaterOrEqual", indices, zero), at.op("LessOrEqual", indices, last))
        weights = at.op("Where", inside, weights, zero)
    elif padding == "reflection" and size > 1:
        indices = _reflect(at, indices, size)
    return _Axis(at.op("Cast", at.op("Clip", indices, zero, last), to=TensorProto.INT64), weights)


def _position(at: ForwardNode, grid: str, size: int) -> str:
    """Return (grid + 1) (size - 1) / 2 with aligned corners, else ((grid + 1) size - 1) / 2."""
    aligned = at.integer("align_corners", 0)
    slope = (size - 1 if aligned else size) / 2
    scaled = at.op("Mul", grid, at.scalar(slope, like=at.x(0)))
    return at.op("Add", scaled, at.scalar(slope if aligned else slope - 0.5, like=at.x(0)))


def _weights(at: ForwardNode, rest: str, interpolation: _Interpolation) -> str:
    """Evaluate the taps' polynomials, Horner's way."""
    table = np.array(interpolation.coefficients, at.types[at.x(0)].dtype)
    columns = [at.build.constant(table[:, power].reshape(1, -1, 1)) for power in range(table.shape[1])]
    # A weight has the shape of the positions even where it is constant.
    weights = at.op("Add", at.op("Mul", rest, at.scalar(0, like=at.x(0))), columns[-1])
    for column in columns[-2::-1]:
        weights = at.op("Add", at.op("Mul", weights, rest), column)
    return weights


def _reflect(at: ForwardNode, indices: str, size: int) -> str:
    """Reflect positions at the image's borders until they lie within."""
    low, high = (0.0, size - 1.0) if at.integer("align_corners", 0) else (-0.5, size - 0.5)
    lower, span, period = (at.scalar(value, like=at.x(0)) for value in (low, high - low, 2 * (high - low)))
    distance = at.op("Abs", at.op("Sub", indices, lower))
    folded = at.op("Mod", distance, period, fmod=1)
    back = at.op("Sub", period, folded)
    return at.op("Add", at.op("Where", at.op("Greater", folded, span), back, folded), lower)
