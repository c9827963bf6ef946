"""Refuse settings of optimizers, schedules and the like that mean nothing."""

import sys
from math import inf
from typing import Literal

import numpy as np

from partc.runtime.errors import BadUsage

Requirement = Literal[
    "a positive number",
    "a number of at least 0",
    "a number from 0 to below 1",
    "a number between 0 and 1",
    "a number above 1",
    "a whole number of at least 1 that 64 bits hold",
]
POSITIVE: Requirement = "a positive number"
NOT_NEGATIVE: Requirement = "a number of at least 0"
FRACTION: Requirement = "a number from 0 to below 1"
BETWEEN_0_AND_1: Requirement = "a number between 0 and 1"
ABOVE_1: Requirement = "a number above 1"
COUNT: Requirement = "a whole number of at least 1 that 64 bits hold"
# Lowest and highest value, and whether the lowest is allowed.
_RANGES: dict[Requirement, tuple[float, float, bool]] = {
    POSITIVE: (0.0, inf, False),
    NOT_NEGATIVE: (0.0, inf, True),
    FRACTION: (0.0, 1.0, True),
    BETWEEN_0_AND_1: (0.0, 1.0, False),
    ABOVE_1: (1.0, inf, False),
    COUNT: (1, 2**63, True),
}


def check_setting(at: str, value: object, requirement: Requirement) -> None:
    """Raise BadUsage unless the value is what is wanted, as a float32, too, which steps compute with."""
    kinds = (int,) if "whole" in requirement else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not _is_within(value, requirement):  # type: ignore[arg-type]
        raise BadUsage(f"{value!r} is not {requirement}", at=at, fix=f"give {requirement}")
    if "whole" in requirement:
        return
    rounded = as_float32(value)  # type: ignore[arg-type]
    if not _is_within(rounded, requirement) or (rounded == 0) != (value == 0):
        raise BadUsage(
            f"{value!r} is {rounded:g} as a float32, which steps compute with",
            at=at,
            fix=f"give {_limits(requirement)}",
        )


def as_float32(value: float) -> float:
    """Return the nearest number that a float32 holds, or an infinity."""
    with np.errstate(over="ignore"):
        return float(np.float32(min(value, sys.float_info.max)))


def _is_within(value: float, requirement: Requirement) -> bool:
    low, high, is_low_allowed = _RANGES[requirement]
    return low < value < high or (is_low_allowed and value == low)


def _limits(requirement: Requirement) -> str:
    """Name the first and the last float32 of a range."""
    low, high, is_low_allowed = _RANGES[requirement]
    first = np.nextafter(np.float32(low), np.float32(inf))
    last = np.nextafter(np.float32(high), np.float32(0))
    return f"a number from {first:.9g} to {last:.9g}{', or 0' if is_low_allowed else ''}"


def check_optimizer(optimizer: object, **requirements: Requirement) -> None:
    """Raise BadUsage unless the optimizer's settings, rate and weight decay mean something."""
    name = type(optimizer).__name__
    rate = getattr(optimizer, "lr")  # noqa: B009  # every optimizer has one
    if not (isinstance(rate, str) and rate == "fed"):
        check_setting(f"optimizer {name}, lr", rate, NOT_NEGATIVE)
    for setting, phrase in {**requirements, "weight_decay": NOT_NEGATIVE}.items():
        check_setting(f"optimizer {name}, {setting}", getattr(optimizer, setting), phrase)
