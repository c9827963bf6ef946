"""One parameter's update, written once for dense gradients, sparse ones, and sparse ones made lazily.

    gradient   lazy   tensors of the update     values like the gradient   what is written
    dense      -      whole                     whole                      whole
    sparse     no     whole                     rows at distinct ids       whole, or rows added
    sparse     yes    rows at distinct ids      rows at distinct ids       rows added

Without `lazy` a sparse update equals the dense one: rows that were not read decay as they would with a
gradient of zero. With it they stay as they are, as in torch.optim.SparseAdam.
"""

from dataclasses import dataclass, replace

import numpy as np

from partc.compiler.differentiation.updates.update_builder import LearningRate, ReadyGradient, Updates


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """The gradient of one parameter, and the arithmetic on what belongs to it."""

    updates: Updates
    gradient: ReadyGradient
    lazy: bool = False

    @property
    def parameter(self) -> str:
        """Return the parameter's name."""
        return self.gradient.parameter

    @property
    def _is_scattered(self) -> bool:
        """Tell whether the gradient is rows but the update's tensors are whole."""
        return self.gradient.dense is None and not self.lazy

    @property
    def is_on_rows(self) -> bool:
        """Tell whether the update's tensors are rows, too."""
        return self.gradient.dense is None and self.lazy

    # ------------------------------------------------------------ values

    def op(self, op_type: str, *inputs: str | float) -> str:
        """Emit an operation; numbers are constants of the parameter's element type."""
        names = [value if isinstance(value, str) else self.number(value) for value in inputs]
        return self.updates.build.op(op_type, *names)

    def number(self, value: float) -> str:
        """Return a constant of the parameter's element type."""
        return self.updates.scalar(value, self.parameter)

    def rate(self, rate: LearningRate) -> str:
        """Return the learning rate in the parameter's element type."""
        return self.updates.learning_rate(rate, self.parameter)

    def bias_correction(self, decay: float) -> str:
        """Return 1 - decay ** t for update number t; the power is taken in double."""
        build = self.updates.build
        base, one = (build.constant(_double(value)) for value in (decay, 1.0))
        correction = build.op("Sub", one, build.op("Pow", base, self.updates.step_number()))
        return self.updates.cast(correction, self.parameter)

    def read(self, variable: str) -> str:
        """Return the old value of the parameter or of a slot of its shape: whole, or the rows to update."""
        if self.is_on_rows:
            return self.updates.build.op("Gather", variable, self.gradient.unique_ids, axis=0)
        return variable

    def at_gradient(self, tensor: str) -> str:
        """Return the part of a tensor of the update that lies where the gradient has values."""
        if self._is_scattered:
            return self.updates.build.op("Gather", tensor, self.gradient.unique_ids, axis=0)
        return tensor

    def norm(self, tensor: str) -> str:
        """Return the root of the sum of squares, a scalar."""
        squares = self.updates.build.op("Mul", tensor, tensor)
        return self.op("Sqrt", self.updates.build.op("ReduceSum", squares, keepdims=0))

    def sum(self, tensor: str, axis: int) -> str:
        """Return the sums along an axis, counted from the front, which stays with size 1.

        onnxruntime 1.31 does not reduce a tensor without rows along a negative axis.
        """
        assert axis >= 0
        return self.updates.build.op("ReduceSum", tensor, self.updates.build.ints(axis), keepdims=1)

    # ------------------------------------------------------------ decay

    def with_decay(self, weight_decay: float, decoupled: bool = False) -> "ParameterUpdate":
        """Add weight_decay * parameter to the gradient, unless the decay is decoupled."""
        if not weight_decay or decoupled:
            return self
        decay = self.op("Mul", weight_decay, self.read(self.parameter))
        if not self._is_scattered:
            values = self.op("Add", decay, self.gradient.values)
            return replace(self, gradient=self.gradient.with_values(values))
        dense = self.updates.build.op(
            "ScatterND", decay, self.updates.positions(self.gradient), self.gradient.values, reduction="add"
        )
        return replace(self, gradient=ReadyGradient(self.parameter, dense=dense))

    def shrunk(self, rate: LearningRate, weight_decay: float) -> str:
        """Return the old parameter times 1 - rate * weight_decay: decoupled decay."""
        old = self.read(self.parameter)
        if not weight_decay:
            return old
        factor = self.op("Sub", 1.0, self.op("Mul", self.rate(rate), weight_decay))
        return self.op("Mul", old, factor)

    # ------------------------------------------------------------ next values

    def renew(self, slot: str, keep: str | float, values: str) -> str:
        """Let a slot's next value be keep * slot + values, these laid out like the gradient; return it."""
        old = self.read(slot)
        old_part = self.op("Mul", keep, old)
        if self._is_scattered:
            return self.updates.add_rows(slot, self.gradient, values, into=old_part)
        return self.write(slot, old, "Add", old_part, values)

    def add(self, slot: str, values: str) -> str:
        """Let a slot's next value be itself plus values laid out like the gradient; return it."""
        if self._is_scattered:
            return self.updates.add_rows(slot, self.gradient, values)
        old = self.read(slot)
        return self.write(slot, old, "Add", old, values)

    def average(self, slot: str, decay: float, values: str) -> str:
        """Let a slot's next value be decay * slot + (1 - decay) * values; return it."""
        return self.renew(slot, decay, self.op("Mul", 1.0 - decay, values))

    def subtract(self, change: str, old: str = "") -> None:
        """Let the parameter's next value be `old` (else itself) minus a change laid out like the update."""
        if not self.is_on_rows:
            self.updates.finish(self.parameter, "Sub", old or self.parameter, change)
        elif not old or old == self.read(self.parameter):
            self.updates.add_rows(self.parameter, self.gradient, self.op("Neg", change))
        else:
            self.write(self.parameter, self.read(self.parameter), "Sub", old, change)

    def subtract_at_gradient(self, change: str, old: str = "") -> None:
        """Let the parameter's next value be `old` (else itself) minus a change laid out like the gradient."""
        if self._is_scattered:
            self.updates.add_rows(self.parameter, self.gradient, self.op("Neg", change), into=old)
        else:
            self.subtract(change, old)

    def write(self, variable: str, old: str, op_type: str, *inputs: str) -> str:
        """Let an operation laid out like the update make a variable's next value; return the result.

        `old` is what `read` returned.
        """
        if not self.is_on_rows:
            return self.updates.finish(variable, op_type, *inputs)
        new = self.op(op_type, *inputs)
        self.updates.add_rows(variable, self.gradient, self.op("Sub", new, old))
        return new


def _double(value: float) -> np.ndarray:
    return np.array(value, np.float64)
