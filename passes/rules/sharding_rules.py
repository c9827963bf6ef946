"""The table: op type -> sharding rule. An op that is not here runs whole on every rank.

The same rules count the operations of one step, node by node. What they know of a node is in NodeFacts, where
names are not: nodes that differ by their names alone have one rule, and are decided alike.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts, TensorFacts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.passes.rules import rules_convolution as convolution
from partc.passes.rules import rules_elementwise as point
from partc.passes.rules import rules_indexing as indexing
from partc.passes.rules import rules_parts as parts
from partc.passes.rules import rules_shape as shape
from partc.passes.rules.rules_elementwise import Rule, elementwise
from partc.passes.rules.sharding_rule import ShardingRule

NONLINEAR = frozenset(
    """
    Abs Acos Acosh And Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Cos Cosh
    Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
    LessOrEqual Log Mish Mod Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Xor
    """.split()
)

RULES: dict[str, Rule] = {
    **{op: elementwise() for op in sorted(NONLINEAR)},
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
    "DepthToSpace": shape.along(shape.image_axes),
    "SpaceToDepth": shape.along(shape.image_axes),
    "ReverseSequence": shape.reverse_sequence,
    "TopK": shape.along(shape.named_axis, linear=False),
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


@dataclass(frozen=True, slots=True, eq=False)
class NodeFacts:
    """All that is known of one node, by whatever name. Equal ones are one object.

    attrs  those that rules may ask for: of an op that has a rule
    zeros  the inputs that are zero everywhere
    rule   its sharding rule, or None: it must run whole
    """

    op: str
    attrs: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    zeros: frozenset[int]
    rule: ShardingRule | None

    def attribute(self, name: str, default: object = None) -> object:
        """Return an attribute's value, or what stands for it where it is left out."""
        return dict(self.attrs).get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class _Uncompared:
    """The value of an attribute that is like no other's, such as a tensor."""

    value: object


def node_facts(node: gs.Node, facts: Facts, zeros: frozenset[str] = frozenset()) -> NodeFacts:
    """Return what is known of a node. `zeros`: tensors that are zero everywhere.

    Needs: the node changes no more.
    """
    found = facts.nodes.get(id(node))
    if found is None:
        found = facts.nodes[id(node)] = node, _find_facts(node, facts)
    known = found[1]
    assert isinstance(known, NodeFacts)
    if not zeros or not any(tensor.name in zeros for tensor in node.inputs):
        return known
    return _with_zeros(known, frozenset(i for i, tensor in enumerate(node.inputs) if tensor.name in zeros))


def rule_of(node: gs.Node, facts: Facts) -> ShardingRule | None:
    """Return the node's sharding rule, or None: it must run whole. Needs: the node changes no more."""
    return node_facts(node, facts).rule


def _find_facts(node: gs.Node, facts: Facts) -> NodeFacts:
    rule = _find_rule(node.op, node.domain)
    attrs = () if rule is None else tuple((k, _comparable(node.attrs[k])) for k in sorted(node.attrs))
    return _node_facts(
        node.op,
        rule,
        node.domain if rule is not None else None,
        attrs,
        tuple([facts.of(tensor.name) for tensor in node.inputs]),
        tuple([facts.of(tensor.name) for tensor in node.outputs]),
    )


@lru_cache(maxsize=1 << 14)
def _node_facts(
    op: str,
    rule: Rule | None,
    domain: str | None,
    attrs: tuple[tuple[str, Any], ...],
    inputs: tuple[TensorFacts, ...],
    outputs: tuple[TensorFacts, ...],
) -> NodeFacts:
    """Return the one object. Its rule is that of a node which differs from all of them by names alone."""
    plain = {name: _plain(value) for name, value in attrs}
    known = NodeFacts(op, tuple(plain.items()), inputs, outputs, frozenset(), None)
    if rule is None:
        return known
    sources, results = (
        {f"{side}{index}" if tensor.is_named else "": tensor for index, tensor in enumerate(tensors)}
        for side, tensors in (("input", inputs), ("output", outputs))
    )
    operands, node_outputs = (
        [gs.Variable(f"{side}{index}" if tensor.is_named else "") for index, tensor in enumerate(tensors)]
        for side, tensors in (("input", inputs), ("output", outputs))
    )
    node = gs.Node(op, "node", plain, operands, node_outputs, domain)
    return replace(known, rule=rule(node, Facts.alone(sources | results)))


@lru_cache(maxsize=1 << 14)
def _with_zeros(known: NodeFacts, zeros: frozenset[int]) -> NodeFacts:
    return replace(known, zeros=zeros)


def _comparable(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple([_comparable(each) for each in value])
    return value if isinstance(value, int | float | str | bytes) else _Uncompared(value)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, _Uncompared) else value


def _find_rule(op: str, domain: str | None) -> Rule | None:
    if domain == FUNCTION_DOMAIN:
        return next((rule for name, rule in GRADIENT_RULES.items() if op.startswith(name)), None)
    return RULES.get(op) if domain in (None, "", "ai.onnx") else None


def count_flops(training: TrainingGraph, facts: Facts) -> dict[str, int]:
    """Return node name -> floating-point operations of one device's step under the sizes of `facts`."""
    rules = {node.name: rule_of(node, facts) for node in training.graph.nodes}
    return {name: rule.flops for name, rule in rules.items() if rule is not None}
