"""Scale the loss, so that 16-bit gradients do not vanish, and scale the gradients back.

    gradient of the loss = scale        g = gradient / scale, in the parameter's element type

    dynamic   an update counts if every gradient is finite
              not finite                          scale' = scale backoff
              `interval` finite updates in a row  scale' = scale growth, unless that is infinite

Sources: Micikevicius et al., ICLR 2018; torch.amp.GradScaler.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from partc.compiler.differentiation.updates.check_settings import (
    ABOVE_1,
    BETWEEN_0_AND_1,
    COUNT,
    POSITIVE,
    check_setting,
)
from partc.compiler.differentiation.updates.update_builder import ReadyGradient, Updates


@dataclass(frozen=True, slots=True)
class StaticScale:
    """One scale for all steps. A gradient that overflows spoils its parameter."""

    scale: float

    def __post_init__(self) -> None:
        check_setting("--loss-scale", self.scale, POSITIVE)


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """A scale that grows until gradients overflow; such updates are skipped. PyTorch's defaults."""

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        check_setting("--loss-scale, initial", self.initial, POSITIVE)
        check_setting("--loss-scale, growth", self.growth, ABOVE_1)
        check_setting("--loss-scale, backoff", self.backoff, BETWEEN_0_AND_1)
        check_setting("--loss-scale, interval", self.interval, COUNT)


LossScale = StaticScale | DynamicScale


def scale_loss(updates: Updates, scale: LossScale) -> str:
    """Return the scale, a float32 scalar: a constant, or a variable `loss_scale`."""
    if isinstance(scale, StaticScale):
        return updates.build.constant(np.array(scale.scale, np.float32))
    return updates.variable("loss_scale", TensorProto.FLOAT, (), scale.initial)


def unscale(updates: Updates, gradients: Sequence[ReadyGradient], scale: str) -> list[ReadyGradient]:
    """Divide the gradients by the scale."""
    build = updates.build
    build.scope = "loss_scale/"
    one = build.constant(np.array(1.0, np.float64))
    inverse = build.op("Div", one, build.op("Cast", scale, to=TensorProto.DOUBLE))
    unscaled = [
        gradient.with_values(build.op("Mul", gradient.values, updates.cast(inverse, gradient.parameter)))
        for gradient in gradients
    ]
    build.scope = ""
    return unscaled


def all_finite(updates: Updates, gradients: Sequence[ReadyGradient]) -> str:
    """Return whether no gradient holds an infinity or a NaN, a bool scalar.

    Entries are counted rather than compared, so that servers, which own some rows, can add theirs up.
    """
    build = updates.build
    build.scope = "loss_scale/"
    counts = []
    for gradient in gradients:
        is_bad = build.op("IsNaN", build.op("Sub", gradient.values, gradient.values))  # inf - inf is NaN
        bad = build.op("Cast", is_bad, to=TensorProto.FLOAT)
        counts.append(build.op("ReduceSum", bad, keepdims=0))
    total = counts[0] if len(counts) == 1 else build.op("Sum", *counts)
    finite = build.op("Equal", total, build.constant(np.array(0.0, np.float32)))
    build.scope = ""
    return finite


def renew_scale(updates: Updates, variable: str, scale: DynamicScale, finite: str, ends: str) -> None:
    """Give the scale its next value; `ends`: whether an accumulation ends here, or empty: it does."""
    build = updates.build
    build.scope = "loss_scale/"

    def keep_until_end(name: str, following: str) -> None:
        inputs = (ends, following, name) if ends else (following,)
        updates.set_next(name, "Where" if ends else "Identity", *inputs)

    streak = updates.variable("finite_steps", TensorProto.INT64, (), 0)
    one, zero, interval = (build.constant(np.array(v, np.int64)) for v in (1, 0, scale.interval))
    longer = build.op("Add", streak, one)
    grows = build.op("Equal", longer, interval)
    keep_until_end(streak, build.op("Where", build.op("And", finite, build.op("Not", grows)), longer, zero))
    grown = build.op("Mul", variable, _float(updates, scale.growth))
    grown = build.op("Where", build.op("IsInf", grown), variable, grown)
    grown = build.op("Where", grows, grown, variable)
    reduced_scale = build.op("Mul", variable, _float(updates, scale.backoff))
    keep_until_end(variable, build.op("Where", finite, grown, reduced_scale))
    build.scope = ""


def _float(updates: Updates, value: float) -> str:
    return updates.build.constant(np.array(value, np.float32))
