"""How far the rounding of gradients alone may lead a variable.

Sums in another order change an element g of a gradient by about

    e = 8 eps max|gradient of any parameter|

Gradient descent makes as small a change of that. Adam divides by the gradient's own size, so an element
that is zero in theory (the key projection's bias under softmax, a bias before a normalisation) takes a full
step in whatever direction rounding decides. What may come of it, summed over steps:

    |g| > e     |step| e / |g|              the element's own step is uncertain in part
    |g| <= e    2 max|step|                 any step of the variable's, either way
    no replica has a gradient there         nothing

The steps are the reference's, of a parameter and of the slots beside it. Gradients of indexed slices are left
out: their rows are sums of few terms.
"""

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
        self.noise: dict[str, Array] = {}  # parameter -> elements that were noise in any step
        self._owner = {v.name: v.name if v.role == "parameter" else v.parameter for v in variables}

    def add_step(
        self,
        before: Mapping[str, Array],
        after: Mapping[str, Array],
        gradients: Mapping[str, SeenGradient],
    ) -> None:
        """Count one step of the reference's, which went from `before` to `after` by the gradients."""
        largest = max((_largest(seen.value) for seen in gradients.values()), default=0.0)
        shares = {}
        for name, seen in gradients.items():
            error = ROUNDINGS * float(ml_dtypes.finfo(seen.value.dtype).eps) * largest  # type: ignore[no-untyped-call]
            shares[name] = _uncertain_share(seen, error)
            self.noise[name] = self.noise.get(name, False) | (shares[name] == 1)
        for name, owner in self._owner.items():
            if owner in shares and before[name].shape == shares[owner].shape:
                step = np.abs(after[name].astype(np.float64) - before[name].astype(np.float64))
                led = np.where(shares[owner] == 1, 2 * _largest(step), step * shares[owner])
                self.elements[name] = self.elements.get(name, 0.0) + led


def _uncertain_share(seen: SeenGradient, error: float) -> Array:
    """Return which share of an element's gradient may be rounding, 1 where all of it."""
    size = np.abs(seen.value.astype(np.float64))
    share = error / np.maximum(size, error) if error > 0 else np.zeros_like(size)
    return np.where(seen.size > 0, share, 0.0)


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array.astype(np.float64)))) if array.size else 0.0
