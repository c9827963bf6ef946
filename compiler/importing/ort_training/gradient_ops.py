"""onnxruntime-training's gradient ops, written out by partc's own rules of the forward ops.

    ConvGrad (dy, x, w) -> dx, dw, db       the rule of Conv (x, w, b) -> y, given dy

Source: the operators' schemas and the gradient builders of onnxruntime 1.19
(orttraining/core/graph/training_op_defs.cc, gradient_builder.cc).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from partc.compiler.differentiation.expansions.table import Expansion
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.rules.table import RULES
from partc.compiler.importing.ort_training.forward_ops import (
    inverse_root_mean_square,
    label_loss,
    normalized_axes,
)
from partc.passes.graph.operation_builder import AttributeValue
from partc.runtime.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class _ByRule:
    """Lower a gradient op by the rule of its forward op.

    `inputs` are the positions of the forward op's inputs among the gradient op's. The forward output
    is only known by its shape, that of dy, unless the op reads it at position `output`.
    """

    forward: str
    inputs: tuple[int, ...]
    output: int | None = None
    dy: int = 0
    attributes: Mapping[str, AttributeValue] | None = None

    def __call__(self, at: ForwardNode) -> Sequence[str]:
        dy = at.x(self.dy)
        node = onnx.NodeProto(op_type=self.forward, name=at.node.name)
        node.input.extend(at.x(position) for position in self.inputs)
        node.output.append(dy if self.output is None else at.x(self.output))
        node.attribute.extend(at.node.attribute)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in (self.attributes or {}).items())
        input_indices = frozenset(index for index, name in enumerate(at.node.output) if name)
        gradients = RULES[self.forward](replace(at, node=node, gradient_inputs=input_indices), [dy])
        return [gradients.get(index, "") for index in range(len(at.node.output))]


# ---------------------------------------------------------------- activations


@dataclass(frozen=True, slots=True)
class _Biased:
    """Lower the gradient of an activation of x + bias, with respect to that sum."""

    attributes: Mapping[str, AttributeValue] | None = None

    def __call__(self, at: ForwardNode) -> Sequence[str]:
        total = at.op("Add", at.x(1), at.x(2))
        assert isinstance(at.types, dict)
        at.types[total] = at.types[at.x(1)]
        node = helper.make_node("Gelu", [at.x(0), total], list(at.node.output), at.node.name)
        return _ByRule("Gelu", (1,), attributes=self.attributes)(replace(at, node=node))


def _quick_gelu(at: ForwardNode) -> Sequence[str]:
    """Emit dy s (1 + alpha x (1 - s)), for s = sigmoid(alpha x)."""
    x = at.x(1)
    scaled = at.op("Mul", x, at.scalar(at.number("alpha", 1.702), like=x))
    s, one = at.op("Sigmoid", scaled), at.scalar(1, like=x)
    slope = at.op("Mul", s, at.op("Add", one, at.op("Mul", scaled, at.op("Sub", one, s))))
    return (at.op("Mul", at.x(0), slope),)


def _divide(at: ForwardNode) -> Sequence[str]:
    """Inputs: dy, dividend, divisor. The rule of Div reads the quotient, which the op is not given."""
    quotient = at.op("Div", at.x(1), at.x(2))
    node = helper.make_node("Div", [at.x(0), at.x(1), at.x(2), quotient], list(at.node.output), at.node.name)
    return _ByRule("Div", (1, 2), output=3)(replace(at, node=node))


def _dropout(at: ForwardNode) -> Sequence[str]:
    """Inputs: dy, mask, ratio, training_mode."""
    ratio, training = at.constant_input(2), at.constant_input(3)
    if training is not None and not training:
        return (at.x(0),)
    keep_ratio = 1 - (0.5 if ratio is None else float(ratio))
    zero, factor = at.scalar(0, like=at.x(0)), at.scalar(1 / keep_ratio if keep_ratio else 0, like=at.x(0))
    return (at.op("Where", at.x(1), at.op("Mul", at.x(0), factor), zero),)


# ---------------------------------------------------------------- losses and normalisation


def _cross_entropy(at: ForwardNode) -> Sequence[str]:
    """Emit (softmax - one_hot(label)) weight dy, over the sum of the weights if the loss is a mean.

    Inputs: dy, log_prob [n, classes, ..], label [n, ..], weight [classes], ignore_index, bias.
    """
    bias, at = at.x(5), label_loss(at, labels=2, ignore_index=4)
    log_probabilities, labels = at.x(1), at.x(2)
    if at.rank(log_probabilities) < 2:
        raise UnsupportedModel(
            "log probabilities without an axis of classes", at=at.place, fix="give them as [n, classes, ..]"
        )
    classes = at.shape(log_probabilities)[1]
    if not isinstance(classes, int):
        raise UnsupportedModel("the number of classes is unknown", at=at.place, fix="export it fixed")
    counts = _label_mask(at, labels)
    zero_one = at.build.constant(np.array([0, 1], at.types[log_probabilities].dtype))
    depth = at.build.constant(np.array(classes, np.int64))
    is_label = at.op("OneHot", labels, depth, zero_one, axis=1)
    slope = at.op("Sub", at.op("Exp", log_probabilities), is_label)
    share = at.op("Mul", counts, at.x(0))
    if at.attribute("reduction", "mean") == "mean":
        share = at.op("Div", share, _total(at, labels, counts))
    gradient = at.op("Mul", slope, at.op("Unsqueeze", share, at.build.ints(1)))
    return (at.op("Add", gradient, bias) if bias else gradient,)


def _total(at: ForwardNode, labels: str, counts: str) -> str:
    """Return what a mean divides by: where every label counts 1, that follows from their number alone."""
    if at.attribute("ignore_index") is None and not at.x(3):
        return at.op("Cast", at.op("Size", labels), to=at.types[at.x(1)].element)
    return at.op("ReduceSum", counts, keepdims=0)


def _label_mask(at: ForwardNode, labels: str) -> str:
    """Return what each label counts: its weight, or 1; 0 where it is ignored."""
    like, dtype = at.x(1), at.types[labels].dtype
    index = at.build.constant(np.array(at.integer("ignore_index", -1), dtype))  # -1 is no label
    mask = at.op("Not", at.op("Equal", labels, index))
    ones = at.op("Cast", mask, to=at.types[like].element)
    if not at.x(3):
        return ones
    safe = at.op("Where", mask, labels, at.build.constant(np.array(0, dtype)))
    return at.op("Mul", ones, at.op("Gather", at.x(3), safe, axis=0))


def _rms_normalization(at: ForwardNode) -> Sequence[str]:
    """Emit, for n = x inverse and g = dy scale: inverse (g - n mean(g n)), and sum(dy n)."""
    dy, x, scale = at.x(0), at.x(1), at.x(2)
    axes = at.build.ints(*normalized_axes(at, x))
    inverse = inverse_root_mean_square(at, x)
    normal, g = at.op("Mul", x, inverse), at.op("Mul", dy, scale)
    tilt = at.op("ReduceMean", at.op("Mul", g, normal), axes, keepdims=1)
    dx = at.op("Mul", at.op("Sub", g, at.op("Mul", normal, tilt)), inverse)
    return dx, at.unbroadcast(at.op("Mul", dy, normal), x, scale)


# ---------------------------------------------------------------- indexing and shapes


def _gather_elements(at: ForwardNode) -> Sequence[str]:
    """Inputs: dy, the shape, indices, and the tensor that was read."""
    return _ByRule("GatherElements", (3, 2))(at)


def _gather_nd(at: ForwardNode) -> Sequence[str]:
    """Inputs: shape, indices, dy."""
    if at.integer("batch_dims", 0):
        raise UnsupportedModel("a GatherNDGrad with batch axes", at=at.place, fix="gather without batch_dims")
    zero = TensorProto(data_type=at.types[at.x(2)].element, dims=[1])
    zero.raw_data = bytes(at.types[at.x(2)].dtype.itemsize)
    zeros = at.op("ConstantOfShape", at.x(0), value=zero)
    return (at.op("ScatterND", zeros, at.x(1), at.x(2), reduction="add"),)


def _broadcast_axes(at: ForwardNode) -> Sequence[str]:
    """Emit the axes along which each of two tensors was repeated. Inputs 2 and 3 are the tensors."""
    shapes = [at.shape(at.x(2)), at.shape(at.x(3))]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return [
        # Where both sizes are 1 there is nothing to sum, unless the axis has to go.
        at.build.ints(
            *(axis for axis in range(rank) if shape[axis] == 1 and (other[axis] != 1 or axis < axes_output))
        )
        for shape, other, axes_output in (
            (padded[0], padded[1], rank - len(shapes[0])),
            (padded[1], padded[0], rank - len(shapes[1])),
        )
    ]


# By op type, in whichever domain onnxruntime has it.
GRADIENT_OPS: Mapping[str, Expansion] = {
    "AveragePoolGrad": _ByRule("AveragePool", (1,)),
    "BatchNormalizationGrad": _ByRule("BatchNormalization", (1, 2, 2), attributes={"training_mode": 1}),
    "BiasFastGeluGrad_dX": _Biased({"approximate": "tanh"}),
    "BiasGeluGrad_dX": _Biased(),
    "BroadcastGradientArgs": _broadcast_axes,
    "ConvGrad": _ByRule("Conv", (1, 2, 2)),
    "ConvTransposeGrad": _ByRule("ConvTranspose", (1, 2, 2)),
    "DivGrad": _divide,
    "DropoutGrad": _dropout,
    "FastGeluGrad": _ByRule("Gelu", (1,), attributes={"approximate": "tanh"}),
    "GatherElementsGrad": _gather_elements,
    "GatherGrad": _ByRule("Gather", (3, 1), dy=2),
    "GatherNDGrad": _gather_nd,
    "GeluGrad": _ByRule("Gelu", (1,)),
    "LayerNormalizationGrad": _ByRule("LayerNormalization", (1, 2, 2)),
    "LeakyReluGrad": _ByRule("LeakyRelu", (1,), output=1),
    "LogSoftmaxGrad_13": _ByRule("LogSoftmax", (1,), output=1),
    "MaxPoolGrad": _ByRule("MaxPool", (2,)),
    "QuickGeluGrad": _quick_gelu,
    "ReluGrad": _ByRule("Relu", (1,), output=1),
    "SigmoidGrad": _ByRule("Sigmoid", (1,), output=1),
    "SimplifiedLayerNormalizationGrad": _rms_normalization,
    "SliceGrad": _ByRule("Slice", (6, 2, 3, 4, 5)),
    "SoftmaxCrossEntropyLossGrad": _cross_entropy,
    "SoftmaxCrossEntropyLossInternalGrad": _cross_entropy,
    "SoftmaxGrad_13": _ByRule("Softmax", (1,), output=1),
    "TanhGrad": _ByRule("Tanh", (1,), output=1),
}
