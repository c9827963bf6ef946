"""Compare what one step did to each variable with what the reference made of it, from the same values.

    |change - reference change| <= rtol max|reference change| + 2 eps |value| + deviation    of every element

rtol is that of the narrowest float type that the change passes through: a float32 variable of float16
gradients has float16's rounding in its change. eps is the variable's: each side rounds the stored value
once. The deviation is what rounding may make of the element (rounding.py); it is measured only if some
element is farther off without, and thoroughly only if one is even so. Integers must be equal.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from partc.compiler.verification.rounding import RoundingError
from partc.compiler.verification.sessions import Array, eps_of, is_float, least_of, max_abs, sizes, wide

VariableVerdict = Literal["equal", "differs", "did not change", "not finite", "other rows changed"]
Measure = Callable[[bool], RoundingError]  # what rounding may make of the step, thoroughly or not

STORED_ROUNDINGS = 2


@dataclass(frozen=True, slots=True)
class VariableCheck:
    """How far one variable's change in a step (from 1) is from the reference's."""

    name: str
    step: int
    max_change: float  # of the reference, in any step
    max_error: float  # of the element that comes nearest to what is allowed, or is farthest beyond
    limit: float  # of the same element
    verdict: VariableVerdict
    within_rounding: int = 0  # elements that only what rounding may make of them makes equal

    @property
    def share(self) -> float:
        """Return the error as a share of what is allowed."""
        if self.limit == 0.0:
            return 0.0 if self.max_error == 0.0 else float("inf")
        return self.max_error / self.limit


@dataclass(frozen=True, slots=True)
class LossCheck:
    """The loss of one step (from 1), and the reference's."""

    step: int
    loss: float
    reference: float
    limit: float

    @property
    def is_equal(self) -> bool:
        """Tell whether the losses agree: as numbers, or in being none."""
        difference = abs(self.loss - self.reference)
        return self.is_lost or bool(np.isfinite(difference) and difference <= self.limit)

    @property
    def is_lost(self) -> bool:
        """Tell whether neither is a finite number, and both are the same kind of none."""
        pair = (self.loss, self.reference)
        return np.array_equal(*pair, equal_nan=True) and not np.isfinite(self.loss)


@dataclass(frozen=True, slots=True)
class VariableStates:
    """A variable, or the rows of a table that a step touches: before the step, after it, as it should be."""

    start: Array
    end: Array
    reference: Array
    others_changed: int = 0  # rows of the table that the step does not touch, and that are not as before
    passed: np.dtype[Any] | None = None  # the narrowest float type on the change's way (reference.py)


def compare_changes(
    variables: Mapping[str, VariableStates], step: int, rtol: float | None, measure: Measure
) -> list[VariableCheck]:
    """Check every variable; `rtol` None means the default of its dtype.

    `measure` is called if something is farther off without, and then thoroughly if it still is.
    """
    checks = [_check(name, entry, step, rtol) for name, entry in variables.items()]
    for thoroughly in (False, True):
        if all(check.verdict == "equal" for check in checks):
            break
        deviations = measure(thoroughly).variables
        checks = [
            check
            if check.verdict == "equal" or check.name not in deviations
            else _check(check.name, variables[check.name], step, rtol, deviations[check.name])
            for check in checks
        ]
    return checks


def lost_variables(checks: Iterable[VariableCheck], variables: Mapping[str, VariableStates]) -> list[str]:
    """Return the variables that are not finite after the step, in the same elements on both sides."""
    lost = [check.name for check in checks if check.verdict == "not finite"]
    return [name for name in lost if _lost_alike(variables[name].end, variables[name].reference)]


def _lost_alike(one: Array, other: Array) -> bool:
    finite = np.isfinite(one)
    return not finite.all() and np.array_equal(finite, np.isfinite(other))


