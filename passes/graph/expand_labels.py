"""Say ops that pick or place by class label as masks over the class axis, which a split may cut.

before   p = GatherElements <axis = -1> (scores [n, C], labels [n, 1])

after    mask = Equal (labels [n, 1], classes [C])        classes = 0, 1, .. C - 1, a constant
         kept = Where (mask, scores, 0)
         p = ReduceSum <keepdims = 1> (kept, [-1])        partial(sum) where the axis is split

ScatterElements of one label a row (the gradient), OneHot and the two losses on labels go the same way. A
mask has as many elements as the scores.

A label outside the classes, which ONNX Runtime refuses while it runs, makes the whole row NaN: no rank
could tell it from a label that another rank holds.
"""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.node_writer import Form, Rewriting, accumulated_in

INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)


def write_log_softmax(at: Rewriting, x: gs.Tensor, axis: int, out: gs.Tensor | None = None) -> gs.Tensor:
    """Return x - max - log(sum(exp(x - max))) along an axis."""
    wide = at.cast(x, accumulated_in(x.dtype))
    centred = at.op("Sub", wide, at.op("ReduceMax", wide, at.ints(axis), keepdims=1))
    total = at.op("ReduceSum", at.op("Exp", centred), at.ints(axis), keepdims=1)
    return at.narrow("Sub", centred, at.op("Log", total), dtype=x.dtype, out=out)


# ---------------------------------------------------------------- masks


class _Labels:
    """Labels int[.., 1 at `axis`, ..] of an axis of `classes` entries, and where they lie on it."""

    def __init__(self, at: Rewriting, labels: gs.Tensor, axis: int, rank: int, classes: int) -> None:
        zero, end = (at.scalar(value, INT64) for value in (0, classes))
        ids = at.cast(labels, INT64)
        is_negative = at.op("Less", ids, zero, dtype=BOOL)
        from_front = at.op("Where", is_negative, at.op("Add", ids, end), ids, dtype=INT64)
        names = np.arange(classes, dtype=np.int64).reshape(-1, *(1,) * (rank - 1 - axis))
        self.mask = at.op("Equal", from_front, gs.Constant(at.fresh("classes"), names), dtype=BOOL)
        self._at, self._from_front, self._bounds = at, from_front, (zero, end)

    def none(self, dtype: np.dtype) -> gs.Tensor:
        """Return 0, and NaN where the label is none of the classes: shaped like the labels."""
        at, (zero, end) = self._at, self._bounds
        is_at_least = at.op("GreaterOrEqual", self._from_front, zero, dtype=BOOL)
        is_inside = at.op("And", is_at_least, at.op("Less", self._from_front, end, dtype=BOOL))
        return at.op("Where", is_inside, at.scalar(0, dtype), at.scalar(np.nan, dtype), dtype=dtype)


def _is_label_axis(node: gs.Node, facts: Facts) -> bool:
    """Tell whether indices name one entry of an axis of fixed size for every place across it."""
    data, indices = (facts.shape(tensor.name) for tensor in node.inputs[:2])
    axis = node.attrs.get("axis", 0) % len(data)
    is_float = facts.dtypes[node.outputs[0].name].kind == "f"
    across = [(a, b) for position, (a, b) in enumerate(zip(data, indices, strict=True)) if position != axis]
    return (
        is_float
        and indices[axis] == 1
        and facts.fixed_size(node.inputs[1].name, axis) == 1
        and facts.fixed_size(node.inputs[0].name, axis) is not None
        and all(one == other != 0 for one, other in across)
    )


def _gather_elements(at: Rewriting) -> None:
    data = at.x(0)
    rank = len(at.shape(0))
    axis = at.axis(0, rank)
    labels = _Labels(at, at.x(1), axis, rank, at.shape(0)[axis])
    masked = at.op("Where", labels.mask, data, labels.none(data.dtype), dtype=data.dtype)
    at.op("ReduceSum", masked, at.ints(axis), out=at.y(), keepdims=1)


def _places_one(node: gs.Node, facts: Facts) -> bool:
    return node.attrs.get("reduction", "none") in ("none", "add") and _is_label_axis(node, facts)


