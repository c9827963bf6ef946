"""Optimizers, as nodes: from a gradient to the next values of its parameter and slots.

    SGD        W' = W - lr g
    Momentum   v' = m v + g              W' = W - lr v'           (Polyak; Nesterov: W - lr (g + m v'))
    Adagrad    a' = a + g^2              W' = W - lr g / (sqrt(a') + epsilon)

An indexed-slices gradient is summed per id first. SGD and Adagrad then write only the rows that were
read; momentum decays every row, so it writes them all. To add an optimizer: a frozen dataclass with
`step`, and its name in OPTIMIZERS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import onnx
from onnx import TensorProto

from partc.compiler.training.node_builder import NodeBuilder
from partc.compiler.training.tensor_types import TensorType, Types

LearningRate = float | Literal["fed"]  # fed: a data input `learning_rate`, float32 scalar
LEARNING_RATE = "learning_rate"


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """A gradient as an optimizer reads it: dense, or sums of rows at distinct ids."""

    parameter: str
    dense: str | None = None
    unique_ids: str = ""
    sums: str = ""

    @property
    def values(self) -> str:
        """Return the tensor whose squares sum to the gradient's squared norm."""
        return self.dense or self.sums


@dataclass(frozen=True, slots=True)
class Slot:
    """A variable that an optimizer keeps beside a parameter, every element `initial` at first."""

    name: str
    type_: TensorType
    initial: float


@dataclass
class Updates:
    """The updates of all parameters: nodes, new variables and the variables' next values."""

    build: NodeBuilder
    types: Types
    next_values: dict[str, str] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    feeds_learning_rate: bool = False

    def scalar(self, value: float, parameter: str) -> str:
        """Return a constant of the parameter's element type."""
        return self.build.constant(np.array(value, self.types[parameter].dtype))

    def learning_rate(self, rate: LearningRate, parameter: str) -> str:
        """Return the learning rate in the parameter's element type."""
        if rate != "fed":
            return self.scalar(rate, parameter)
        self.feeds_learning_rate = True
        if self.types[parameter].element == TensorProto.FLOAT:
            return LEARNING_RATE
        return self.build.op("Cast", LEARNING_RATE, to=self.types[parameter].element)

    def slot(self, parameter: str, suffix: str, initial: float) -> str:
        """Create a slot shaped like the parameter and return its name."""
        name = self.build.fresh(f"{parameter}.{suffix}")
        self.slots.append(Slot(name, self.types[parameter], initial))
        return name

    def finish(self, variable: str, op_type: str, *inputs: str, **attributes: str) -> str:
        """Emit the operation that makes a variable's next value, and return the value's name."""
        name = self.build.fresh(f"{variable}_next")
        self.build.call(op_type, inputs, (name,), **attributes)
        self.next_values[variable] = name
        return name

    def add_rows(self, variable: str, gradient: ReadyGradient, rows: str, into: str = "") -> str:
        """Let a variable's next value be `into` (else itself) with rows added at the gradient's ids."""
        positions = self.build.op("Unsqueeze", gradient.unique_ids, self.build.ints(-1))
        return self.finish(variable, "ScatterND", into or variable, positions, rows, reduction="add")


class Optimizer(Protocol):
    """Emits one parameter's update."""

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its slots their next values."""


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent."""

    lr: LearningRate = 0.01

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter its next value."""
        change = updates.build.op("Mul", updates.learning_rate(self.lr, gradient.parameter), gradient.values)
        _subtract(updates, gradient, change)


@dataclass(frozen=True, slots=True)
class Momentum:
    """SGD with a decaying sum of gradients. Source: Sutskever et al., ICML 2013, in PyTorch's form."""

    lr: LearningRate = 0.01
    momentum: float = 0.9
    nesterov: bool = False

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its velocity their next values."""
        build, parameter = updates.build, gradient.parameter
        decay = updates.scalar(self.momentum, parameter)
        rate = updates.learning_rate(self.lr, parameter)
        velocity = updates.slot(parameter, "momentum", 0.0)
        velocity_next = _accumulate(updates, velocity, gradient, build.op("Mul", decay, velocity))
        if not self.nesterov:
            updates.finish(parameter, "Sub", parameter, build.op("Mul", rate, velocity_next))
            return
        ahead = build.op("Mul", decay, velocity_next)
        ahead = build.op("Sub", parameter, build.op("Mul", rate, ahead))
        change = build.op("Mul", rate, gradient.values)
        _subtract(updates, gradient, change, into=ahead)


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Steps that shrink with the gradients seen. Source: Duchi et al., JMLR 12 (2011)."""

    lr: LearningRate = 0.1
    initial_accumulator: float = 0.1
    epsilon: float = 1e-10

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its accumulator their next values."""
        build, parameter = updates.build, gradient.parameter
        accumulator = updates.slot(parameter, "accumulator", self.initial_accumulator)
        squares = build.op("Mul", gradient.values, gradient.values)
        following = _accumulate(updates, accumulator, gradient, accumulator, squares)
        if gradient.dense is None:
            following = build.op("Gather", following, gradient.unique_ids, axis=0)
        divisor = build.op("Add", build.op("Sqrt", following), updates.scalar(self.epsilon, parameter))
        scaled = build.op("Mul", updates.learning_rate(self.lr, parameter), gradient.values)
        _subtract(updates, gradient, build.op("Div", scaled, divisor))


OPTIMIZERS: Mapping[str, type[SGD] | type[Momentum] | type[Adagrad]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adagrad": Adagrad,
}


def _accumulate(
    updates: Updates, slot: str, gradient: ReadyGradient, old: str, values: str | None = None
) -> str:
    """Let a slot's next value be `old` plus the gradient, or plus `values` laid out like it."""
    added = values or gradient.values
    if gradient.dense is not None:
        return updates.finish(slot, "Add", old, added)
    return updates.add_rows(slot, gradient, added, into=old)


def _subtract(updates: Updates, gradient: ReadyGradient, change: str, into: str = "") -> None:
    """Let the parameter's next value be `into` (else itself) minus a change laid out like the gradient."""
    if gradient.dense is not None:
        updates.finish(gradient.parameter, "Sub", into or gradient.parameter, change)
    else:
        updates.add_rows(gradient.parameter, gradient, updates.build.op("Neg", change), into)


def learning_rate_input() -> onnx.ValueInfoProto:
    """Return the data input that feeds the learning rate."""
    return onnx.helper.make_tensor_value_info(LEARNING_RATE, TensorProto.FLOAT, [])
