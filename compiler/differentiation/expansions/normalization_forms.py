"""Normalisations written as primitive ops.

GroupNormalization          over the channels of a group, and space    y = normal scale + bias
InstanceNormalization       over space                                 y = normal scale + bias
MeanVarianceNormalization   over the given axes                        y = normal
RMSNormalization            over the axes from `axis` on               y = x / sqrt(mean x^2 + eps) scale
LpNormalization             along one axis                             y = x / |x|_p, 0 at 0
"""

from collections.abc import Sequence

from onnx import TensorProto

from partc.compiler.differentiation.forward_node import ForwardNode

PER_CHANNEL = 21  # the opset from which a group normalisation scales channels
MVN_EPSILON = 1e-9  # added to the deviation: the operator's page of ONNX


def expand_group_normalization(at: ForwardNode) -> Sequence[str]:
    """Emit GroupNormalization: [n, c, ..] is normalised as [n, groups, entries].

    Scale and bias are per channel; before opset 21 they were per group.
    """
    grouped = at.op("Reshape", at.x(0), at.build.ints(0, at.integer("num_groups", 1), -1))
    centred, variance = _moments(at, grouped, at.build.ints(2))
    epsilon = at.scalar(at.number("epsilon", 1e-5), like=at.x(0))
    normal = at.op("Div", centred, at.op("Sqrt", at.op("Add", variance, epsilon)))
    shape = at.op("Shape", at.x(0))
    if at.opset >= PER_CHANNEL:
        return (_apply_scale(at, at.op("Reshape", normal, shape)),)
    scale, bias = (at.op("Unsqueeze", at.x(index), at.build.ints(1)) for index in (1, 2))
    return (at.op("Reshape", at.op("Add", at.op("Mul", normal, scale), bias), shape),)


def expand_instance_normalization(at: ForwardNode) -> Sequence[str]:
    """Emit InstanceNormalization."""
    centred, variance = _moments(at, at.x(0), at.build.ints(*range(2, at.rank(at.x(0)))))
    epsilon = at.scalar(at.number("epsilon", 1e-5), like=at.x(0))
    return (_apply_scale(at, at.op("Div", centred, at.op("Sqrt", at.op("Add", variance, epsilon)))),)


def _apply_scale(at: ForwardNode, normal: str) -> str:
    """Apply scale and bias [c] to [n, c, ..]."""
    axes = at.build.ints(*range(1, at.rank(at.x(0)) - 1))
    flat = at.rank(at.x(0)) == 2
    scale, bias = (at.x(index) if flat else at.op("Unsqueeze", at.x(index), axes) for index in (1, 2))
    return at.op("Add", at.op("Mul", normal, scale), bias)


def expand_mean_variance_normalization(at: ForwardNode) -> Sequence[str]:
    """Emit MeanVarianceNormalization."""
    axes = at.attribute("axes", [0, 2, 3])
    assert isinstance(axes, list)
    centred, variance = _moments(at, at.x(0), at.build.ints(*(int(axis) for axis in axes)))
    deviation = at.op("Add", at.op("Sqrt", variance), at.scalar(MVN_EPSILON, like=at.x(0)))
    return (at.op("Div", centred, deviation),)


def _moments(at: ForwardNode, x: str, axes: str) -> tuple[str, str]:
    """Return x less its mean, and its variance."""
    centred = at.op("Sub", x, at.op("ReduceMean", x, axes, keepdims=1))
    return centred, at.op("ReduceMean", at.op("Mul", centred, centred), axes, keepdims=1)


def expand_rms_normalization(at: ForwardNode) -> Sequence[str]:
    """Emit RMSNormalization; stash_type is the precision of the mean."""
    x, element = at.x(0), at.types[at.x(0)].element
    stash = at.integer("stash_type", TensorProto.FLOAT)
    widens = element in (TensorProto.FLOAT16, TensorProto.BFLOAT16) and stash == TensorProto.FLOAT
    if widens:
        x = at.op("Cast", x, to=stash)
    rank = at.rank(at.x(0))
    axes = at.build.ints(*range(at.integer("axis", -1) % rank, rank))
    mean = at.op("ReduceMean", at.op("Mul", x, x), axes, keepdims=1)
    epsilon = at.scalar(at.number("epsilon", 1e-5), like=at.x(0))
    epsilon = at.op("Cast", epsilon, to=stash) if widens else epsilon
    normal = at.op("Div", x, at.op("Sqrt", at.op("Add", mean, epsilon)))
    result = at.types[at.x(1)].element
    normal = at.op("Cast", normal, to=result) if widens or result != element else normal
    return (at.op("Mul", normal, at.x(1)),)


def expand_lp_normalization(at: ForwardNode) -> Sequence[str]:
    """Emit LpNormalization."""
    norm_op = "ReduceL1" if at.integer("p", 2) == 1 else "ReduceL2"
    norm = at.op(norm_op, at.x(0), at.build.ints(at.integer("axis", -1)), keepdims=1)
    zero, one = (at.scalar(value, like=at.x(0)) for value in (0, 1))
    return (at.op("Div", at.x(0), at.op("Where", at.op("Equal", norm, zero), one, norm)),)
