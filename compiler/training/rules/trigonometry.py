"""Gradient rules of trigonometric and hyperbolic functions and their inverses, by their slopes."""

from collections.abc import Mapping

from partc.compiler.training.rules.forward_node import ForwardNode, Gradients, Rule, of_first_output


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
