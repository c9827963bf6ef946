"""Clip gradients.

    by value         g' = min(max(g, -clip), clip)              torch.nn.utils.clip_grad_value_
    by norm          g' = g clip / max(norm, clip)              each gradient by its own norm
    by global norm   the same, by sqrt(sum over all gradients of their sum of squares)

torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm; this does not, so that a clip is exact. A sparse
gradient counts with its rows summed per id. Source: Pascanu et al., ICML 2013.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.differentiation.updates.check_settings import POSITIVE, check_setting
from partc.compiler.differentiation.updates.update_builder import ReadyGradient, Updates


@dataclass(frozen=True, slots=True)
class Clipping:
    """Limits of the gradients; None: no limit. All that are given apply, in this order."""

    value: float | None = None
    norm: float | None = None
    global_norm: float | None = None

    def __post_init__(self) -> None:
        limits = {
            "--clip-value": self.value,
            "--clip-norm": self.norm,
            "--clip-global-norm": self.global_norm,
        }
        for option, limit in limits.items():
            if limit is not None:
                check_setting(option, limit, POSITIVE)


def clip(updates: Updates, gradients: Sequence[ReadyGradient], limits: Clipping) -> list[ReadyGradient]:
    """Emit the clipping and return the clipped gradients."""
    updates.build.scope = "clip/"
    clipped = list(gradients)
    if limits.value is not None:
        clipped = [_by_value(updates, gradient, limits.value) for gradient in clipped]
    if limits.norm is not None:
        clipped = [_by_norm(updates, gradient, limits.norm) for gradient in clipped]
    if limits.global_norm is not None:
        clipped = _by_global_norm(updates, clipped, limits.global_norm)
    updates.build.scope = ""
    return clipped


def _by_value(updates: Updates, gradient: ReadyGradient, limit: float) -> ReadyGradient:
    low, high = (updates.scalar(value, gradient.parameter) for value in (-limit, limit))
    return gradient.with_values(updates.build.op("Clip", gradient.values, low, high))


def _by_norm(updates: Updates, gradient: ReadyGradient, limit: float) -> ReadyGradient:
    scale = _scale(updates, _sum_of_squares(updates, gradient), gradient.parameter, limit)
    return gradient.with_values(updates.build.op("Mul", gradient.values, scale))


def _by_global_norm(
    updates: Updates, gradients: Sequence[ReadyGradient], limit: float
) -> list[ReadyGradient]:
    """Scale all gradients alike; the norm has the first parameter's element type."""
    build, types = updates.build, updates.types
    first = gradients[0].parameter
    element = types[first].element
    squares = []
    for gradient in gradients:
        square = _sum_of_squares(updates, gradient)
        is_same = types[gradient.parameter].element == element
        squares.append(square if is_same else build.op("Cast", square, to=element))
    total = squares[0] if len(squares) == 1 else build.op("Sum", *squares)
    scale = _scale(updates, total, first, limit)
    clipped = []
    for gradient in gradients:
        own = types[gradient.parameter].element
        factor = scale if own == element else build.op("Cast", scale, to=own)
        clipped.append(gradient.with_values(build.op("Mul", gradient.values, factor)))
    return clipped


def _sum_of_squares(updates: Updates, gradient: ReadyGradient) -> str:
    squares = updates.build.op("Mul", gradient.values, gradient.values)
    return updates.build.op("ReduceSum", squares, keepdims=0)


def _scale(updates: Updates, sum_of_squares: str, parameter: str, limit: float) -> str:
    build, clip_norm = updates.build, updates.scalar(limit, parameter)
    return build.op("Div", clip_norm, build.op("Max", build.op("Sqrt", sum_of_squares), clip_norm))