def _scatter_elements(at: Rewriting) -> None:
    """Where the rest is zero, it need not be read."""
    data, updates = at.x(0), at.x(2)
    rank = len(at.shape(0))
    axis = at.axis(0, rank)
    labels = _Labels(at, at.x(1), axis, rank, at.shape(0)[axis])
    rest = labels.none(data.dtype)
    if data.name in at.zeros:
        at.op("Where", labels.mask, updates, rest, out=at.y())
    elif at.node.attrs.get("reduction", "none") == "add":
        at.op("Add", data, at.op("Where", labels.mask, updates, rest, dtype=data.dtype), out=at.y())
    else:
        at.op("Where", labels.mask, updates, at.op("Add", data, rest), out=at.y())


def _has_known_depth(node: gs.Node, facts: Facts) -> bool:
    return facts.fixed_value(node.inputs[1].name) is not None


def _one_hot(at: Rewriting) -> None:
    """A label outside the classes is none of them, as ONNX says."""
    values = at.x(2)
    rank = len(at.shape(0)) + 1
    axis = at.axis(-1, rank)
    depth = at.facts.value(at.x(1).name)
    assert depth is not None
    column = at.op("Unsqueeze", at.cast(at.x(0), INT64), at.ints(axis))
    labels = _Labels(at, column, axis, rank, int(depth.reshape(-1)[0]))
    off, on = (at.op("Gather", values, at.scalar(place, INT64), axis=0) for place in (0, 1))
    at.op("Where", labels.mask, on, off, out=at.y())


# ---------------------------------------------------------------- losses


def _has_fixed_classes(node: gs.Node, facts: Facts) -> bool:
    return facts.fixed_size(node.inputs[0].name, 1) is not None


def _softmax_cross_entropy(at: Rewriting) -> None:
    _reduce_loss(at, write_log_softmax(at, at.x(0), 1, at.y(1) if at.makes(1) else None))


def _negative_log_likelihood(at: Rewriting) -> None:
    _reduce_loss(at, at.x(0))


def _reduce_loss(at: Rewriting, log_probabilities: gs.Tensor) -> None:
    """loss[n, ..] = - weight[label] log p[n, label, ..]; mean: their sum / the sum of the weights."""
    dtype, rank, classes = at.x(0).dtype, len(at.shape(0)), at.shape(0)[1]
    ignored, column = _counted_labels(at)
    labels = _Labels(at, column, 1, rank, classes)

    def at_label(tensor: gs.Tensor) -> gs.Tensor:
        masked = at.op("Where", labels.mask, tensor, labels.none(dtype), dtype=dtype)
        return at.op("ReduceSum", masked, at.ints(1), keepdims=0)

    losses = at.op("Neg", at_label(log_probabilities))
    weights = None
    if at.reads(2):
        trailing = at.ints(*range(1, rank - 1))
        weights = at_label(at.op("Unsqueeze", at.x(2), trailing) if rank > 2 else at.x(2))
    if ignored is not None:
        one, zero = (at.scalar(value, dtype) for value in (1, 0))
        weights = at.op("Where", ignored, zero, weights or one, dtype=dtype)
    losses = losses if weights is None else at.op("Mul", losses, weights)
    reduction = at.node.attrs.get("reduction", "mean")
    if reduction == "none":
        at.op("Identity", losses, out=at.y())
    elif reduction == "sum":
        at.op("ReduceSum", losses, out=at.y(), keepdims=0)
    elif weights is None:
        at.op("ReduceMean", losses, out=at.y(), keepdims=0)
    else:
        total, count = (at.op("ReduceSum", tensor, keepdims=0) for tensor in (losses, weights))
        at.op("Div", total, count, out=at.y())


def _counted_labels(at: Rewriting) -> tuple[gs.Tensor | None, gs.Tensor]:
    """Return which labels are ignored, and int64[n, 1, ..] of labels, class 0 in their place."""
    labels, ignored = at.cast(at.x(1), INT64), None
    if (index := at.node.attrs.get("ignore_index")) is not None:
        ignored = at.op("Equal", labels, at.scalar(index, INT64), dtype=BOOL)
        labels = at.op("Where", ignored, at.scalar(0, INT64), labels, dtype=INT64)
    return ignored, at.op("Unsqueeze", labels, at.ints(1))


LABEL_FORMS: Mapping[str, Form] = {
    "GatherElements": Form(_gather_elements, _is_label_axis),
    "ScatterElements": Form(_scatter_elements, _places_one),
    "OneHot": Form(_one_hot, _has_known_depth),
    "SoftmaxCrossEntropyLoss": Form(_softmax_cross_entropy, _has_fixed_classes),
    "NegativeLogLikelihoodLoss": Form(_negative_log_likelihood, _has_fixed_classes),
}
