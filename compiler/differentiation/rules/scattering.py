"""Gradient rules of scatters, each in two kinds: by elements along an axis, and by tuples of indices.

y = x, then y[i] (=, +=, *=, max=, min=) u
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.rules.indexing import add_to_zeros


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A scatter node; the same places are read, and written again."""

    at: ForwardNode

    def take(self, tensor: str) -> str:
        """Return the entries of a tensor shaped like x at the node's indices."""
        if self.at.node.op_type == "ScatterND":
            return self.at.op("GatherND", tensor, self.at.x(1))
        return self.at.op("GatherElements", tensor, self.at.x(1), axis=self.at.integer("axis", 0))

    def apply(self, tensor: str, updates: str, reduction: str) -> str:
        """Scatter updates into a tensor as the node does, but reduced otherwise."""
        at = self.at
        if at.node.op_type == "ScatterND":
            return at.op("ScatterND", tensor, at.x(1), updates, reduction=reduction)
        axis = at.integer("axis", 0)
        return at.op("ScatterElements", tensor, at.x(1), updates, axis=axis, reduction=reduction)

    def flag(self, condition: str) -> str:
        """Return 1 where a condition holds, else 0."""
        return self.at.op("Cast", condition, to=self.at.types[self.at.x(0)].element)


def _scatter(at: ForwardNode, dy: str) -> Gradients:
    scatter, reduction = _Scatter(at), at.attribute("reduction", "none")
    if reduction == "mul":
        return _scatter_products(scatter, dy)
    if reduction in ("max", "min"):
        return _scatter_extrema(scatter, dy)
    overwritten = dy if reduction == "add" else scatter.apply(dy, at.zeros(at.x(2)), "none")
    return {0: overwritten, 2: scatter.take(dy)}


def _scatter_products(scatter: _Scatter, dy: str) -> Gradients:
    """du = product of all that u was multiplied with; an update of 0 is set aside, and counted."""
    at = scatter.at
    x, u = at.x(0), at.x(2)
    zero, one = at.scalar(0, like=x), at.scalar(1, like=x)
    ones = at.op("Expand", one, at.shape_of(x))
    is_zero = at.op("Equal", u, zero)
    safe = at.op("Where", is_zero, one, u)
    nonzero = at.op("Mul", dy, at.op("Mul", x, scatter.apply(ones, safe, "mul")))
    zeros = scatter.take(scatter.apply(at.zeros(x), scatter.flag(is_zero), "add"))
    others = at.op("Sub", zeros, scatter.flag(is_zero))
    rest = at.op("Div", scatter.take(nonzero), safe)
    return {
        0: at.op("Mul", dy, scatter.apply(ones, u, "mul")),
        2: at.op("Where", at.op("Equal", others, zero), rest, zero),
    }


def _scatter_extrema(scatter: _Scatter, dy: str) -> Gradients:
    """Values that tie share the gradient equally."""
    at = scatter.at
    is_data = scatter.flag(at.op("Equal", at.x(0), at.y()))
    is_update = scatter.flag(at.op("Equal", at.x(2), scatter.take(at.y())))
    share = at.op("Div", dy, scatter.apply(is_data, is_update, "add"))
    return {0: at.op("Mul", is_data, share), 2: at.op("Mul", is_update, scatter.take(share))}


def _top_k(at: ForwardNode, dy: str) -> Gradients:
    axis = at.integer("axis", -1)
    return {0: at.op("ScatterElements", at.zeros(at.x(0)), at.y(1), dy, axis=axis)}


# ---------------------------------------------------------------- gather by tuples


def _gather_nd(at: ForwardNode, dy: str) -> Gradients:
    indices = at.x(1)
    batch_axes = at.integer("batch_dims", 0)
    if batch_axes:
        axes = [_batch_positions(at, axis) for axis in range(batch_axes)]
        indices = at.op("Concat", *axes, indices, axis=-1)
    return {0: add_to_zeros(at, "ScatterND", indices, dy)}


def _batch_positions(at: ForwardNode, axis: int) -> str:
    """Return int64[shape of the indices but for the last axis, 1]: the position along a batch axis."""
    indices, rank = at.x(1), at.rank(at.x(1))
    zero, one = (at.build.constant(np.array(value, np.int64)) for value in (0, 1))
    size = at.op("Squeeze", at.op("Shape", indices, start=axis, end=axis + 1))
    positions = at.op("Range", zero, size, one)
    others = [other for other in range(rank) if other != axis]
    spread = at.op("Concat", at.op("Shape", indices, start=0, end=rank - 1), at.build.ints(1), axis=0)
    return at.op("Expand", at.op("Unsqueeze", positions, at.build.ints(*others)), spread)


RULES: Mapping[str, Rule] = {
    "GatherND": of_first_output(_gather_nd),
    "ScatterElements": of_first_output(_scatter),
    "ScatterND": of_first_output(_scatter),
    "TopK": of_first_output(_top_k),
}
