"""How far the rounding of gradients alone may lead a variable.

Sums in another order change a gradient's elements by about e, which is measured (seen_gradients.py).
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

import numpy as np

from partc.compiler.verification.floats import Array, max_abs, sizes, wide
from partc.compiler.verification.seen_gradients import SeenGradient
from partc.runtime.program import PlanVariable


class Uncertainty:
    """The sum over the steps that it is told of.

    `elements`: by variable, shaped like it, in its own unit; float32 for float32, else float64.
    """

    def __init__(self, variables: Sequence[PlanVariable]) -> None:
        self.elements: dict[str, Array] = {}
        self._pending: dict[str, SeenGradient] = {}  # parameter -> since it last moved
        self._variables = variables

    def add_step(
        self,
        before: Mapping[str, Array],
        after: Mapping[str, Array],
        gradients: Mapping[str, SeenGradient],
    ) -> None:
        """Count one step of the reference's, which went from `before` to `after` by the gradients."""
        if not all(np.isfinite([max_abs(seen.value), seen.error]).all() for seen in gradients.values()):
            self._pending.clear()  # an overflow, whose step is skipped
            return
        for name, seen in gradients.items():
            self._pending[name] = _sum(self._pending.get(name), seen)
        steps = {v.name: max_abs(_step(v.name, before, after)) for v in self._variables}
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
    size, error = sizes(gradient.value), gradient.error
    noise = (size <= error) & (gradient.size > 0)
    share = np.divide(error, size, where=size > error, out=np.zeros_like(size))
    seen = max_abs(size[noise])
    reach = max_abs(step[noise]) * error / seen if seen > 0 else longest
    return np.where(noise, 2 * min(reach, longest), step * share)


def _step(name: str, before: Mapping[str, Array], after: Mapping[str, Array]) -> Array:
    return sizes(wide(after[name]) - wide(before[name]))
