"""Gradient rules of activation, trigonometric and hyperbolic functions, each by its slope.

At a kink it is the slope that PyTorch takes.
"""

import math
from collections.abc import Callable, Mapping

from partc.compiler.differentiation.forward_node import (
    ForwardNode,
    Gradients,
    Rule,
    broadcasting,
    of_first_output,
)


def _by_slope(slope: Callable[[ForwardNode], str]) -> Rule:
    """Make a rule of a function that emits dy/dx."""

    def rule(at: ForwardNode, dy: str) -> Gradients:
        return {0: at.op("Mul", dy, slope(at))}

    return of_first_output(rule)


def _where_positive(at: ForwardNode, then: str, otherwise: str) -> Gradients:
    positive = at.op("Greater", at.x(0), at.scalar(0, like=at.x(0)))
    return {0: at.op("Where", positive, then, otherwise)}


# ---------------------------------------------------------------- straight pieces


def _relu(at: ForwardNode, dy: str) -> Gradients:
    zero = at.scalar(0, like=at.x(0))
    return {0: at.op("Where", at.op("Greater", at.y(), zero), dy, zero)}


def _leaky_relu(at: ForwardNode, dy: str) -> Gradients:
    slope = at.scalar(at.number("alpha", 0.01), like=at.x(0))
    return _where_positive(at, dy, at.op("Mul", dy, slope))


def _thresholded_relu(at: ForwardNode, dy: str) -> Gradients:
    passes = at.op("Greater", at.x(0), at.scalar(at.number("alpha", 1.0), like=at.x(0)))
    return {0: at.op("Where", passes, dy, at.scalar(0, like=at.x(0)))}


def _shrink(at: ForwardNode, dy: str) -> Gradients:
    dead = at.op("LessOrEqual", at.op("Abs", at.x(0)), at.scalar(at.number("lambd", 0.5), like=at.x(0)))
    return {0: at.op("Where", dead, at.scalar(0, like=at.x(0)), dy)}


def _hard_sigmoid(at: ForwardNode, dy: str) -> Gradients:
    zero, slope = at.scalar(0, like=at.x(0)), at.scalar(at.number("alpha", 0.2), like=at.x(0))
    above = at.op("Greater", at.y(), zero)
    inside = at.op("And", above, at.op("Less", at.y(), at.scalar(1, like=at.x(0))))
    return {0: at.op("Where", inside, at.op("Mul", dy, slope), zero)}


def _hard_swish_slope(at: ForwardNode) -> str:
    """Return x / 3 + 1 / 2 between -3 and 3, then 1, before 0."""
    x, half = at.x(0), at.scalar(0.5, like=at.x(0))
    ramp = at.op("Add", at.op("Mul", x, at.scalar(1 / 3, like=x)), half)
    three, one, zero = (at.scalar(value, like=x) for value in (3, 1, 0))
    rising = at.op("Where", at.op("Less", x, three), ramp, one)
    return at.op("Where", at.op("Greater", x, at.op("Neg", three)), rising, zero)


def _prelu(at: ForwardNode, dy: str) -> Gradients:
    x, slope = at.x(0), at.x(1)
    zero = at.scalar(0, like=x)
    positive = at.op("Greater", x, zero)
    return {
        0: at.op("Where", positive, dy, at.op("Mul", dy, slope)),
        1: at.op("Where", positive, zero, at.op("Mul", dy, x)),
    }


# ---------------------------------------------------------------- exponential pieces


def _elu(at: ForwardNode, dy: str) -> Gradients:
    """Below 0, y + alpha = alpha e^x: nothing overflows where the other piece holds."""
    alpha = at.scalar(at.number("alpha", 1.0), like=at.x(0))
    return _where_positive(at, dy, at.op("Mul", dy, at.op("Add", at.y(), alpha)))


def _selu(at: ForwardNode, dy: str) -> Gradients:
    alpha, gamma = (
        at.number("alpha", 1.67326319217681884765625),
        at.number("gamma", 1.05070102214813232421875),
    )
    below = at.op("Add", at.y(), at.scalar(alpha * gamma, like=at.x(0)))
    above = at.op("Mul", dy, at.scalar(gamma, like=at.x(0)))
    return _where_positive(at, above, at.op("Mul", dy, below))


def _celu(at: ForwardNode, dy: str) -> Gradients:
    """Below 0, y / alpha + 1 = e^(x / alpha)."""
    inverse = at.scalar(1 / at.number("alpha", 1.0), like=at.x(0))
    below = at.op("Add", at.op("Mul", at.y(), inverse), at.scalar(1, like=at.x(0)))
    return _where_positive(at, dy, at.op("Mul", dy, below))


def _sigmoid_slope(at: ForwardNode) -> str:
    return at.op("Mul", at.y(), at.op("Sub", at.scalar(1, like=at.x(0)), at.y()))


def _tanh_slope(at: ForwardNode) -> str:
    return at.op("Sub", at.scalar(1, like=at.x(0)), at.op("Mul", at.y(), at.y()))


def _softplus_slope(at: ForwardNode) -> str:
    return at.op("Sigmoid", at.x(0))


def _softsign_slope(at: ForwardNode) -> str:
    """Return 1 / (1 + |x|)^2."""
    wide = at.op("Add", at.op("Abs", at.x(0)), at.scalar(1, like=at.x(0)))
    return at.op("Reciprocal", at.op("Mul", wide, wide))


