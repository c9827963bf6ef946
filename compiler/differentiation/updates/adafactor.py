"""Adafactor: Adam's second moment kept as one row and one column of means, steps relative to the parameter.

    b  = t ** -decay           the share of the new gradient in the means, t from 1 on
    R' = (1 - b) R + b mean of g^2 over columns         float[..., rows, 1]
    C' = (1 - b) C + b mean of g^2 over rows            float[..., 1, columns]
    v  = R' C' / max(mean of R' over rows, epsilon1)    vectors: v' = (1 - b) v + b g^2
    u  = g / sqrt(max(v, epsilon1^2))
    W' = W (1 - lr weight_decay) - max(epsilon2, rms W) min(lr, 1 / sqrt t) / max(1, rms(u) / d) u

rms x = sqrt(mean of x^2). A row without a gradient has u = 0, so a sparse gradient changes only the rows
that were read (and R, which decays). Means are sums over a constant count, so that servers, which own some
rows, can add theirs up.

Source: Shazeer and Stern, ICML 2018; torch.optim.Adafactor, whose epsilon1 is that of float32 and whose
default here is that number too.
"""

from dataclasses import dataclass
from math import prod, sqrt

import numpy as np

from partc.compiler.differentiation.tensor_types import static_shape
from partc.compiler.differentiation.updates.check_settings import NOT_NEGATIVE, POSITIVE, check_optimizer
from partc.compiler.differentiation.updates.parameter_update import ParameterUpdate
from partc.compiler.differentiation.updates.update_builder import LearningRate, ReadyGradient, Updates


@dataclass(frozen=True, slots=True)
class Adafactor:
    """Adafactor, with torch.optim.Adafactor's arithmetic."""

    lr: LearningRate = 0.01
    decay: float = 0.8  # PyTorch's beta2_decay, without its minus
    epsilon1: float = float(np.finfo(np.float32).eps)
    epsilon2: float = 1e-3
    d: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_optimizer(self, decay=NOT_NEGATIVE, epsilon1=NOT_NEGATIVE, epsilon2=NOT_NEGATIVE, d=POSITIVE)

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its means of squares their next values."""
        update = ParameterUpdate(updates, gradient)
        shape = static_shape(updates.types, gradient.parameter, needed_by="Adafactor")
        variance = self._factored_moment(update, shape) if len(shape) > 1 else self._whole(update)
        root = update.op("Sqrt", update.op("Max", variance, self.epsilon1**2))
        direction = update.op("Div", gradient.values, root)
        length = update.op("Div", update.norm(direction), sqrt(prod(shape)) * self.d)
        rate = update.op("Div", self._step_size(update, shape), update.op("Max", length, 1.0))
        decayed = update.shrunk(self.lr, self.weight_decay)
        update.subtract_at_gradient(update.op("Mul", rate, direction), decayed)

    def _new_share(self, update: ParameterUpdate) -> str:
        power = update.updates.build.constant(np.array(-self.decay, np.float64))
        share = update.updates.build.op("Pow", update.updates.step_number(), power)
        return update.updates.cast(share, update.parameter)

    def _step_size(self, update: ParameterUpdate, shape: tuple[int, ...]) -> str:
        step = update.updates.cast(update.updates.step_number(), update.parameter)
        relative = update.op("Min", update.rate(self.lr), update.op("Div", 1.0, update.op("Sqrt", step)))
        size = update.op("Div", update.norm(update.parameter), sqrt(prod(shape)))
        return update.op("Mul", update.op("Max", size, self.epsilon2), relative)

    def _whole(self, update: ParameterUpdate) -> str:
        """Return the running mean of a vector's squared gradient, where it has a gradient."""
        share, values = self._new_share(update), update.gradient.values
        slot = update.updates.slot(update.parameter, "square", 0.0)
        new = update.op("Mul", share, update.op("Mul", values, values))
        return update.at_gradient(update.renew(slot, update.op("Sub", 1.0, share), new))

    def _factored_moment(self, update: ParameterUpdate, shape: tuple[int, ...]) -> str:
        """Return the product of the running row and column means, where there is a gradient."""
        *lead, rows, columns = shape
        last = len(lead) + 1
        share, values = self._new_share(update), update.gradient.values
        complement = update.op("Sub", 1.0, share)
        squares = update.op("Mul", values, values)
        row_slot = update.updates.slot(update.parameter, "row_means", 0.0, (*lead, rows, 1))
        column_slot = update.updates.slot(update.parameter, "column_means", 0.0, (*lead, 1, columns))
        of_rows = update.op("Mul", share, update.op("Div", update.sum(squares, last), columns))
        of_columns = update.op("Mul", share, update.op("Div", update.sum(squares, last - 1), rows))
        row_means = update.renew(row_slot, complement, of_rows)
        if lead:  # every entry of axis 0 has rows and columns of its own
            row_means = update.at_gradient(row_means)
            column_means = update.at_gradient(update.renew(column_slot, complement, of_columns))
        else:
            old = update.op("Mul", complement, column_slot)
            column_means = update.updates.finish(column_slot, "Add", old, of_columns)
        mean = update.op("Max", update.op("Div", update.sum(row_means, last - 1), rows), self.epsilon1)
        row_means = row_means if lead else update.at_gradient(row_means)
        return update.op("Mul", row_means, update.op("Div", column_means, mean))
