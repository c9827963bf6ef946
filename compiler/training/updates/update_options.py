"""What happens to gradients besides the optimizer's own step, as one typed choice."""

from dataclasses import dataclass

from partc.compiler.training.updates.check_settings import COUNT, FRACTION, check_setting
from partc.compiler.training.updates.clipping import Clipping
from partc.compiler.training.updates.loss_scaling import LossScale
from partc.compiler.training.updates.parameter_groups import ParameterGroup
from partc.compiler.training.updates.schedules import Schedule, Warmup


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How updates are made.

    accumulate   micro-batches whose gradients are averaged before an update counts
    ema          decay of the parameters' moving averages, variables `<parameter>.average`
    loss_scale   also keeps 16-bit parameters as float32 variables
    """

    clipping: Clipping = Clipping()  # noqa: RUF009  # frozen
    schedule: Schedule | None = None
    warmup: Warmup | None = None
    groups: tuple[ParameterGroup, ...] = ()
    accumulate: int = 1
    ema: float | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        check_setting("--accumulate", self.accumulate, COUNT)
        if self.ema is not None:
            check_setting("--ema", self.ema, FRACTION)
