"""RMSProp: the gradient over the root of a running mean of its square.

    v' = alpha v + (1 - alpha) g^2        d = sqrt(v') + epsilon      centered: d = sqrt(v' - a'^2) + epsilon
    W' = W - lr g / d                     momentum: u' = momentum u + g / d, W' = W - lr u'

a is the running mean of g. Sources: Tieleman and Hinton, Coursera lecture 6.5 (2012); centered: Graves,
arXiv 1308.0850; torch.optim.RMSprop.
"""

from dataclasses import dataclass

from partc.compiler.training.updates.check_settings import FRACTION, NOT_NEGATIVE, check_optimizer
from partc.compiler.training.updates.parameter_update import ParameterUpdate
from partc.compiler.training.updates.update_builder import LearningRate, ReadyGradient, Updates


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
