"""Gradient rules of element-wise arithmetic. Ops of several inputs broadcast.

Dropout reuses the forward pass's mask, which normalising the graph saw to.
"""

import math
from collections.abc import Mapping

from partc.compiler.differentiation.forward_node import (
    ForwardNode,
    Gradients,
    Rule,
    broadcasting,
    of_first_output,
)

# ---------------------------------------------------------------- one input


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


def _erf(at: ForwardNode, dy: str) -> Gradients:
    bell = at.op("Exp", at.op("Neg", at.op("Mul", at.x(0), at.x(0))))
    return {0: at.op("Mul", dy, at.op("Mul", bell, at.scalar(2 / math.sqrt(math.pi), like=at.x(0))))}


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
    return {0: dy} | ({1: at.op("Neg", dy)} if 1 in at.gradient_inputs else {})


def _mul(at: ForwardNode, dy: str) -> Gradients:
    return {index: at.op("Mul", dy, at.x(1 - index)) for index in sorted(at.gradient_inputs)}


def _div(at: ForwardNode, dy: str) -> Gradients:
    quotient = at.op("Div", dy, at.x(1))
    return {0: quotient} | (
        {1: at.op("Neg", at.op("Mul", quotient, at.y()))} if 1 in at.gradient_inputs else {}
    )


def _pow(at: ForwardNode, dy: str) -> Gradients:
    """d x^p = p x^(p-1) dx + x^p log(x) dp; log(x) is taken as 0 where x is not positive."""
    x = at.x(0)
    gradients = {}
    if 0 in at.gradient_inputs:
        gradients[0] = _power_gradient(at, dy)
    if 1 in at.gradient_inputs:
        one = at.scalar(1, like=x)
        logarithm = at.op("Log", at.op("Where", at.op("Greater", x, at.scalar(0, like=x)), x, one))
        slope = at.op("Mul", at.op("Mul", dy, at.y()), logarithm)
        gradients[1] = slope if _same_element(at) else at.op("Cast", slope, to=at.types[at.x(1)].element)
    return gradients


def _power_gradient(at: ForwardNode, dy: str) -> str:
    """Where p is 0 the slope is 0, also at the origin, where x^(p-1) is infinite."""
    x, p = at.x(0), at.x(1)
    constant = at.constants.get(p)
    if constant is not None and constant.size == 1:
        return _constant_power_gradient(at, dy, float(constant.ravel()[0]))
    exponent = p if _same_element(at) else at.op("CastLike", p, x)
    zero, one = (at.scalar(value, like=x) for value in (0, 1))
    is_zero = at.op("Equal", exponent, zero)
    lower = at.op("Pow", x, at.op("Where", is_zero, one, at.op("Sub", exponent, one)))
    return at.op("Mul", dy, at.op("Mul", exponent, lower))


def _constant_power_gradient(at: ForwardNode, dy: str, exponent: float) -> str:
    x = at.x(0)
    if exponent in (0, 1):
        return at.op("Mul", dy, at.scalar(exponent, like=x))
    lower = x if exponent == 2 else at.op("Pow", x, at.scalar(exponent - 1, like=x))
    return at.op("Mul", dy, at.op("Mul", lower, at.scalar(exponent, like=x)))


def _same_element(at: ForwardNode) -> bool:
    return at.types[at.x(0)].element == at.types[at.x(1)].element


def _mod(at: ForwardNode, dy: str) -> Gradients:
    """a mod b = a - q b, for a whole number q that stays between two jumps."""
    if 1 not in at.gradient_inputs:
        return {0: dy}
    # The quotient is rounded: (a - y) / b misses the whole number by an ulp.
    quotient = at.op("Round", at.op("Div", at.op("Sub", at.x(0), at.y()), at.x(1)))
    return {0: dy, 1: at.op("Neg", at.op("Mul", dy, quotient))}


def _where(at: ForwardNode, dy: str) -> Gradients:
    zero = at.scalar(0, like=at.x(1))
    return {1: at.op("Where", at.x(0), dy, zero), 2: at.op("Where", at.x(0), zero, dy)}


def _extremum(at: ForwardNode, dy: str) -> Gradients:
    """Max and Min: inputs that tie share the gradient equally, but none with constants: those are bounds."""
    zero = at.scalar(0, like=at.x(0))
    wins = [at.op("Equal", x, at.y()) for x in at.node.input]
    if len(at.gradient_inputs) == 1:
        (index,) = at.gradient_inputs
        return {index: at.op("Where", wins[index], dy, zero)}
    flags = [at.op("Cast", wins[index], to=at.types[at.x(0)].element) for index in sorted(at.gradient_inputs)]
    share = at.op("Div", dy, at.op("Max", at.op("Sum", *flags), at.scalar(1, like=at.x(0))))
    return {index: at.op("Where", wins[index], share, zero) for index in sorted(at.gradient_inputs)}


def _dropout(at: ForwardNode, dy: str) -> Gradients:
    """dx = mask dy / (1 - ratio); a Dropout that is told at run time not to train drops nothing."""
    scaled = at.op("Mul", dy, _scale(at))
    training = at.x(2)
    if training and training not in at.constants:
        scaled = at.op("Where", training, scaled, dy)
    return {0: at.op("Where", at.y(1), scaled, at.scalar(0, like=at.x(0)))}


def _scale(at: ForwardNode) -> str:
    x, ratio = at.x(0), at.x(1)
    if ratio and ratio not in at.constants:
        keep_ratio = at.op("Sub", at.scalar(1, like=ratio), ratio)
        scale = at.op("Reciprocal", keep_ratio)
        same = at.types[ratio].element == at.types[x].element
        return scale if same else at.op("Cast", scale, to=at.types[x].element)
    kept_share = 1 - float(at.constants[ratio].item()) if ratio else 0.5
    return at.scalar(1 / kept_share if kept_share else 0.0, like=x)


RULES: Mapping[str, Rule] = {
    "Exp": of_first_output(_exp),
    "Log": of_first_output(_log),
    "Sqrt": of_first_output(_sqrt),
    "Neg": of_first_output(_neg),
    "Abs": of_first_output(_abs),
    "Reciprocal": of_first_output(_reciprocal),
    "Erf": of_first_output(_erf),
    "Cast": of_first_output(_cast),
    "CastLike": of_first_output(_cast),
    "Identity": of_first_output(_identity),
    "Clip": of_first_output(_clip),
    "Add": broadcasting(_add),
    "Sum": broadcasting(_add),
    "Mean": broadcasting(_mean),
    "Sub": broadcasting(_sub),
    "Mul": broadcasting(_mul),
    "Div": broadcasting(_div),
    "Mod": broadcasting(_mod),
    "Pow": broadcasting(_pow),
    "Where": broadcasting(_where),
    "Max": broadcasting(_extremum),
    "Min": broadcasting(_extremum),
    "Dropout": of_first_output(_dropout),
}