def worst_of_steps(checks: Iterable[VariableCheck]) -> tuple[VariableCheck, ...]:
    """Return one check per variable: the first that fails, else the one nearest to what is allowed.

    Its change is the largest of all steps, its excused elements those of all steps.
    """
    worst: dict[str, VariableCheck] = {}
    for check in checks:
        previous = worst.setdefault(check.name, check)
        if previous is check:
            continue
        within_rounding, change = (
            previous.within_rounding + check.within_rounding,
            max(previous.max_change, check.max_change),
        )
        is_worse = previous.verdict == "equal" and (check.verdict != "equal" or check.share > previous.share)
        worst[check.name] = replace(
            check if is_worse else previous, within_rounding=within_rounding, max_change=change
        )
    return tuple(worst.values())


def default_rtol(dtype: np.dtype[Any]) -> float:
    """Return the tolerance for a dtype: sums in another order differ by about eps."""
    return {"float64": 1e-9, "float32": 1e-4}.get(dtype.name, 1e-2)


def _tolerance(dtype: np.dtype[Any], passed: np.dtype[Any] | None, rtol: float | None) -> float:
    if rtol is not None:
        return rtol
    return default_rtol(dtype) if passed is None else max(default_rtol(dtype), default_rtol(passed))


def compare_losses(
    step: int,
    actual: Array,
    reference: Array,
    rtol: float | None,
    measure: Measure,
    passed: np.dtype[Any] | None = None,
) -> LossCheck:
    """Check the loss of a step, to rtol of itself; one that is no scalar counts with its mean.

    `passed`: the narrowest float type on its way.
    """
    value, loss = (float(np.mean(array, dtype=np.float64)) for array in (reference, actual))
    check = LossCheck(step, loss, value, _tolerance(reference.dtype, passed, rtol) * abs(value))
    if check.is_equal or not np.isfinite(loss):
        return check
    # One that comes near zero is a sum of terms that cancel, and no more precise than they are.
    measured = replace(check, limit=check.limit + measure(False).loss)
    return measured if measured.is_equal else replace(check, limit=check.limit + measure(True).loss)


def _check(
    name: str, entry: VariableStates, step: int, rtol: float | None, deviation: Array | float = 0.0
) -> VariableCheck:
    with np.errstate(invalid="ignore"):  # infinite values, which are told
        errors, change = (
            _distance(entry.end, entry.reference),
            max_abs(_distance(entry.reference, entry.start)),
        )
    base: Array = np.zeros(())
    if is_float(entry.start):
        magnitudes = np.maximum(sizes(entry.start), sizes(entry.reference))
        tolerance = _tolerance(entry.start.dtype, entry.passed, rtol)
        base = (
            tolerance * max(change, least_of(entry.start.dtype))
            + STORED_ROUNDINGS * eps_of(entry.start.dtype) * magnitudes
        )
    limits = base + deviation
    within_rounding = int(np.sum((errors > base) & (errors <= limits)))
    error, limit = _nearest(errors, limits)
    return VariableCheck(name, step, change, error, limit, _verdict(entry, error, limit), within_rounding)


def _nearest(errors: Array, limits: Array) -> tuple[float, float]:
    """Return the error and the limit of the element whose error is the largest share of its limit."""
    if not errors.size:
        return 0.0, 0.0
    limits = np.broadcast_to(limits, errors.shape)
    shares = np.divide(errors, limits, where=limits > 0, out=np.where(errors > 0, np.inf, 0.0))
    worst = int(np.argmax(np.where(np.isfinite(errors), shares, np.inf)))
    return float(errors.flat[worst]), float(limits.flat[worst])


def _verdict(entry: VariableStates, error: float, limit: float) -> VariableVerdict:
    if not (np.isfinite(error) and np.isfinite(limit)):
        return "not finite"
    if error <= limit:
        return "equal" if not entry.others_changed else "other rows changed"
    return "did not change" if np.array_equal(entry.start, entry.end) else "differs"


def _distance(one: Array, other: Array) -> Array:
    if is_float(one):
        return np.asarray(np.abs(wide(one) - wide(other)))
    # Python's integers: no overflow, and no two large ones that become equal as float64.
    distance = np.abs(one.astype(object) - other.astype(object)).astype(np.float64)
    return np.asarray(distance)
