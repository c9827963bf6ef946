"""Learning-rate schedules inside the graph: a factor of every learning rate, from the updates made so far.

    constant      1                                              n: updates made, from 0 on
    step          factor ** floor(n / every)                     torch.optim.lr_scheduler.StepLR
    exponential   factor ** n                                    ExponentialLR
    cosine        floor + (1 - floor) (1 + cos(pi n / steps)) / 2   CosineAnnealingLR, eta_min = floor lr
    warm-up       start + (1 - start) n / steps, then 1          LinearLR

With a warm-up of k updates the other schedule begins at update k, as in SequentialLR. A cosine stays at its
floor, where PyTorch's would rise again. Cosine's source: Loshchilov and Hutter, ICLR 2017.
"""

from dataclasses import dataclass
from math import pi
from typing import Protocol

import numpy as np
from onnx import TensorProto

from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.updates.check_settings import COUNT, FRACTION, POSITIVE, check_setting
from partc.compiler.differentiation.updates.update_builder import Updates


class LearningRateSchedule(Protocol):
    """Emits the factor of the learning rates."""

    def emit(self, build: NodeBuilder, updates_done: str) -> str:
        """Return the factor after `done` updates; both are double scalars."""


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """Leave the learning rates as they are."""

    def emit(self, build: NodeBuilder, updates_done: str) -> str:
        """Return 1."""
        return _number(build, 1.0)


@dataclass(frozen=True, slots=True)
class StepDecay:
    """Multiply the rates by `factor` after every `every` updates."""

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_setting("schedule step, every", self.every, COUNT)
        check_setting("schedule step, factor", self.factor, POSITIVE)

    def emit(self, build: NodeBuilder, updates_done: str) -> str:
        """Return factor ** floor(done / every)."""
        times = build.op("Floor", build.op("Div", updates_done, _number(build, self.every)))
        return build.op("Pow", _number(build, self.factor), times)


@dataclass(frozen=True, slots=True)
class ExponentialDecay:
    """Multiply the rates by `factor` after every update."""

    factor: float

    def __post_init__(self) -> None:
        check_setting("schedule exponential, factor", self.factor, POSITIVE)

    def emit(self, build: NodeBuilder, updates_done: str) -> str:
        """Return factor ** done."""
        return build.op("Pow", _number(build, self.factor), updates_done)


@dataclass(frozen=True, slots=True)
class CosineDecay:
    """Lower the rates along half a cosine to `floor` times themselves, in `steps` updates."""

    steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_setting("schedule cosine, steps", self.steps, COUNT)
        check_setting("schedule cosine, floor", self.floor, FRACTION)

    def emit(self, build: NodeBuilder, updates_done: str) -> str:
        """Return floor + (1 - floor) (1 + cos(pi done / steps)) / 2."""
        age = build.op("Min", updates_done, _number(build, self.steps))
        wave = build.op("Cos", build.op("Mul", age, _number(build, pi / self.steps)))
        half = (1 - self.floor) / 2
        middle, swing = _number(build, self.floor + half), _number(build, half)
        return build.op("Add", middle, build.op("Mul", swing, wave))


@dataclass(frozen=True, slots=True)
class Warmup:
    """Raise the rates in a line, from `start` times themselves, in `steps` updates."""

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        check_setting("--warmup, steps", self.steps, COUNT)
        check_setting("--warmup, start", self.start, FRACTION)

    def emit(self, build: NodeBuilder, updates_done: str) -> str:
        """Return start + (1 - start) min(done / steps, 1)."""
        share = build.op(
            "Min", build.op("Div", updates_done, _number(build, self.steps)), _number(build, 1.0)
        )
        raised = build.op("Mul", share, _number(build, 1 - self.start))
        return build.op("Add", _number(build, self.start), raised)


def schedule_rates(updates: Updates, schedule: LearningRateSchedule | None, warmup: Warmup | None) -> None:
    """Let every learning rate follow the schedule, after the warm-up."""
    build = updates.build
    if warmup is None and (schedule is None or isinstance(schedule, ConstantRate)):
        return
    build.scope = "schedule/"
    updates_done = build.op("Cast", updates.steps_done(), to=TensorProto.DOUBLE)
    factors = []
    if warmup is not None:
        factors.append(warmup.emit(build, updates_done))
        late = build.op("Sub", updates_done, _number(build, warmup.steps))
        updates_done = build.op("Max", late, _number(build, 0.0))
    if schedule is not None:
        factors.append(schedule.emit(build, updates_done))
    updates.rate_factor = factors[0] if len(factors) == 1 else build.op("Mul", *factors)
    build.scope = ""


def _number(build: NodeBuilder, value: float) -> str:
    return build.constant(np.array(value, np.float64))
