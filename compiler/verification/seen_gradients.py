"""The gradients of the reference's steps, and what rounding makes of each.

Nobody knows how a sum was rounded, but what rounding can do shows when the last bits of all variables are
changed at random:

    e = 8 max|gradient (variables) - gradient (variables (1 + eps x))|        x of -1, 0 and 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from partc.compiler.importing.bindings import Bindings
from partc.compiler.verification.floats import Array, eps_of, is_float, max_abs, wide

ROUNDINGS = 8


@dataclass(frozen=True, slots=True)
class SeenGradient:
    """A parameter's gradient of one step.

    Dense: shaped like the parameter. Of indexed slices: the k rows [k, ...] that have any.
    """

    value: Array
    size: Array  # the same but for signs, summed over replicas: zero only where none has any
    error: float  # e: what rounding may make of an element
    ids: Array | None = None  # int64[k], the parameter's rows; None: dense

    @classmethod
    def of_slices(cls, ids: Array, rows: Array, error: float) -> "SeenGradient":
        """Return the sums of the rows [n, ...] of each id, int64[n]."""
        found, places = np.unique(ids, return_inverse=True)
        value, size = (np.zeros((len(found), *rows.shape[1:]), rows.dtype) for _ in range(2))
        np.add.at(value, places, rows)
        np.add.at(size, places, np.abs(rows))
        return cls(value, size, error, found)


class SeenTensors:
    """Where the graph holds the gradients: dense, or as indexed slices."""

    def __init__(self, model: onnx.ModelProto, bindings: Bindings) -> None:
        known = {name for node in model.graph.node for name in node.output}
        held = bindings.gradients.items()
        self._dense = {name: str(gradient.dense) for name, gradient in held if gradient.dense in known}
        self._slices = {
            name: (str(gradient.ids), str(gradient.rows))
            for name, gradient in held
            if name not in self._dense and gradient.rows in known
        }
        self.names = [*self._dense.values(), *(rows for _, rows in self._slices.values())]
        self.names += [ids for ids, _ in self._slices.values() if ids in known]

    def gradients(
        self, met: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], again: Mapping[str, Array]
    ) -> dict[str, SeenGradient]:
        """Return them by parameter.

        `met`: what all replicas' gradients became. `parts`: each replica's own. `again`: the first
        replica's, from nudged variables.
        """
        found = {}
        for name, tensor in self._dense.items():
            size = np.sum([np.abs(part[tensor]) for part in parts], axis=0)
            found[name] = SeenGradient(met[tensor], size, _rounding(parts[0][tensor], again[tensor]))
        for name, (ids, rows) in self._slices.items():
            error = _rounding(parts[0][rows], again[rows])
            found[name] = SeenGradient.of_slices(met[ids], met[rows], error)
        return found


def nudged(variables: Mapping[str, Array]) -> dict[str, Array]:
    """Return the variables with their last bits changed at random; integers as they are."""
    random = np.random.default_rng(0)
    return {name: _nudge(value, random) if is_float(value) else value for name, value in variables.items()}


def _nudge(value: Array, random: np.random.Generator) -> Array:
    exact = wide(value)
    signs = random.integers(-1, 2, value.shape, np.int8)
    result: Array = np.asarray(exact * (1 + exact.dtype.type(eps_of(value.dtype)) * signs), value.dtype)
    return result


def _rounding(gradient: Array, again: Array) -> float:
    return ROUNDINGS * max_abs(wide(gradient) - wide(again))
