"""Gradient rules of batch and layer normalisation, and the training BatchNormalization in plain ops.

    centred = x - mean      inverse = 1 / sqrt(variance + epsilon)      y = centred inverse scale + bias

With statistics of the batch itself (training):

    dx = scale inverse (dy - mean(dy) - centred inverse^2 mean(dy centred))

The means are nodes of their own: where the batch is split over ranks, they are what is communicated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.rules.reduction import count_along


def _per_channel(at: ForwardNode, vector: str) -> str:
    """Shape a vector [c] so that it broadcasts over [n, c, ..]."""
    spatial = at.rank(at.x(0)) - 2
    return at.op("Unsqueeze", vector, at.build.ints(*range(1, 1 + spatial))) if spatial else vector


def _sum_per_channel(at: ForwardNode, tensor: str) -> str:
    axes = at.build.ints(0, *range(2, at.rank(at.x(0))))
    return at.op("ReduceSum", tensor, axes, keepdims=0)


def _inverse_deviation(at: ForwardNode, variance: str) -> str:
    epsilon = at.scalar(at.number("epsilon", 1e-5), like=at.x(0))
    return at.op("Reciprocal", at.op("Sqrt", at.op("Add", variance, epsilon)))


# ---------------------------------------------------------------- batch normalisation


def _batch_normalization(at: ForwardNode, gradients: Sequence[str | None]) -> Gradients:
    if at.integer("training_mode", 0):
        return of_first_output(_training_gradient)(at, [gradients[0]])
    return of_first_output(_inference_gradient)(at, gradients)


def _inference_gradient(at: ForwardNode, dy: str) -> Gradients:
    """Statistics that are computed, such as those of a standardised weight, have gradients too.

    dmean = -scale inverse sum(dy)      dvariance = -1/2 scale inverse^3 sum(dy centred)
    """
    x, scale, mean, variance = (at.x(index) for index in (0, 1, 3, 4))
    inverse = _inverse_deviation(at, variance)
    gradients = {}
    if 0 in at.gradient_inputs:
        gradients[0] = at.op("Mul", dy, _per_channel(at, at.op("Mul", scale, inverse)))
    if {1, 4} & at.gradient_inputs:
        centred = at.op("Sub", x, _per_channel(at, mean))
        gradients[1] = at.op("Mul", _sum_per_channel(at, at.op("Mul", dy, centred)), inverse)
    if {2, 3} & at.gradient_inputs:
        gradients[2] = _sum_per_channel(at, dy)
    slope = at.op("Mul", scale, inverse) if {3, 4} & at.gradient_inputs else ""
    if 3 in at.gradient_inputs:
        gradients[3] = at.op("Neg", at.op("Mul", slope, gradients[2]))
    if 4 in at.gradient_inputs:
        half = at.op("Mul", at.scalar(-0.5, like=x), inverse)
        gradients[4] = at.op("Mul", at.op("Mul", slope, half), gradients[1])
    return gradients


@dataclass(frozen=True, slots=True)
class _BatchStatistics:
    """Per-channel tensors are [c]."""

    mean: str
    variance: str
    centred: str  # shaped like x
    inverse: str
    slope: str  # scale times inverse


def _batch_statistics(at: ForwardNode) -> _BatchStatistics:
    axes = at.build.ints(0, *range(2, at.rank(at.x(0))))
    mean = at.op("ReduceMean", at.x(0), axes, keepdims=0)
    centred = at.op("Sub", at.x(0), _per_channel(at, mean))
    variance = at.op("ReduceMean", at.op("Mul", centred, centred), axes, keepdims=0)
    inverse = _inverse_deviation(at, variance)
    return _BatchStatistics(mean, variance, centred, inverse, at.op("Mul", inverse, at.x(1)))


def _scaled_and_shifted(
    at: ForwardNode, statistics: _BatchStatistics, scale: str, shift: str
) -> tuple[str, ...]:
    """Return the inputs of a BatchNormalization that gives centred inverse scale + shift in one pass."""
    zero_mean = at.op("Sub", statistics.variance, statistics.variance)
    return (statistics.centred, scale, shift, zero_mean, statistics.variance)


def expand_training_batch_normalization(at: ForwardNode) -> None:
    """Emit a training BatchNormalization as plain ops, under the node's own output names.

        running' = running momentum + statistic (1 - momentum)

    Its gradient shares the statistics.
    """
    statistics = _batch_statistics(at)
    scaled = _scaled_and_shifted(at, statistics, at.x(1), at.x(2))
    at.build.call("BatchNormalization", scaled, (at.y(),), epsilon=at.number("epsilon", 1e-5))
    momentum = at.number("momentum", 0.9)
    for index, statistic in ((1, statistics.mean), (2, statistics.variance)):
        if index >= len(at.node.output) or not at.y(index):
            continue
        running = at.x(index + 2)
        old = at.op("Mul", running, at.scalar(momentum, like=running))
        new = at.op("Mul", statistic, at.scalar(1 - momentum, like=at.x(0)))
        at.build.call("Add", (old, new), (at.y(index),))


def _training_gradient(at: ForwardNode, dy: str) -> Gradients:
    """The sums over the batch that dx needs are those that the scale's and the bias' gradients need.

    dx = dy slope + (centred inverse a + b),  a = -slope inverse mean(dy centred),  b = -slope mean(dy)
    """
    statistics = _batch_statistics(at)
    level = _sum_per_channel(at, dy)
    tilt = at.op("Mul", _sum_per_channel(at, at.op("Mul", dy, statistics.centred)), statistics.inverse)
    count = count_along(at, at.x(0), (0, *range(2, at.rank(at.x(0)))))
    share = at.op("Neg", at.op("Div", statistics.slope, count))
    rest = _scaled_and_shifted(at, statistics, at.op("Mul", share, tilt), at.op("Mul", share, level))
    through_statistics = at.op("BatchNormalization", *rest, epsilon=at.number("epsilon", 1e-5))
    direct = at.op("Mul", dy, _per_channel(at, statistics.slope))
    return {0: at.op("Add", direct, through_statistics), 1: tilt, 2: level}


# ---------------------------------------------------------------- layer normalisation


@dataclass(frozen=True, slots=True)
class _Normalized:
    normal: str
    inverse: str  # 1 / sqrt(variance + epsilon)


def _whitened_gradient(at: ForwardNode, g: str, normalized: _Normalized, axes: str) -> str:
    level = at.op("ReduceMean", g, axes, keepdims=1)
    tilt = at.op("ReduceMean", at.op("Mul", g, normalized.normal), axes, keepdims=1)
    rest = at.op("Sub", at.op("Sub", g, level), at.op("Mul", normalized.normal, tilt))
    return at.op("Mul", rest, normalized.inverse)


def _layer_normalization(at: ForwardNode, gradients: Sequence[str | None]) -> Gradients:
    rank = at.rank(at.x(0))
    first = at.integer("axis", -1) % rank
    axes = tuple(range(first, rank))
    mean = at.op("ReduceMean", at.x(0), at.build.ints(*axes), keepdims=1)
    centred = at.op("Sub", at.x(0), mean)
    variance = at.op("ReduceMean", at.op("Mul", centred, centred), at.build.ints(*axes), keepdims=1)
    inverse = _inverse_deviation(at, variance)
    normalized = _Normalized(at.op("Mul", centred, inverse), inverse)
    results = {}
    dy, *of_statistics = gradients
    if dy and 0 in at.gradient_inputs:
        results[0] = _whitened_gradient(at, at.op("Mul", dy, at.x(1)), normalized, at.build.ints(*axes))
    if dy and 1 in at.gradient_inputs:
        results[1] = at.unbroadcast(at.op("Mul", dy, normalized.normal), at.x(0), at.x(1))
    if dy and 2 in at.gradient_inputs:
        results[2] = at.unbroadcast(dy, at.x(0), at.x(2))
    if any(of_statistics):
        parts = _through_statistics(at, of_statistics, normalized, axes)
        results[0] = at.op("Sum", *([results[0]] if 0 in results else []), *parts)
    return results


def _through_statistics(
    at: ForwardNode, gradients: Sequence[str | None], normalized: _Normalized, axes: tuple[int, ...]
) -> list[str]:
    """Return what the mean's and the inverse deviation's gradients add to dx, whose shape it takes.

    d mean / dx = 1 / n         d inverse / dx = - inverse^2 normal / n
    """
    count = count_along(at, at.x(0), axes)
    parts = []
    for index, gradient in enumerate(gradients):
        if not gradient:
            continue
        if at.types[at.y(1 + index)].element != at.types[at.x(0)].element:
            gradient = at.op("Cast", gradient, to=at.types[at.x(0)].element)
        share = at.op("Div", gradient, count)
        if index == 0:
            parts.append(at.op("Expand", share, at.shape_of(at.x(0))))
        else:
            square = at.op("Mul", normalized.inverse, normalized.inverse)
            parts.append(at.op("Neg", at.op("Mul", at.op("Mul", share, square), normalized.normal)))
    return parts


RULES: Mapping[str, Rule] = {
    "BatchNormalization": _batch_normalization,
    "LayerNormalization": _layer_normalization,
}
