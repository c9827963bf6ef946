"""What happens to gradients besides the optimizer's own step, as one typed choice.

Groups of parameters with settings of their own, chosen by patterns on their names.

The first group whose patterns match a parameter sets its learning rate and weight decay, as PyTorch's
`params` dictionaries do; parameters of no group keep the optimizer's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from partc.compiler.differentiation.parameters.choose_parameters import pattern_of
from partc.compiler.differentiation.updates.check_settings import COUNT, FRACTION, NOT_NEGATIVE, check_setting
from partc.compiler.differentiation.updates.clipping import Clipping
from partc.compiler.differentiation.updates.loss_scaling import LossScale
from partc.compiler.differentiation.updates.optimizers import Optimizer
from partc.compiler.differentiation.updates.schedules import LearningRateSchedule, Warmup
from partc.compiler.differentiation.updates.update_builder import LearningRate
from partc.runtime.errors import BadUsage, some_of


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters whose name fits one of the patterns (`*`, `?`, `[a-z]`); None: the optimizer's setting.

    With a rate of 0 they stay variables and keep their values, whatever the weight decay. Raises BadUsage.
    """

    patterns: tuple[str, ...]
    lr: LearningRate | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        at = f"--group {','.join(self.patterns)}"
        for value in (self.lr, self.weight_decay):
            if value is not None and value != "fed":
                check_setting(at, value, NOT_NEGATIVE)

    def fits(self, parameter: str) -> bool:
        """Tell whether a parameter is in the group, if no earlier group has it."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.patterns)

    def apply_to(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer with the group's settings."""
        settings = {"lr": self.lr, "weight_decay": self.weight_decay}
        values = {name: value for name, value in settings.items() if value is not None}
        return replace(optimizer, **values)  # type: ignore[type-var]  # every optimizer is a dataclass


def optimizers_of(
    parameters: Iterable[str], optimizer: Optimizer, groups: Sequence[ParameterGroup]
) -> dict[str, Optimizer]:
    """Return each parameter's optimizer. Raises BadUsage for a group without parameters of its own."""
    names = list(parameters)
    for group in groups:
        fitting = [name for name in names if group.fits(name)]
        if not fitting:
            raise BadUsage(
                f"no parameter's name fits {','.join(group.patterns)!r}",
                at="--no-decay or --group",
                fix=f"use patterns for some of {some_of(sorted(map(pattern_of, names)))}",
            )
        before = groups[: groups.index(group)]
        if all(any(earlier.fits(name) for earlier in before) for name in fitting):
            raise BadUsage(
                f"all parameters that fit {','.join(group.patterns)!r} are in groups before it, which count",
                at="--no-decay or --group",
                fix="say all of a parameter in one --group, and the narrower of two groups first",
            )
    group_optimizers = [group.apply_to(optimizer) for group in groups]
    optimizer_of = {}
    for name in names:
        matching = (own for group, own in zip(groups, group_optimizers, strict=True) if group.fits(name))
        optimizer_of[name] = next(matching, optimizer)
    return optimizer_of


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How updates are made.

    accumulate   micro-batches whose gradients are averaged before an update counts
    ema          decay of the parameters' moving averages, variables `<parameter>.average`
    loss_scale   also keeps 16-bit parameters as float32 variables
    """

    clipping: Clipping = Clipping()  # noqa: RUF009  # frozen
    schedule: LearningRateSchedule | None = None
    warmup: Warmup | None = None
    groups: tuple[ParameterGroup, ...] = ()
    accumulate: int = 1
    ema: float | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        check_setting("--accumulate", self.accumulate, COUNT)
        if self.ema is not None:
            check_setting("--ema", self.ema, FRACTION)
