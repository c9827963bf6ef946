"""Adam and its kin: steps from running means of the gradient and of its square.

    m' = b1 m + (1 - b1) g              v' = b2 v + (1 - b2) g^2             t: updates made, this one too
    W' = W - lr / (1 - b1^t) * m' / (sqrt(v') / sqrt(1 - b2^t) + epsilon)

    Adam    g gains weight_decay W        AdamW   W shrinks by lr weight_decay before the step
    lazy    rows that were not read keep m, v and W: torch.optim.SparseAdam, which adds epsilon to
            sqrt(v') rather than to its corrected value

Sources: Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR 2019; torch.optim.Adam, AdamW, SparseAdam.

LAMB: Adam's step, as long as the parameter's own norm says.

    r  = m'/(1 - b1^t) / (sqrt(v'/(1 - b2^t)) + epsilon) + weight_decay W
    W' = W - lr |W| / |r| r               the ratio is 1 where either norm is 0

Source: You et al., ICLR 2020, algorithm 2, phi the identity. PyTorch has no LAMB.

RMSProp: the gradient over the root of a running mean of its square.

    v' = alpha v + (1 - alpha) g^2        d = sqrt(v') + epsilon      centered: d = sqrt(v' - a'^2) + epsilon
    W' = W - lr g / d                     momentum: u' = momentum u + g / d, W' = W - lr u'

a is the running mean of g. Sources: Tieleman and Hinton, Coursera lecture 6.5 (2012); centered: Graves,
arXiv 1308.0850; torch.optim.RMSprop.
"""

from dataclasses import dataclass
from typing import Protocol

from partc.compiler.differentiation.updates.check_settings import FRACTION, NOT_NEGATIVE, check_optimizer
from partc.compiler.differentiation.updates.parameter_update import ParameterUpdate
from partc.compiler.differentiation.updates.update_builder import LearningRate, ReadyGradient, Updates


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam, with torch.optim.Adam's arithmetic; lazy: torch.optim.SparseAdam's."""

    lr: LearningRate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    lazy: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self, beta1=FRACTION, beta2=FRACTION, epsilon=NOT_NEGATIVE)

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its two running means their next values."""
        update = ParameterUpdate(updates, gradient, self.lazy)
        update = update.with_decay(self.weight_decay, self.decoupled)
        # Before the direction: ONNX Runtime computes the later of two operands first, the bigger one here.
        old = update.shrunk(self.lr, self.weight_decay if self.decoupled else 0.0)
        scale, direction = corrected_direction(update, self, corrects_epsilon=not update.is_on_rows)
        rate = update.op("Mul", update.rate(self.lr), scale)
        change = update.op("Mul", rate, direction)
        update.subtract(change, old)


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW."""

    weight_decay: float = 0.01
    decoupled: bool = True


class Moments(Protocol):
    """The settings of running means."""

    @property
    def beta1(self) -> float:
        """How much of the mean stays."""

    @property
    def beta2(self) -> float:
        """How much of the mean of squares stays."""

    @property
    def epsilon(self) -> float:
        """What keeps the divisor from 0."""


def corrected_direction(
    update: ParameterUpdate, settings: Moments, corrects_epsilon: bool = True
) -> tuple[str, str]:
    """Create and renew the running means; return a scalar and a tensor whose product is Adam's direction.

        m' / c1 / (sqrt(v') / c2 + epsilon) = c2 / c1 * m' / (sqrt(v') + c2 epsilon)

    c1 = 1 - b1^t, c2 = sqrt(1 - b2^t): the right side reads and writes the big tensors less often.
    """
    updates, values = update.updates, update.gradient.values
    mean = updates.slot(update.parameter, "mean", 0.0)
    square = updates.slot(update.parameter, "square", 0.0)
    mean = update.average(mean, settings.beta1, values)
    square = update.average(square, settings.beta2, update.op("Mul", values, values))
    correction = update.op("Sqrt", update.bias_correction(settings.beta2))
    epsilon = update.number(settings.epsilon)
    if corrects_epsilon:
        epsilon = update.op("Mul", correction, epsilon)
    scale = update.op("Div", correction, update.bias_correction(settings.beta1))
    return scale, update.op("Div", mean, update.op("Add", update.op("Sqrt", square), epsilon))


@dataclass(frozen=True, slots=True)
class LAMB:
    """Layer-wise adaptive moments. A norm reaches over all of a parameter, so there is no lazy form."""

    lr: LearningRate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_optimizer(self, beta1=FRACTION, beta2=FRACTION, epsilon=NOT_NEGATIVE)

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its two running means their next values."""
        update = ParameterUpdate(updates, gradient)
        direction = update.op("Mul", *corrected_direction(update, self))
        if self.weight_decay:
            decay = update.op("Mul", self.weight_decay, gradient.parameter)
            direction = update.op("Add", direction, decay)
        rate = update.op("Mul", update.rate(self.lr), _trust_ratio(update, direction))
        update.subtract(update.op("Mul", rate, direction))


def _trust_ratio(update: ParameterUpdate, direction: str) -> str:
    length, own = update.norm(direction), update.norm(update.parameter)
    is_known = update.op("Greater", update.op("Min", length, own), 0.0)
    ratio = update.op("Div", own, update.op("Where", is_known, length, 1.0))
    return update.op("Where", is_known, ratio, 1.0)


@dataclass(frozen=True, slots=True)
class RMSProp:
    """RMSProp, with torch.optim.RMSprop's arithmetic."""

    lr: LearningRate = 0.01
    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0
    lazy: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self, alpha=FRACTION, epsilon=NOT_NEGATIVE, momentum=NOT_NEGATIVE)

    def step(self, updates: Updates, gradient: ReadyGradient) -> None:
        """Give the parameter and its slots their next values."""
        update = ParameterUpdate(updates, gradient, self.lazy).with_decay(self.weight_decay)
        scaled = update.op("Div", update.gradient.values, self._divisor(update))
        rate = update.rate(self.lr)
        if not self.momentum:
            update.subtract_at_gradient(update.op("Mul", rate, scaled))
            return
        buffer = updates.slot(gradient.parameter, "momentum", 0.0)
        update.subtract(update.op("Mul", rate, update.renew(buffer, self.momentum, scaled)))

    def _divisor(self, update: ParameterUpdate) -> str:
        """Return sqrt(v') + epsilon where there is a gradient."""
        updates, values = update.updates, update.gradient.values
        square = updates.slot(update.parameter, "square", 0.0)
        squares = update.op("Mul", values, values)
        spread = update.at_gradient(update.average(square, self.alpha, squares))
        if self.centered:
            mean = updates.slot(update.parameter, "mean", 0.0)
            following = update.at_gradient(update.average(mean, self.alpha, values))
            spread = update.op("Sub", spread, update.op("Mul", following, following))
        return update.op("Add", update.op("Sqrt", spread), self.epsilon)
