"""Compare what training did to each variable with what the reference did to it.

    |change - reference change| <= rtol * max|reference change| + floor + uncertainty    for every element

    floor = steps * eps * (max|value| + largest change)

eps is the dtype's. The first part of the floor is rounding: each step rounds the stored value once
on either side. The second serves changes that are zero in theory (a bias before a normalisation):
what is left of them is the rounding of terms as large as the gradients of other variables, so it is
measured by the largest reference change of any variable of the same role. The uncertainty is what an
optimizer makes of such rounding (uncertain_steps.py). Integers must be equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from partc.compiler.verification.floats import Array, eps_of, is_float, max_abs
from partc.runtime.program import PlanVariable

Verdict = Literal["equal", "differs", "did not change", "not finite"]


@dataclass(frozen=True, slots=True)
class VariableCheck:
    """How far one variable's change is from the reference's."""

    name: str
    max_change: float  # of the reference
    max_error: float  # of the element that comes nearest to what is allowed, or is farthest beyond
    limit: float  # of the same element
    verdict: Verdict
    excused: int  # elements that only what rounding of gradients may lead to makes equal


@dataclass(frozen=True, slots=True)
class LossCheck:
    """The loss of one step (from 1), and the reference's."""

    step: int
    loss: float
    reference: float
    limit: float

    @property
    def is_equal(self) -> bool:
        """Tell whether the losses agree."""
        return bool(abs(self.loss - self.reference) <= self.limit)


@dataclass(frozen=True, slots=True)
class Trained:
    """A variable before and after training, and after the reference's training."""

    variable: PlanVariable
    start: Array
    end: Array
    reference: Array
    uncertainty: Array | float = 0.0  # of each element

    @property
    def reference_change(self) -> float:
        """Return max|reference change|."""
        return max_abs(_difference(self.reference, self.start))


def compare_changes(
    trained: Mapping[str, Trained], steps: int, rtol: float | None
) -> tuple[VariableCheck, ...]:
    """Check every variable; `rtol` None means the default of its dtype."""
    largest: dict[str, float] = {}
    for entry in trained.values():
        if is_float(entry.start):
            role = entry.variable.role
            largest[role] = max(largest.get(role, 0.0), entry.reference_change)
    return tuple(
        _check(entry, steps, rtol, largest.get(entry.variable.role, 0.0)) for entry in trained.values()
    )


def default_rtol(dtype: np.dtype[Any]) -> float:
    """Return the tolerance for a dtype: sums in another order differ by about eps."""
    return {"float64": 1e-9, "float32": 1e-4}.get(dtype.name, 1e-2)


def compare_losses(
    loss: str | None,
    ours: Sequence[Mapping[str, Array]],
    reference: Sequence[Mapping[str, Array]],
    rtol: float | None,
) -> tuple[LossCheck, ...]:
    """Check the loss of every step against rtol of the largest so far; without a loss, nothing.

    Outputs by step; a loss that is no scalar counts with its mean.
    """
    if loss is None:
        return ()
    wanted = [np.asarray(shown[loss]) for shown in reference]
    allowed = default_rtol(wanted[0].dtype) if rtol is None else rtol
    values = [float(np.mean(value, dtype=np.float64)) for value in wanted]
    # One that comes near zero is a sum of terms that cancel, and no more precise than they are.
    eps = float(np.finfo(wanted[0].dtype).eps)
    limits = [allowed * max(size, eps) for size in accumulate(map(abs, values), max)]
    found = [float(np.mean(shown[loss], dtype=np.float64)) for shown in ours]
    checks = zip(found, values, limits, strict=True)
    return tuple(LossCheck(step, *check) for step, check in enumerate(checks, 1))


def _check(entry: Trained, steps: int, rtol: float | None, largest: float) -> VariableCheck:
    change = entry.reference_change
    errors = np.abs(_difference(entry.end, entry.reference).astype(np.float64))
    limit = 0.0
    if is_float(entry.start):
        value = max(max_abs(entry.start), max_abs(entry.reference))
        floor = steps * eps_of(entry.start.dtype) * (value + largest)
        limit = (default_rtol(entry.start.dtype) if rtol is None else rtol) * change + floor
    excused = int(np.sum((errors > limit) & (errors <= limit + entry.uncertainty)))
    error, limit = _nearest(errors, limit + entry.uncertainty)
    return VariableCheck(entry.variable.name, change, error, limit, _verdict(entry, error, limit), excused)


def _nearest(errors: Array, limits: Array | float) -> tuple[float, float]:
    """Return the error and the limit of the element whose error is the largest share of its limit."""
    if not errors.size:
        return 0.0, 0.0
    limits = np.broadcast_to(limits, errors.shape)
    shares = np.divide(errors, limits, where=limits > 0, out=np.where(errors > 0, np.inf, 0.0))
    worst = int(np.argmax(np.where(np.isfinite(errors), shares, np.inf)))
    return float(errors.flat[worst]), float(limits.flat[worst])


def _verdict(entry: Trained, error: float, limit: float) -> Verdict:
    if not (np.isfinite(error) and np.isfinite(limit)):
        return "not finite"
    if error <= limit:
        return "equal"
    return "did not change" if np.array_equal(entry.start, entry.end) else "differs"


def _difference(one: Array, other: Array) -> Array:
    if is_float(one):
        return np.asarray(one.astype(np.float64) - other.astype(np.float64))
    # Python's integers: no overflow, and no two large ones that become equal as float64.
    return np.asarray(one.astype(object) - other.astype(object))
