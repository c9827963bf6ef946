"""LAMB: Adam's step, as long as the parameter's own norm says.

    r  = m'/(1 - b1^t) / (sqrt(v'/(1 - b2^t)) + epsilon) + weight_decay W
    W' = W - lr |W| / |r| r               the ratio is 1 where either norm is 0

Source: You et al., ICLR 2020, algorithm 2, phi the identity. PyTorch has no LAMB.
"""

from dataclasses import dataclass

from partc.compiler.training.updates.adam import corrected_direction
from partc.compiler.training.updates.check_settings import FRACTION, NOT_NEGATIVE, check_optimizer
from partc.compiler.training.updates.parameter_update import ParameterUpdate
from partc.compiler.training.updates.update_builder import LearningRate, ReadyGradient, Updates


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
