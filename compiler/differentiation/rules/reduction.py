"""Gradient rules of reductions and of softmax."""

from collections.abc import Callable, Mapping

import numpy as np

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.rules.along_axis import static_size


def _axes(at: ForwardNode) -> tuple[int, ...]:
    """Return the reduced axes, ascending."""
    rank = at.rank(at.x(0))
    axes_input = at.constant_input(1)
    if axes_input is None or axes_input.size == 0:
        return () if at.integer("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(axis % rank for axis in axes_input.tolist()))


def _keep_axes(at: ForwardNode, tensor: str) -> str:
    """Give a tensor of the output's shape the reduced axes back, with size 1."""
    if at.integer("keepdims", 1) or not _axes(at):
        return tensor
    return at.op("Unsqueeze", tensor, at.build.ints(*_axes(at)))


def _expand_reduced(at: ForwardNode, tensor: str) -> str:
    return at.op("Expand", tensor, at.shape_of(at.x(0)))


def count_along(at: ForwardNode, tensor: str, axes: tuple[int, ...]) -> str:
    """Return the number of entries along axes, a scalar of the tensor's element type.

    It is read from the tensor at run time, so it follows the batch.
    """
    if axes == tuple(range(at.rank(tensor))):
        count = at.op("Size", tensor)
    else:
        sizes = at.op("Gather", at.shape_of(tensor), at.build.ints(*axes))
        count = at.op("ReduceProd", sizes, keepdims=0)
    return at.op("Cast", count, to=at.types[tensor].element)


def _reduce_sum(at: ForwardNode, dy: str) -> Gradients:
    return {0: _expand_reduced(at, _keep_axes(at, dy))}


def _reduce_mean(at: ForwardNode, dy: str) -> Gradients:
    share = at.op("Div", _keep_axes(at, dy), count_along(at, at.x(0), _axes(at)))
    return {0: _expand_reduced(at, share)}


def _reduce_extremum(at: ForwardNode, dy: str) -> Gradients:
    """Entries that tie share the gradient equally."""
    wins = at.op("Equal", at.x(0), _keep_axes(at, at.y()))
    ones = at.op("Cast", wins, to=at.types[at.x(0)].element)
    ties = at.op("ReduceSum", ones, at.build.ints(*_axes(at)), keepdims=1)
    return {0: at.op("Mul", ones, at.op("Div", _keep_axes(at, dy), ties))}


def _reduce_sum_square(at: ForwardNode, dy: str) -> Gradients:
    twice = at.op("Mul", at.x(0), at.scalar(2, like=at.x(0)))
    return {0: at.op("Mul", twice, _keep_axes(at, dy))}


def _reduce_l1(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Mul", at.op("Sign", at.x(0)), _keep_axes(at, dy))}


def _reduce_l2(at: ForwardNode, dy: str) -> Gradients:
    """x / |x|, taken as 0 at the origin."""
    norm = _keep_axes(at, at.y())
    zero = at.scalar(0, like=at.x(0))
    safe = at.op("Where", at.op("Equal", norm, zero), at.scalar(1, like=at.x(0)), norm)
    return {0: at.op("Mul", at.x(0), at.op("Div", _keep_axes(at, dy), safe))}


def _reduce_log_sum_exp(at: ForwardNode, dy: str) -> Gradients:
    share = at.op("Exp", at.op("Sub", at.x(0), _keep_axes(at, at.y())))
    return {0: at.op("Mul", share, _keep_axes(at, dy))}


def _reduce_log_sum(at: ForwardNode, dy: str) -> Gradients:
    slope = at.op("Div", _keep_axes(at, dy), at.op("Exp", _keep_axes(at, at.y())))
    return {0: _expand_reduced(at, slope)}


def _reduce_prod(at: ForwardNode, dy: str) -> Gradients:
    """Each entry's slope is the product of the others; a factor of 0 is set aside, and counted."""
    x, axes = at.x(0), at.build.ints(*_axes(at))
    zero, one = at.scalar(0, like=x), at.scalar(1, like=x)
    is_zero = at.op("Equal", x, zero)
    safe = at.op("Where", is_zero, one, x)
    product = at.op("ReduceProd", safe, axes, keepdims=1)
    flags = at.op("Cast", is_zero, to=at.types[x].element)
    other_zeros = at.op("Sub", at.op("ReduceSum", flags, axes, keepdims=1), flags)
    others = at.op("Where", at.op("Equal", other_zeros, zero), at.op("Div", product, safe), zero)
    return {0: at.op("Mul", _keep_axes(at, dy), others)}


def _cum_sum(at: ForwardNode, dy: str) -> Gradients:
    """What an entry was summed into lies behind it: sum from the other end."""
    options = {"exclusive": at.integer("exclusive", 0), "reverse": 1 - at.integer("reverse", 0)}
    return {0: at.op("CumSum", dy, at.x(1), **options)}


def expand_cum_prod(at: ForwardNode) -> tuple[str]:
    """Write CumProd as products over a square of entries, of which each row keeps its own; for short axes."""
    x, rank = at.x(0), at.rank(at.x(0))
    position = at.constant_input(1)
    assert position is not None
    axis = int(position.ravel()[0]) % rank
    size = static_size(at, x, axis)
    triangle = np.tri(size, k=-at.integer("exclusive", 0), dtype=np.bool_)
    triangle = triangle[::-1, ::-1] if at.integer("reverse", 0) else triangle
    shaped = triangle.reshape((size, size) + (1,) * (rank - 1 - axis))
    factors = at.op("Unsqueeze", x, at.build.ints(axis))
    row = at.op("Where", at.build.constant(shaped.copy()), factors, at.scalar(1, like=x))
    return (at.op("ReduceProd", row, at.build.ints(axis + 1), keepdims=0),)


def _unless_noop(rule: Callable[[ForwardNode, str], Gradients]) -> Rule:
    """Reducing no axes at all is the identity for the ops of this table that allow it here."""

    def guarded(at: ForwardNode, dy: str) -> Gradients:
        identity = not _axes(at) and at.node.op_type in (
            "ReduceSum",
            "ReduceMean",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
        )
        return {0: dy} if identity else rule(at, dy)

    return of_first_output(guarded)


# ---------------------------------------------------------------- softmax


def _softmax(at: ForwardNode, dy: str) -> Gradients:
    weighted = at.op("Mul", dy, at.y())
    total = at.op("ReduceSum", weighted, at.build.ints(at.integer("axis", -1)), keepdims=1)
    return {0: at.op("Sub", weighted, at.op("Mul", at.y(), total))}


def _log_softmax(at: ForwardNode, dy: str) -> Gradients:
    total = at.op("ReduceSum", dy, at.build.ints(at.integer("axis", -1)), keepdims=1)
    return {0: at.op("Sub", dy, at.op("Mul", at.op("Exp", at.y()), total))}


RULES: Mapping[str, Rule] = {
    "ReduceSum": _unless_noop(_reduce_sum),
    "ReduceMean": _unless_noop(_reduce_mean),
    "ReduceMax": _unless_noop(_reduce_extremum),
    "ReduceMin": _unless_noop(_reduce_extremum),
    "ReduceSumSquare": _unless_noop(_reduce_sum_square),
    "ReduceL1": _unless_noop(_reduce_l1),
    "ReduceL2": _unless_noop(_reduce_l2),
    "ReduceLogSumExp": _unless_noop(_reduce_log_sum_exp),
    "ReduceLogSum": _unless_noop(_reduce_log_sum),
    "ReduceProd": _unless_noop(_reduce_prod),
    "CumSum": of_first_output(_cum_sum),
    "Softmax": of_first_output(_softmax),
    "LogSoftmax": of_first_output(_log_softmax),
}
