"""The table: op type -> sharding rule. An op that is not here runs whole on every rank.

The same rules count the operations of one step, node by node.
"""

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.passes.rules import rules_along as along
from partc.passes.rules import rules_convolution as convolution
from partc.passes.rules import rules_elementwise as point
from partc.passes.rules import rules_indexing as indexing
from partc.passes.rules import rules_parts as parts
from partc.passes.rules import rules_shape as shape
from partc.passes.rules.rules_elementwise import Rule, elementwise
from partc.passes.rules.sharding_rule import ShardingRule

NONLINEAR = """
    Abs Acos Acosh And Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Cos Cosh
    Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
    LessOrEqual Log Mish Mod Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Xor
"""

RULES: dict[str, Rule] = {
    **{op: elementwise() for op in NONLINEAR.split()},
    "Add": elementwise("each"),
    "Sub": elementwise("each"),
    "Sum": elementwise("each"),
    "Mul": elementwise("product"),
    "Div": elementwise("product", linear=[0], divides=[1]),
    "Max": elementwise(picks="max"),
    "Min": elementwise(picks="min"),
    "Neg": elementwise("each"),
    "Identity": elementwise("each", moves=True),
    "Where": elementwise("each", linear=[1, 2]),
    "Clip": elementwise(count=1),
    "Cast": point.cast,
    "ReduceSum": point.reduce("sum"),
    "ReduceMean": point.reduce("mean"),
    "ReduceMax": point.reduce("max"),
    "ReduceMin": point.reduce("min"),
    "ReduceSumSquare": point.reduce("sum", linear=False),
    "ReduceL1": point.reduce("sum", linear=False),
    "ReduceL2": point.reduce(None),
    "ReduceProd": point.reduce(None),
    "ReduceLogSum": point.reduce(None),
    "ReduceLogSumExp": point.reduce(None),
    "ArgMax": point.reduce(None),
    "ArgMin": point.reduce(None),
    "Softmax": point.along_axis(),
    "LogSoftmax": point.along_axis(),
    "CumSum": point.along_axis(linear=True),
    "MatMul": point.matmul,
    "Gemm": point.gemm,
    "Einsum": point.einsum,
    "Reshape": shape.reshape,
    "Flatten": shape.reshape,
    "Squeeze": shape.reshape,
    "Unsqueeze": shape.reshape,
    "Transpose": shape.transpose,
    "Expand": shape.expand,
    "ConstantOfShape": shape.constant_of_shape,
    "Concat": parts.concat,
    "Split": parts.split,
    "Slice": shape.window,
    "Pad": shape.window,
    "Tile": shape.window,
    "Trilu": shape.window,
    "Resize": shape.window,
    "DepthToSpace": along.along(along.image_axes),
    "SpaceToDepth": along.along(along.image_axes),
    "ReverseSequence": along.reverse_sequence,
    "TopK": along.along(along.named_axis, linear=False),
    "Hardmax": point.along_axis(),
    "Mean": elementwise("each"),
    "Gather": indexing.gather,
    "GatherElements": indexing.gather_elements,
    "GatherND": indexing.gather_nd,
    "ScatterElements": indexing.scatter_elements,
    "ScatterND": indexing.scatter_nd,
    "OneHot": indexing.one_hot,
    "Conv": convolution.convolution,
    "ConvTranspose": convolution.transposed_convolution,
    "MaxPool": convolution.pool(linear=False),
    "AveragePool": convolution.pool(linear=True),
    "GlobalAveragePool": convolution.global_pool("mean"),
    "GlobalMaxPool": convolution.global_pool("max"),
    "LpPool": convolution.pool(linear=False),
    "GlobalLpPool": convolution.global_pool(None),
    "LRN": convolution.local_response,
    "BatchNormalization": convolution.batch_normalization,
    "LayerNormalization": convolution.layer_normalization,
}

# Gradient ops are model-local functions, one per set of attributes: their names share a beginning.
GRADIENT_RULES: dict[str, Rule] = {
    "ConvWeightGrad": convolution.weight_gradient,
    "ConvDataGrad": convolution.data_gradient,
    "MaxPoolGrad": convolution.window_gradient,
    "AveragePoolGrad": convolution.window_gradient,
    "LpPoolGrad": convolution.window_gradient,
    "LRNGrad": convolution.response_gradient,
}


def is_sum_rows(node: gs.Node) -> bool:
    """Tell whether a node sums indexed slices."""
    return bool(node.op == SUM_ROWS and node.domain == FUNCTION_DOMAIN)


def rule_of(node: gs.Node, facts: Facts) -> ShardingRule | None:
    """Return the node's sharding rule, or None: it must run whole. Needs: the node changes no more."""
    if id(node) not in facts.rules:
        facts.rules[id(node)] = (node, _find_rule(node, facts))
    return facts.rules[id(node)][1]


def _find_rule(node: gs.Node, facts: Facts) -> ShardingRule | None:
    if node.domain == FUNCTION_DOMAIN:
        for name, rule in GRADIENT_RULES.items():
            if node.op.startswith(name):
                return rule(node, facts)
        return None
    if node.domain not in (None, "", "ai.onnx") or node.op not in RULES:
        return None
    return RULES[node.op](node, facts)


def count_flops(training: TrainingGraph, facts: Facts) -> dict[str, int]:
    """Return node name -> floating-point operations of one device's step under the sizes of `facts`."""
    rules = {node.name: rule_of(node, facts) for node in training.graph.nodes}
    return {name: rule.flops for name, rule in rules.items() if rule is not None}
