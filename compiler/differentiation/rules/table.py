"""The table: op type -> gradient rule. To teach partc an op, write its rule and add it here.

A standard op without a rule is replaced by the function that ONNX defines it as, where there is one.
"""

from collections.abc import Mapping

from partc.compiler.differentiation.forward_node import Rule
from partc.compiler.differentiation.rules import (
    activations,
    einsum,
    elementwise,
    indexing,
    normalization,
    product,
    reduction,
    resizing,
    scattering,
    shape,
    slicing,
    window,
)

RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **activations.RULES,
    **shape.RULES,
    **slicing.RULES,
    **resizing.RULES,
    **indexing.RULES,
    **scattering.RULES,
    **reduction.RULES,
    **einsum.RULES,
    **product.RULES,
    **window.RULES,
    **normalization.RULES,
}

# Float inputs that a gradient never reaches, by op: statistics, bounds and ratios.
CONSTANT_INPUTS: Mapping[str, frozenset[int]] = {
    "BatchNormalization": frozenset({3, 4}),
    "CastLike": frozenset({1}),
    "Clip": frozenset({1, 2}),
    "Dropout": frozenset({1}),
    "MelWeightMatrix": frozenset({3, 4}),
    "NegativeLogLikelihoodLoss": frozenset({2}),
    "Pad": frozenset({2}),
    "Resize": frozenset({1, 2}),
    "RotaryEmbedding": frozenset({1, 2}),
    "SoftmaxCrossEntropyLoss": frozenset({2}),
}

# Of these, the ops whose outputs change with such an input all the same.
MOVED_BY_CONSTANTS = frozenset(
    {"Clip", "NegativeLogLikelihoodLoss", "Pad", "RotaryEmbedding", "SoftmaxCrossEntropyLoss"}
)

# Ops with float outputs that do not change when their inputs change a little.
FLAT_OPS = frozenset(
    {
        "Bernoulli",
        "BitCast",
        "Ceil",
        "ConstantOfShape",
        "EyeLike",
        "Floor",
        "Hardmax",
        "OneHot",
        "RandomNormalLike",
        "RandomUniformLike",
        "Range",
        "Round",
        "Sign",
        "Unique",
    }
)