def _mish_slope(at: ForwardNode) -> str:
    """Return t + x s (1 - t^2), for t = tanh(softplus(x)), s = sigmoid(x)."""
    x = at.x(0)
    t = at.op("Tanh", at.op("Softplus", x))
    bend = at.op("Sub", at.scalar(1, like=x), at.op("Mul", t, t))
    return at.op("Add", t, at.op("Mul", at.op("Mul", x, at.op("Sigmoid", x)), bend))


# ---------------------------------------------------------------- gelu


def _gelu_slope(at: ForwardNode) -> str:
    return _gelu_tanh_slope(at) if at.attribute("approximate") == "tanh" else _gelu_erf_slope(at)


def _gelu_erf_slope(at: ForwardNode) -> str:
    """Return cdf(x) + x pdf(x), of the standard normal distribution."""
    x = at.x(0)
    half = at.scalar(0.5, like=x)
    error = at.op("Erf", at.op("Mul", x, at.scalar(math.sqrt(0.5), like=x)))
    cdf = at.op("Add", at.op("Mul", error, half), half)
    bell = at.op("Exp", at.op("Mul", at.op("Mul", x, x), at.scalar(-0.5, like=x)))
    pdf = at.op("Mul", bell, at.scalar(1 / math.sqrt(2 * math.pi), like=x))
    return at.op("Add", cdf, at.op("Mul", x, pdf))


def _gelu_tanh_slope(at: ForwardNode) -> str:
    """Return (1 + t + x (1 - t^2) a (1 + 3 b x^2)) / 2, for t = tanh(a (x + b x^3))."""
    x = at.x(0)
    a, b = math.sqrt(2 / math.pi), 0.044715
    one = at.scalar(1, like=x)
    square = at.op("Mul", x, x)
    inner = at.op(
        "Mul", x, at.op("Add", at.op("Mul", square, at.scalar(a * b, like=x)), at.scalar(a, like=x))
    )
    t = at.op("Tanh", inner)
    steepness = at.op("Add", at.op("Mul", square, at.scalar(3 * a * b, like=x)), at.scalar(a, like=x))
    bend = at.op("Mul", at.op("Mul", x, at.op("Sub", one, at.op("Mul", t, t))), steepness)
    return at.op("Mul", at.op("Add", at.op("Add", one, t), bend), at.scalar(0.5, like=x))


def _sin(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", dy, at.op("Cos", at.x(0)))}


def _cos(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Neg", at.op("Mul", dy, at.op("Sin", at.x(0))))}


def _tan(at: ForwardNode, dy: str) -> Gradients:
    slope = at.op("Add", _square(at, at.y()), at.scalar(1, like=at.x(0)))
    return {0: at.op("Mul", dy, slope)}


def _sinh(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", dy, at.op("Cosh", at.x(0)))}


def _cosh(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", dy, at.op("Sinh", at.x(0)))}


def _asin(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Div", dy, at.op("Sqrt", _one_minus_square(at)))}


def _acos(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Neg", at.op("Div", dy, at.op("Sqrt", _one_minus_square(at))))}


def _atan(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Div", dy, _one_plus_square(at))}


def _asinh(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Div", dy, at.op("Sqrt", _one_plus_square(at)))}


def _acosh(at: ForwardNode, dy: str) -> Gradients:
    under = at.op("Sub", _square(at, at.x(0)), at.scalar(1, like=at.x(0)))
    return {0: at.op("Div", dy, at.op("Sqrt", under))}


def _atanh(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Div", dy, _one_minus_square(at))}


def _square(at: ForwardNode, tensor: str) -> str:
    return at.op("Mul", tensor, tensor)


def _one_minus_square(at: ForwardNode) -> str:
    return at.op("Sub", at.scalar(1, like=at.x(0)), _square(at, at.x(0)))


def _one_plus_square(at: ForwardNode) -> str:
    return at.op("Add", _square(at, at.x(0)), at.scalar(1, like=at.x(0)))


RULES: Mapping[str, Rule] = {
    "Celu": of_first_output(_celu),
    "Elu": of_first_output(_elu),
    "Gelu": _by_slope(_gelu_slope),
    "HardSigmoid": of_first_output(_hard_sigmoid),
    "HardSwish": _by_slope(_hard_swish_slope),
    "LeakyRelu": of_first_output(_leaky_relu),
    "Mish": _by_slope(_mish_slope),
    "PRelu": broadcasting(_prelu),
    "Relu": of_first_output(_relu),
    "Selu": of_first_output(_selu),
    "Shrink": of_first_output(_shrink),
    "Sigmoid": _by_slope(_sigmoid_slope),
    "Softplus": _by_slope(_softplus_slope),
    "Softsign": _by_slope(_softsign_slope),
    "Tanh": _by_slope(_tanh_slope),
    "ThresholdedRelu": of_first_output(_thresholded_relu),
    "Acos": of_first_output(_acos),
    "Acosh": of_first_output(_acosh),
    "Asin": of_first_output(_asin),
    "Asinh": of_first_output(_asinh),
    "Atan": of_first_output(_atan),
    "Atanh": of_first_output(_atanh),
    "Cos": of_first_output(_cos),
    "Cosh": of_first_output(_cosh),
    "Sin": of_first_output(_sin),
    "Sinh": of_first_output(_sinh),
    "Tan": of_first_output(_tan),
}
