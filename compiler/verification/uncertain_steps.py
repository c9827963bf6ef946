"""How far the rounding of gradients alone may lead a variable.

Sums in another order change a gradient's elements by about e, eight times the largest element of

    gradient (variables) - gradient (variables (1 + eps x))        x random, of -1, 0 and 1

Gradient descent makes as small a change of that. Adam divides by the gradient's own size, so an element g
that is zero in theory (the key projection's bias under softmax, a bias before a normalisation) takes a
step of whatever size and direction rounding decides. What may come of it, summed over steps:

    |g| > e                               |step| e / |g|: the element's own step is uncertain in part
    |g| <= e                              2 S e / max|g|, S the largest step, both of such elements:
                                          no optimizer grows faster than its gradient; at most twice
                                          the largest step of any variable of the same role
    no replica has a gradient there       nothing

The steps are the reference's, of a parameter and of the slots beside it. g is the sum of the gradients since
the parameter last moved: some are accumulated first. Of indexed slices it is the sum of an id's rows.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from partc.runtime.program import PlanVariable

ROUNDINGS = 8

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class SeenGradient:
    """A parameter's gradient of one step."""

    value: Array
    size: Array  # the same but for signs, summed over replicas: zero only where none has any
    error: float  # what rounding may make of an element
    ids: Array | None = None  # rows of the parameter that the elements belong to; None: all

    @classmethod
    def of_slices(cls, ids: Array, rows: Array, error: float) -> "SeenGradient":
        """Return the sums of the rows (n, ...) of each id (n)."""
        found, places = np.unique(ids, return_inverse=True)
        value, size = (np.zeros((len(found), *rows.shape[1:]), rows.dtype) for _ in range(2))
        np.add.at(value, places, rows)
        np.add.at(size, places, np.abs(rows))
        return cls(value, size, error, found)


def nudged(variables: Mapping[str, Array]) -> dict[str, Array]:
    """Return the variables with their last bits changed at random; integers as they are."""
    random = np.random.default_rng(0)
    return {name: _nudge(value, random) if _is_float(value) else value for name, value in variables.items()}


def _nudge(value: Array, random: np.random.Generator) -> Array:
    wide = _wide(value)
    eps = float(ml_dtypes.finfo(value.dtype).eps)  # type: ignore[no-untyped-call]
    signs = random.integers(-1, 2, value.shape, np.int8)
    nudged: Array = np.asarray(wide * (1 + wide.dtype.type(eps) * signs), value.dtype)
    return nudged


def rounding(gradient: Array, nudged: Array) -> float:
    """Return what rounding may make of an element of a gradient."""
    return ROUNDINGS * _largest(_wide(gradient) - _wide(nudged))


class Uncertainty:
    """The sum over the steps that it is told of."""

    def __init__(self, variables: Sequence[PlanVariable]) -> None:
        self.elements: dict[str, Array] = {}  # variable -> how far each element may be led
        self._pending: dict[str, SeenGradient] = {}  # parameter -> since it last moved
        self._variables = variables

    def add_step(
        self,
        before: Mapping[str, Array],
        after: Mapping[str, Array],
        gradients: Mapping[str, SeenGradient],
    ) -> None:
        """Count one step of the reference's, which went from `before` to `after` by the gradients."""
        if not all(np.isfinite([_largest(seen.value), seen.error]).all() for seen in gradients.values()):
            self._pending.clear()  # an overflow, whose step is skipped
            return
        for name, seen in gradients.items():
            self._pending[name] = _sum(self._pending.get(name), seen)
        steps = {v.name: _largest(_step(v.name, before, after)) for v in self._variables}
        longest: dict[str, float] = defaultdict(float)
        for variable in self._variables:
            longest[variable.role] = max(longest[variable.role], steps[variable.name])
        for variable in self._variables:
            gradient = self._pending.get(variable.parameter or variable.name)
            if gradient is not None and gradient.value.shape[1:] == variable.shape[1:]:
                self._add(variable, _step(variable.name, before, after), gradient, longest[variable.role])
        for name, seen in gradients.items():
            if steps[name] or seen.ids is not None:
                self._pending.pop(name)

    def _add(self, variable: PlanVariable, step: Array, gradient: SeenGradient, longest: float) -> None:
        if variable.name not in self.elements:
            self.elements[variable.name] = np.zeros_like(step)
        rows = slice(None) if gradient.ids is None else gradient.ids
        self.elements[variable.name][rows] += _led(step[rows], gradient, longest)


def _sum(pending: SeenGradient | None, seen: SeenGradient) -> SeenGradient:
    if pending is None:
        return seen
    return SeenGradient(
        pending.value + seen.value, pending.size + seen.size, pending.error + seen.error, seen.ids
    )


def _led(step: Array, gradient: SeenGradient, longest: float) -> Array:
    """Return how far a step may be from what it would be without rounding."""
    size, error = _size(gradient.value), gradient.error
    noise = (size <= error) & (gradient.size > 0)
    share = np.divide(error, size, where=size > error, out=np.zeros_like(size))
    largest = _largest(size[noise])
    reach = _largest(step[noise]) * error / largest if largest > 0 else longest
    return np.where(noise, 2 * min(reach, longest), step * share)


def _step(name: str, before: Mapping[str, Array], after: Mapping[str, Array]) -> Array:
    return _size(_wide(after[name]) - _wide(before[name]))


def _size(array: Array) -> Array:
    size: Array = np.abs(_wide(array))
    return size


def _is_float(array: Array) -> bool:
    return np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16


def _wide(array: Array) -> Array:
    """Return float32 as it is, for tables are large, and all else as float64."""
    return array if array.dtype == np.float32 else array.astype(np.float64)


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0))
