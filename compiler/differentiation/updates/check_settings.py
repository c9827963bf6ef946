"""Refuse settings of optimizers, schedules and the like that mean nothing."""

from math import inf
from typing import Literal

from partc.runtime.errors import BadUsage

Requirement = Literal[
    "a positive number",
    "a number of at least 0",
    "a number from 0 to below 1",
    "a number between 0 and 1",
    "a number above 1",
    "a whole number of at least 1",
]
POSITIVE: Requirement = "a positive number"
NOT_NEGATIVE: Requirement = "a number of at least 0"
FRACTION: Requirement = "a number from 0 to below 1"
BETWEEN_0_AND_1: Requirement = "a number between 0 and 1"
ABOVE_1: Requirement = "a number above 1"
COUNT: Requirement = "a whole number of at least 1"
# Lowest and highest value, and whether the lowest is allowed.
_RANGES: dict[Requirement, tuple[float, float, bool]] = {
    POSITIVE: (0.0, inf, False),
    NOT_NEGATIVE: (0.0, inf, True),
    FRACTION: (0.0, 1.0, True),
    BETWEEN_0_AND_1: (0.0, 1.0, False),
    ABOVE_1: (1.0, inf, False),
    COUNT: (1.0, inf, True),
}


def check_setting(at: str, value: object, requirement: Requirement) -> None:
    """Raise BadUsage unless the value is what is wanted."""
    low, high, is_low_allowed = _RANGES[requirement]
    kinds = (int,) if "whole" in requirement else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not (low < value < high or (is_low_allowed and value == low)):  # type: ignore[operator]
        raise BadUsage(f"{value!r} is not {requirement}", at=at, fix=f"give {requirement}")


def check_optimizer(optimizer: object, **requirements: Requirement) -> None:
    """Raise BadUsage unless the optimizer's settings, rate and weight decay mean something."""
    name = type(optimizer).__name__
    rate = getattr(optimizer, "lr")  # noqa: B009  # every optimizer has one
    if not (isinstance(rate, str) and rate == "fed"):
        check_setting(f"optimizer {name}, lr", rate, NOT_NEGATIVE)
    for setting, phrase in {**requirements, "weight_decay": NOT_NEGATIVE}.items():
        check_setting(f"optimizer {name}, {setting}", getattr(optimizer, setting), phrase)
