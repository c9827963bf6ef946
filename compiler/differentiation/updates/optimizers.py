"""Optimizers, as nodes: from a gradient to the next values of its parameter and slots.

    SGD        W' = W - lr g
    Momentum   v' = m v + g              W' = W - lr v'           (Polyak; Nesterov: W - lr (g + m v'))
    Adagrad    a' = a + g^2              W' = W - lr g / (sqrt(a') + epsilon)
    RMSProp, Adam, AdamW, LAMB, Adafactor: a file each in compiler/differentiation/updates

Weight decay adds weight_decay W to g; where it is decoupled, W shrinks by lr weight_decay instead. An
indexed-slices gradient is summed per id first. SGD, Adagrad, Adafactor and RMSProp then write only the rows
that were read; what decays every row (momentum, Adam, weight decay) writes them all, unless it is lazy.
To add an optimizer: a frozen dataclass with `step`, and its name in OPTIMIZERS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from partc.compiler.differentiation.updates.adafactor import Adafactor
from partc.compiler.differentiation.updates.adam import LAMB, Adam, AdamW, RMSProp
from partc.compiler.differentiation.updates.check_settings import NOT_NEGATIVE, check_optimizer
from partc.compiler.differentiation.updates.parameter_update import ParameterUpdate
from partc.compiler.differentiation.updates.update_builder import LearningRate, ReadyGradient, Updates
from partc.runtime.check_arguments import public_record


class Optimizer(Protocol):
    """Emits one parameter's update."""

    @property
    def lr(self) -> LearningRate:
        """The learning rate, before any schedule."""

    @property
    def weight_decay(self) -> float:
        """How strongly parameters are drawn to zero."""

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its slots their next values."""


@public_record
@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent, as torch.optim.SGD."""

    lr: LearningRate = 0.01
    weight_decay: float = 0.0
    decoupled: bool = False
    lazy: bool = False  # weight decay of the rows that were read alone

    def __post_init__(self) -> None:
        check_optimizer(self)

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter its next value."""
        update = ParameterUpdate(updates, gradient, self.lazy).with_decay(self.weight_decay, self.decoupled)
        change = update.op("Mul", update.rate(self.lr), update.gradient.values)
        old = update.shrunk(self.lr, self.weight_decay) if self.decoupled else ""
        update.subtract_at_gradient(change, old)


@public_record
@dataclass(frozen=True, slots=True)
class Momentum:
    """SGD with a decaying sum of gradients, as torch.optim.SGD without dampening.

    Source: Sutskever et al., ICML 2013, in PyTorch's form.
    """

    lr: LearningRate = 0.01
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled: bool = False
    lazy: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self, momentum=NOT_NEGATIVE)

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its velocity their next values."""
        update = ParameterUpdate(updates, gradient, self.lazy).with_decay(self.weight_decay, self.decoupled)
        rate = update.rate(self.lr)
        velocity = updates.slot(gradient.parameter, "momentum", 0.0)
        following = update.renew(velocity, self.momentum, update.gradient.values)
        old = update.shrunk(self.lr, self.weight_decay if self.decoupled else 0.0)
        if not self.nesterov:
            update.subtract(update.op("Mul", rate, following), old)
            return
        ahead = update.op("Mul", rate, update.op("Mul", self.momentum, following))
        change = update.op("Mul", rate, update.gradient.values)
        update.subtract_at_gradient(change, update.op("Sub", old, ahead))


@public_record
@dataclass(frozen=True, slots=True)
class Adagrad:
    """Steps that shrink with the gradients seen, as torch.optim.Adagrad but for the first accumulator.

    Source: Duchi et al., JMLR 12 (2011). PyTorch's accumulator begins at 0, TensorFlow's and this at 0.1.
    """

    lr: LearningRate = 0.1
    initial_accumulator: float = 0.1
    epsilon: float = 1e-10
    weight_decay: float = 0.0
    lr_decay: float = 0.0

    def __post_init__(self) -> None:
        check_optimizer(self, initial_accumulator=NOT_NEGATIVE, epsilon=NOT_NEGATIVE, lr_decay=NOT_NEGATIVE)

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its accumulator their next values."""
        update = ParameterUpdate(updates, gradient).with_decay(self.weight_decay)
        values, parameter = update.gradient.values, gradient.parameter
        accumulator = updates.slot(parameter, "accumulator", self.initial_accumulator)
        squares = update.op("Mul", values, values)
        following = update.at_gradient(update.add(accumulator, squares))
        divisor = update.op("Add", update.op("Sqrt", following), self.epsilon)
        scaled = update.op("Mul", self._rate(update), values)
        update.subtract_at_gradient(update.op("Div", scaled, divisor))

    def _rate(self, update: ParameterUpdate) -> str:
        rate = update.rate(self.lr)
        if not self.lr_decay:
            return rate
        updates_done = update.op(
            "Sub", update.updates.cast(update.updates.step_number(), update.parameter), 1.0
        )
        return update.op("Div", rate, update.op("Add", 1.0, update.op("Mul", updates_done, self.lr_decay)))


OPTIMIZERS: Mapping[str, Optimizer] = {  # with the settings that they have unless told
    "sgd": SGD(),
    "momentum": Momentum(),
    "nesterov": Momentum(nesterov=True),
    "adagrad": Adagrad(),
    "rmsprop": RMSProp(),
    "adam": Adam(),
    "adamw": AdamW(),
    "lamb": LAMB(),
    "adafactor": Adafactor(),
}
