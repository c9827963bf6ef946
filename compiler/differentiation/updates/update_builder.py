"""What all updates of a step share: nodes, new variables, next values, the rate, the step counter.

W_next = W - change                    a step that counts always
W_next = Where(applies, W - change, W) one that may not: accumulating, or a gradient that overflowed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from partc.compiler.differentiation.forward.initial_values import InitialValue
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.tensor_types import Size, TensorType, Types
from partc.runtime.plan.variables import Constant

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

    def with_values(self, values: str) -> "ReadyGradient":
        """Return the gradient with other values at the same places."""
        if self.dense is None:
            return ReadyGradient(self.parameter, unique_ids=self.unique_ids, sums=values)
        return ReadyGradient(self.parameter, dense=values)


@dataclass(frozen=True, slots=True)
class Slot:
    """A variable that the update keeps, every element `initial` at first."""

    name: str
    type_: TensorType
    initial: float

    @property
    def initial_value(self) -> InitialValue:
        """Return how the first value is made; a scalar's is stored."""
        if self.type_.shape == ():
            return numpy_helper.from_array(np.array(self.initial, self.type_.dtype), self.name)
        return Constant(self.initial)


@dataclass
class Updates:
    """The updates of all parameters: nodes, new variables and the variables' next values."""

    build: NodeBuilder
    types: Types
    next_values: dict[str, str] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    feeds_learning_rate: bool = False
    rate_factor: str = ""  # double scalar that multiplies every learning rate; empty: 1
    applies: str = ""  # bool scalar, whether this step's update counts; empty: always
    _steps: str = ""  # the variable that counts the updates made

    # ------------------------------------------------------------ scalars

    def scalar(self, value: float, parameter: str) -> str:
        """Return a constant of the parameter's element type."""
        return self.build.constant(np.array(value, self.types[parameter].dtype))

    def cast(self, scalar: str, parameter: str) -> str:
        """Return a double scalar in the parameter's element type."""
        element = self.types[parameter].element
        return scalar if element == TensorProto.DOUBLE else self.build.op("Cast", scalar, to=element)

    def learning_rate(self, rate: LearningRate, parameter: str) -> str:
        """Return the learning rate in the parameter's element type."""
        if rate != "fed":
            return self._scheduled_rate(rate, parameter)
        self.feeds_learning_rate = True
        if self.types[parameter].element == TensorProto.FLOAT:
            return LEARNING_RATE
        return self.build.op("Cast", LEARNING_RATE, to=self.types[parameter].element)

    def _scheduled_rate(self, rate: float, parameter: str) -> str:
        if not self.rate_factor:
            return self.scalar(rate, parameter)
        base = self.build.constant(np.array(rate, np.float64))
        return self.cast(self.build.op("Mul", base, self.rate_factor), parameter)

    def steps_done(self) -> str:
        """Return the number of updates made before this step, int64 scalar."""
        if not self._steps:
            self._steps = self.variable("step_count", TensorProto.INT64, (), 0)
            self.finish(self._steps, "Add", self._steps, self.build.constant(np.array(1, np.int64)))
        return self._steps

    def step_number(self) -> str:
        """Return the number of this step's update, from 1 on, as a double scalar."""
        one = self.build.constant(np.array(1, np.int64))
        return self.build.op("Cast", self.build.op("Add", self.steps_done(), one), to=TensorProto.DOUBLE)

    # ------------------------------------------------------------ variables

    def slot(self, parameter: str, suffix: str, initial: float, shape: Sequence[Size] | None = None) -> str:
        """Create a slot of the parameter, shaped like it unless told, and return its name."""
        type_ = self.types[parameter]
        own = type_.shape if shape is None else tuple(shape)
        return self._create(f"{parameter}.{suffix}", TensorType(type_.element, own), initial)

    def variable(self, name: str, element: int, shape: Sequence[Size], initial: float) -> str:
        """Create a variable of no one parameter and return its name."""
        return self._create(name, TensorType(element, tuple(shape)), initial)

    def _create(self, hint: str, type_: TensorType, initial: float) -> str:
        name = self.build.fresh(hint)
        self.slots.append(Slot(name, type_, initial))
        return name

    def finish(self, variable: str, op_type: str, *inputs: str, **attributes: str) -> str:
        """Emit the operation that makes a variable's next value, and return the value's name.

        Where the step does not count, the next value is the old one.
        """
        if not self.applies:
            return self.set_next(variable, op_type, *inputs, **attributes)
        result = self.build.op(op_type, *inputs, **attributes)
        return self.set_next(variable, "Where", self.applies, result, variable)

    def set_next(self, variable: str, op_type: str, *inputs: str, **attributes: str) -> str:
        """Emit the operation that makes a variable's next value, whether the step counts or not."""
        name = self.build.fresh(f"{variable}_next")
        self.build.call(op_type, inputs, (name,), **attributes)
        self.next_values[variable] = name
        return name

    def add_rows(self, variable: str, gradient: ReadyGradient, rows: str, into: str = "") -> str:
        """Let a variable's next value be `into` (else itself) with rows added at the gradient's ids."""
        positions = self.positions(gradient)
        if into and into != variable:
            return self.finish(variable, "ScatterND", into, positions, rows, reduction="add")
        if self.applies:  # a row of zeros changes nothing: no pass over the whole table
            rows = self.build.op("Where", self.applies, rows, self.scalar(0.0, gradient.parameter))
        return self.set_next(variable, "ScatterND", variable, positions, rows, reduction="add")

    def positions(self, gradient: ReadyGradient) -> str:
        """Return the gradient's ids as ScatterND wants them, int64[u, 1]."""
        return self.build.op("Unsqueeze", gradient.unique_ids, self.build.ints(-1))


def learning_rate_input() -> onnx.ValueInfoProto:
    """Return the data input that feeds the learning rate."""
    return onnx.helper.make_tensor_value_info(LEARNING_RATE, TensorProto.FLOAT, [])
