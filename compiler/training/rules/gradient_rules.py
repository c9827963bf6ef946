"""The table: op type -> gradient rule. To teach partc an op, write its rule and add it here.

A standard op without a rule is replaced by the function that ONNX defines it as, where there is one.
"""

from collections.abc import Mapping

from partc.compiler.training.rules import (
    rules_elementwise,
    rules_indexing,
    rules_normalization,
    rules_product,
    rules_reduction,
    rules_shape,
    rules_window,
)
from partc.compiler.training.rules.forward_node import Rule

RULES: Mapping[str, Rule] = {
    **rules_elementwise.RULES,
    **rules_shape.RULES,
    **rules_indexing.RULES,
    **rules_reduction.RULES,
    **rules_product.RULES,
    **rules_window.RULES,
    **rules_normalization.RULES,
}

# Float inputs that a gradient never reaches, by op: statistics, bounds and ratios.
CONSTANT_INPUTS: Mapping[str, frozenset[int]] = {
    "BatchNormalization": frozenset({3, 4}),
    "CastLike": frozenset({1}),
    "Clip": frozenset({1, 2}),
    "Dropout": frozenset({1}),
    "Pad": frozenset({2}),
}

# Ops with float outputs that do not change when their inputs change a little.
FLAT_OPS = frozenset(
    {
        "Ceil",
        "ConstantOfShape",
        "Floor",
        "OneHot",
        "RandomNormalLike",
        "RandomUniformLike",
        "Range",
        "Round",
        "Sign",
    }
)
