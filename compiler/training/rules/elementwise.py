"""Gradient rules of element-wise ops. Binary ones broadcast."""

import math
from collections.abc import Mapping

from partc.compiler.training.rules.forward_node import (
    ForwardNode,
    Gradients,
    Rule,
    broadcasting,
    of_first_output,
)

# ---------------------------------------------------------------- one input


def _relu(at: ForwardNode, dy: str) -> Gradients:
    zero = at.scalar(0, like=at.x(0))
    return {0: at.op("Where", at.op("Greater", at.y(), zero), dy, zero)}


def _leaky_relu(at: ForwardNode, dy: str) -> Gradients:
    slope = at.scalar(at.number("alpha", 0.01), like=at.x(0))
    positive = at.op("Greater", at.x(0), at.scalar(0, like=at.x(0)))
    return {0: at.op("Where", positive, dy, at.op("Mul", dy, slope))}


def _sigmoid(at: ForwardNode, dy: str) -> Gradients:
    slope = at.op("Mul", at.y(), at.op("Sub", at.scalar(1, like=at.x(0)), at.y()))
    return {0: at.op("Mul", dy, slope)}


def _tanh(at: ForwardNode, dy: str) -> Gradients:
    slope = at.op("Sub", at.scalar(1, like=at.x(0)), at.op("Mul", at.y(), at.y()))
    return {0: at.op("Mul", dy, slope)}


