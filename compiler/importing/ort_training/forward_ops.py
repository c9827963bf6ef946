"""Forward ops of onnxruntime's own, as standard ops: fused activations, normalisations, products.

Source: onnxruntime's documentation of its contrib operators (docs/ContribOperators.md, 1.19).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx
from onnx import helper

from partc.compiler.differentiation.expansions.table import EXPANSIONS, Expansion
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.rules.normalization import expand_training_batch_normalization
from partc.runtime.errors import UnsupportedModel


def _gelu(at: ForwardNode) -> Sequence[str]:
    return (at.op("Gelu", _add_bias(at)),)


def _fast_gelu(at: ForwardNode) -> Sequence[str]:
    return (at.op("Gelu", _add_bias(at), approximate="tanh"),)


def _add_bias(at: ForwardNode) -> str:
    return at.op("Add", at.x(0), at.x(1)) if at.x(1) else at.x(0)


def _quick_gelu(at: ForwardNode) -> Sequence[str]:
    """Emit x sigmoid(alpha x)."""
    slope = at.scalar(at.number("alpha", 1.702), like=at.x(0))
    return (at.op("Mul", at.x(0), at.op("Sigmoid", at.op("Mul", slope, at.x(0)))),)


def _batch_normalization(at: ForwardNode) -> Sequence[str]:
    expand_training_batch_normalization(at)
    return ()


def _rms_normalization(at: ForwardNode) -> Sequence[str]:
    """Emit scale x / sqrt(mean(x^2) + epsilon), and what x is multiplied by."""
    inverse = inverse_root_mean_square(at, at.x(0))
    return at.op("Mul", at.op("Mul", at.x(0), inverse), at.x(1)), inverse


def inverse_root_mean_square(at: ForwardNode, x: str) -> str:
    """Emit 1 / sqrt(mean(x^2) + epsilon) over the axes that the node normalises, kept with size 1."""
    epsilon = at.scalar(at.number("epsilon", 1e-5), like=x)
    level = at.op("ReduceMean", at.op("Mul", x, x), at.build.ints(*normalized_axes(at, x)), keepdims=1)
    return at.op("Reciprocal", at.op("Sqrt", at.op("Add", level, epsilon)))


def normalized_axes(at: ForwardNode, x: str) -> tuple[int, ...]:
    """Return the axes from attribute `axis` to the last, counted from the back where possible."""
    first = at.integer("axis", -1)
    return tuple(range(first, 0)) if first < 0 else tuple(range(first, at.rank(x)))


def _concat(at: ForwardNode) -> Sequence[str]:
    return (at.op("Concat", *at.node.input, axis=at.integer("axis", 0)),)


def _split(at: ForwardNode) -> Sequence[str]:
    """Inputs: the tensor, lengths that are not read, and the tensors that were joined."""
    axis, parts = at.integer("axis", 0), at.node.input[2:]
    sizes = [at.shape(part)[axis] for part in parts]
    if all(isinstance(size, int) for size in sizes):
        lengths = at.build.ints(*(size for size in sizes if isinstance(size, int)))
    else:
        ends = {"start": axis, "end": axis + 1} if axis != -1 else {"start": axis}
        lengths = at.op("Concat", *(at.op("Shape", part, **ends) for part in parts), axis=0)
    return at.build.call("Split", (at.x(0), lengths), len(parts), axis=axis)


def _scale(at: ForwardNode) -> Sequence[str]:
    factor = at.op("Cast", at.x(1), to=at.types[at.x(0)].element)
    return (at.op("Div" if at.integer("scale_down", 0) else "Mul", at.x(0), factor),)


def _fused_matmul(at: ForwardNode) -> Sequence[str]:
    """Emit alpha A B, either transposed in its last two axes."""
    if at.integer("transBatchA", 0) or at.integer("transBatchB", 0):
        raise UnsupportedModel(
            "a FusedMatMul that transposes batch axes",
            at=at.place,
            fix="generate the artifacts without MatMul-Transpose fusion",
        )
    operands = [
        _transpose(at, at.x(index)) if at.integer(name, 0) else at.x(index)
        for index, name in enumerate(("transA", "transB"))
    ]
    product = at.op("MatMul", *operands)
    alpha = at.number("alpha", 1.0)
    return (product if alpha == 1.0 else at.op("Mul", product, at.scalar(alpha, like=at.x(0))),)


def _transpose(at: ForwardNode, tensor: str) -> str:
    rank = at.rank(tensor)
    if rank < 2:
        return tensor
    return at.op("Transpose", tensor, perm=(*range(rank - 2), rank - 1, rank - 2))


def _reduce_sum(at: ForwardNode) -> Sequence[str]:
    noop = at.integer("noop_with_empty_axes", 0)
    keepdims = at.integer("keepdims", 1)
    return (at.op("ReduceSum", at.x(0), at.x(1), keepdims=keepdims, noop_with_empty_axes=noop),)


def label_loss(at: ForwardNode, labels: int, ignore_index: int) -> ForwardNode:
    """Return a node whose constant input `ignore_index` has become an attribute, as in the standard."""
    node = onnx.NodeProto()
    node.CopyFrom(at.node)
    if at.x(ignore_index):
        value = at.constant_input(ignore_index)
        assert value is not None
        node.attribute.append(helper.make_attribute("ignore_index", int(value.item())))
    del node.input[labels + 2 :]
    return replace(at, node=node)


def _cross_entropy(at: ForwardNode) -> Sequence[str]:
    return EXPANSIONS["SoftmaxCrossEntropyLoss"](label_loss(at, labels=1, ignore_index=3))


# By op type, in onnxruntime's domain.
FORWARD_OPS: Mapping[str, Expansion] = {
    "BatchNormInternal": _batch_normalization,
    "BiasGelu": _gelu,
    "ConcatTraining": _concat,
    "FastGelu": _fast_gelu,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "QuickGelu": _quick_gelu,
    "ReduceSumTraining": _reduce_sum,
    "Scale": _scale,
    "SimplifiedLayerNormalization": _rms_normalization,
    "SoftmaxCrossEntropyLossInternal": _cross_entropy,
    "SplitTraining": _split,
    "TransposeMatMul": _fused_matmul,
}
# In the standard's domain: written out because partc splits their parts, not them.
STANDARD_OPS: Mapping[str, Expansion] = {
    "SoftmaxCrossEntropyLoss": EXPANSIONS["SoftmaxCrossEntropyLoss"],
}
