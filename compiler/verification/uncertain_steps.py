"""How far the rounding of gradients alone may lead a variable.

Sums in another order change an element g of a gradient by about

    e = 8 eps max|gradient of any parameter|

Gradient descent makes as small a change of that. Adam divides by the gradient's own size, so an element
that is zero in theory (the key projection's bias under softmax, a bias before a normalisation) takes a
step of whatever size and direction rounding decides. What may come of it, summed over steps:

    |g| > e                               |step| e / |g|: the element's own step is uncertain in part
    |g| <= e                              2 S e / max|g|, S the largest step, both of such elements:
                                          no optimizer grows faster than its gradient; at most twice
                                          the largest step of any variable of the same role
    no replica has a gradient there       nothing

The steps are the reference's, of a parameter and of the slots beside it. g is the sum of the gradients since
the parameter last moved: some are accumulated first. Gradients of indexed slices are left out: their rows
are sums of few terms.
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
    """A dense gradient of one step."""

    value: Array
    size: Array  # the same but for signs, summed over replicas: zero only where none has any


class Uncertainty:
    """The sum over the steps that it is told of."""

    def __init__(self, variables: Sequence[PlanVariable]) -> None:
        self.elements: dict[str, Array] = {}  # variable -> how far each element may be led
        self.noise: dict[str, Array] = {}  # parameter -> elements that were rounding alone in any step
        self._pending: dict[str, SeenGradient] = {}  # parameter -> since it last moved
        self._variables = variables

    def add_step(
        self,
        before: Mapping[str, Array],
        after: Mapping[str, Array],
        gradients: Mapping[str, SeenGradient],
    ) -> None:
        """Count one step of the reference's, which went from `before` to `after` by the gradients."""
        if not all(np.isfinite(_largest(seen.value)) for seen in gradients.values()):
            self._pending.clear()  # an overflow, whose step is skipped
            return
        for name, seen in gradients.items():
            self._pending[name] = _sum(self._pending.get(name), seen)
        error = max(map(_rounding, self._pending.values()), default=0.0)
        steps = {v.name: _largest(_step(v.name, before, after)) for v in self._variables}
        longest: dict[str, float] = defaultdict(float)
        for variable in self._variables:
            longest[variable.role] = max(longest[variable.role], steps[variable.name])
        for variable in self._variables:
            gradient = self._pending.get(variable.parameter or variable.name)
            if gradient is not None and gradient.value.shape == variable.shape:
                step = _step(variable.name, before, after)
                led = _led(step, gradient, error, longest[variable.role])
                self.elements[variable.name] = self.elements.get(variable.name, 0.0) + led
        for name in gradients:
            if steps[name]:
                noise = _is_noise(self._pending.pop(name), error)
                self.noise[name] = self.noise.get(name, False) | noise


def _sum(pending: SeenGradient | None, seen: SeenGradient) -> SeenGradient:
    if pending is None:
        return seen
    return SeenGradient(pending.value + seen.value, pending.size + seen.size)


def _rounding(gradient: SeenGradient) -> float:
    eps = float(ml_dtypes.finfo(gradient.value.dtype).eps)  # type: ignore[no-untyped-call]
    return ROUNDINGS * eps * _largest(gradient.value)


def _is_noise(gradient: SeenGradient, error: float) -> Array:
    return (_size(gradient.value) <= error) & (gradient.size > 0)


def _led(step: Array, gradient: SeenGradient, error: float, longest: float) -> Array:
    """Return how far a step may be from what it would be without rounding."""
    size, noise = _size(gradient.value), _is_noise(gradient, error)
    share = np.divide(error, size, where=size > error, out=np.zeros_like(size))
    largest = _largest(size[noise])
    reach = _largest(step[noise]) * error / largest if largest > 0 else longest
    return np.where(noise, 2 * min(reach, longest), step * share)


def _step(name: str, before: Mapping[str, Array], after: Mapping[str, Array]) -> Array:
    return _size(_wide(after[name]) - _wide(before[name]))


def _size(array: Array) -> Array:
    size: Array = np.abs(_wide(array))
    return size


def _wide(array: Array) -> Array:
    """Return float32 as it is, for tables are large, and all else as float64."""
    return array if array.dtype == np.float32 else array.astype(np.float64)


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0))