def _exp(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", dy, at.y())}


def _log(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Div", dy, at.x(0))}


def _sqrt(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Div", at.op("Mul", dy, at.scalar(0.5, like=at.x(0))), at.y())}


def _neg(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Neg", dy)}


def _abs(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", dy, at.op("Sign", at.x(0)))}


def _reciprocal(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Neg", at.op("Mul", dy, at.op("Mul", at.y(), at.y())))}


def _softplus(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", dy, at.op("Sigmoid", at.x(0)))}


def _sin(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", dy, at.op("Cos", at.x(0)))}


def _cos(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Neg", at.op("Mul", dy, at.op("Sin", at.x(0))))}


def _erf(at: ForwardNode, dy: str) -> Gradients:
    bell = at.op("Exp", at.op("Neg", at.op("Mul", at.x(0), at.x(0))))
    return {0: at.op("Mul", dy, at.op("Mul", bell, at.scalar(2 / math.sqrt(math.pi), like=at.x(0))))}


def _gelu(at: ForwardNode, dy: str) -> Gradients:
    slope = _gelu_tanh_slope(at) if at.attribute("approximate") == "tanh" else _gelu_erf_slope(at)
    return {0: at.op("Mul", dy, slope)}


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


def _cast(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Cast", dy, to=at.types[at.x(0)].element)}


def _identity(at: ForwardNode, dy: str) -> Gradients:
    return {0: dy}


def _clip(at: ForwardNode, dy: str) -> Gradients:
    """The slope is 1 from bound to bound, both included."""
    x, low, high = at.x(0), at.x(1), at.x(2)
    inside = [at.op("GreaterOrEqual", x, low)] if low else []
    inside += [at.op("LessOrEqual", x, high)] if high else []
    if not inside:
        return {0: dy}
    mask = inside[0] if len(inside) == 1 else at.op("And", *inside)
    return {0: at.op("Where", mask, dy, at.scalar(0, like=x))}


# ---------------------------------------------------------------- several inputs


def _add(at: ForwardNode, dy: str) -> Gradients:
    return dict.fromkeys(range(len(at.node.input)), dy)


def _mean(at: ForwardNode, dy: str) -> Gradients:
    count = len(at.node.input)
    return dict.fromkeys(range(count), at.op("Div", dy, at.scalar(count, like=at.x(0))))


def _sub(at: ForwardNode, dy: str) -> Gradients:
    return {0: dy} | ({1: at.op("Neg", dy)} if 1 in at.wanted else {})


def _mul(at: ForwardNode, dy: str) -> Gradients:
    return {index: at.op("Mul", dy, at.x(1 - index)) for index in sorted(at.wanted)}


def _div(at: ForwardNode, dy: str) -> Gradients:
    quotient = at.op("Div", dy, at.x(1))
    return {0: quotient} | ({1: at.op("Neg", at.op("Mul", quotient, at.y()))} if 1 in at.wanted else {})


def _pow(at: ForwardNode, dy: str) -> Gradients:
    """d x^p = p x^(p-1) dx + x^p log(x) dp; log(x) is taken as 0 where x is not positive."""
    x, p = at.x(0), at.x(1)
    gradients = {}
    if 0 in at.wanted:
        exponent = p if at.types[p] == at.types[x] else at.op("CastLike", p, x)
        lower = at.op("Pow", x, at.op("Sub", exponent, at.scalar(1, like=x)))
        gradients[0] = at.op("Mul", dy, at.op("Mul", exponent, lower))
    if 1 in at.wanted:
        one = at.scalar(1, like=x)
        logarithm = at.op("Log", at.op("Where", at.op("Greater", x, at.scalar(0, like=x)), x, one))
        gradients[1] = at.op("Mul", dy, at.op("Mul", at.y(), logarithm))
    return gradients


def _where(at: ForwardNode, dy: str) -> Gradients:
    zero = at.scalar(0, like=at.x(1))
    return {1: at.op("Where", at.x(0), dy, zero), 2: at.op("Where", at.x(0), zero, dy)}


def _extremum(at: ForwardNode, dy: str) -> Gradients:
    """Max and Min: the first input that attains the extremum takes the whole gradient."""
    zero = at.scalar(0, like=at.x(0))
    left = dy
    gradients = {}
    for index in range(len(at.node.input) - 1):
        wins = at.op("Equal", at.x(index), at.y())
        gradients[index] = at.op("Where", wins, left, zero)
        left = at.op("Where", wins, zero, left)
    return gradients | {len(at.node.input) - 1: left}


def _prelu(at: ForwardNode, dy: str) -> Gradients:
    x, slope = at.x(0), at.x(1)
    zero = at.scalar(0, like=x)
    negative = at.op("Less", x, zero)
    return {
        0: at.op("Where", negative, at.op("Mul", dy, slope), dy),
        1: at.op("Where", negative, at.op("Mul", dy, x), zero),
    }


# ---------------------------------------------------------------- dropout


def _dropout(at: ForwardNode, dy: str) -> Gradients:
    """The forward node has a mask output: normalising the forward graph saw to it."""
    ratio = at.constant_input(1)
    kept = 1 - float(ratio) if ratio is not None else 0.5
    scaled = at.op("Mul", dy, at.scalar(1 / kept if kept else 0.0, like=at.x(0)))
    return {0: at.op("Where", at.y(1), scaled, at.scalar(0, like=at.x(0)))}


RULES: Mapping[str, Rule] = {
    "Relu": of_first_output(_relu),
    "LeakyRelu": of_first_output(_leaky_relu),
    "Sigmoid": of_first_output(_sigmoid),
    "Tanh": of_first_output(_tanh),
    "Exp": of_first_output(_exp),
    "Log": of_first_output(_log),
    "Sqrt": of_first_output(_sqrt),
    "Neg": of_first_output(_neg),
    "Abs": of_first_output(_abs),
    "Reciprocal": of_first_output(_reciprocal),
    "Softplus": of_first_output(_softplus),
    "Sin": of_first_output(_sin),
    "Cos": of_first_output(_cos),
    "Erf": of_first_output(_erf),
    "Gelu": of_first_output(_gelu),
    "Cast": of_first_output(_cast),
    "CastLike": of_first_output(_cast),
    "Identity": of_first_output(_identity),
    "Clip": of_first_output(_clip),
    "Dropout": of_first_output(_dropout),
    "Add": broadcasting(_add),
    "Sum": broadcasting(_add),
    "Mean": broadcasting(_mean),
    "Sub": broadcasting(_sub),
    "Mul": broadcasting(_mul),
    "Div": broadcasting(_div),
    "Pow": broadcasting(_pow),
    "Where": broadcasting(_where),
    "Max": broadcasting(_extremum),
    "Min": broadcasting(_extremum),
    "PRelu": broadcasting(_prelu),
}
