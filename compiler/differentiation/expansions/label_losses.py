"""SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss written as primitive ops. No batch size is held.

    loss[n, ..] = - weight[label] log p[n, label, ..]       mean: their sum / the sum of the weights

A label equal to ignore_index weighs 0, and may lie outside the classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partc.compiler.differentiation.forward_node import ForwardNode


def expand_softmax_cross_entropy(at: ForwardNode) -> Sequence[str]:
    """Emit SoftmaxCrossEntropyLoss and its second output, the log probabilities."""
    log_probabilities = at.op("LogSoftmax", at.x(0), axis=1)
    return _reduce_loss(at, log_probabilities), log_probabilities


def expand_negative_log_likelihood(at: ForwardNode) -> Sequence[str]:
    """Emit NegativeLogLikelihoodLoss."""
    return (_reduce_loss(at, at.x(0)),)


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels that lie within the classes, and what each counts; None: all count 1."""

    labels: str
    weights: str | None


def _labels(at: ForwardNode) -> _Labels:
    labels = at.x(1)
    ignored = None
    if at.attribute("ignore_index") is not None:
        dtype = at.types[labels].dtype
        index = at.build.constant(np.array(at.integer("ignore_index", -1), dtype))
        ignored = at.op("Equal", labels, index)
        labels = at.op("Where", ignored, at.build.constant(np.array(0, dtype)), labels)
    weights = at.op("Gather", at.x(2), labels, axis=0) if at.x(2) else None
    if ignored is not None:
        one, zero = (at.scalar(value, like=at.x(0)) for value in (1, 0))
        weights = at.op("Where", ignored, zero, weights or one)
    return _Labels(labels, weights)


def _reduce_loss(at: ForwardNode, log_probabilities: str) -> str:
    class_labels = _labels(at)
    index = at.op("Unsqueeze", class_labels.labels, at.build.ints(1))
    label_log_probabilities = at.op("GatherElements", log_probabilities, index, axis=1)
    losses = at.op("Neg", at.op("Squeeze", label_log_probabilities, at.build.ints(1)))
    weights = class_labels.weights
    if weights is not None:
        losses = at.op("Mul", losses, weights)
    match at.attribute("reduction", "mean"):
        case "none":
            return losses
        case "sum":
            return at.op("ReduceSum", losses, keepdims=0)
    if weights is None:
        return at.op("ReduceMean", losses, keepdims=0)
    total, weight = (at.op("ReduceSum", tensor, keepdims=0) for tensor in (losses, weights))
    return at.op("Div", total, weight)
