"""Say ops that normalise an axis in primitives, whose sums over that axis can be made rank by rank.

before   y = Softmax (x)        after   m = ReduceMax (x)     c = Sub (x, m)     e = Exp (c)
                                        s = ReduceSum (e)     y = Div (e, s)

A sharding rule keeps whole what Softmax mixes. In the primitives m is partial(max) and s partial(sum)
where the axis is split, and all else runs on the rank's own part. Gradients are primitives already, as
`partc grad` writes them, but for class labels that pick from the axis: expand_labels.py.

Means and deviations are written as partc's gradient rules write them, so that `simplify` merges the two. Of
16-bit numbers, sums are made in float32, as ONNX's definitions of these ops do.

ReduceMean needs no form: over a split axis it is a partial sum as it is. ArgMax, CumSum and TopK have none.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.expand_labels import LABEL_FORMS, write_log_softmax
from partc.passes.graph.facts import Facts
from partc.passes.graph.node_writer import Form, Rewriting, accumulated_in
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.roles.find_zeros import find_zeros
from partc.passes.rules.rules_elementwise import reduced_axes
from partc.runtime.errors import UnsupportedModel


def can_expand(node: gs.Node, facts: Facts) -> bool:
    """Tell whether `expand` has a form for a node."""
    is_standard = node.domain in (None, "", "ai.onnx")
    return is_standard and node.op in FORMS and FORMS[node.op].fits(node, facts)


def expand(training: TrainingGraph, nodes: Collection[str], facts: Facts) -> dict[str, list[str]]:
    """Replace nodes by primitives, in place; return node -> the names of its primitives, in order.

    Their results keep names, types and shapes. Needs: opset 18 or later. Facts must be inferred again.
    Raises UnsupportedModel for a node that `can_expand` refuses; the graph is then as it was.
    """
    graph, chosen = training.graph, set(nodes)
    for node in graph.nodes:
        if node.name in chosen and not can_expand(node, facts):
            raise UnsupportedModel(
                f"{node.op} cannot be written in ops that work on parts of an axis",
                at=f"node {node.name!r}",
                fix="split another dimension of it, or none",
            )
    taken = {*graph.tensors(), *(node.name for node in graph.nodes)}
    zeros = find_zeros(graph, facts)
    expanded: dict[str, list[str]] = {}
    result: list[gs.Node] = []
    for node in graph.nodes:
        if node.name not in chosen:
            result.append(node)
            continue
        at = Rewriting(node, facts, zeros, taken)
        FORMS[node.op].write(at)
        expanded[node.name] = [written.name for written in at.nodes]
        result += at.nodes
    graph.nodes = result
    return expanded


# ---------------------------------------------------------------- softmax


def _softmax(at: Rewriting) -> None:
    x = at.x(0)
    axes = at.ints(at.axis(-1, len(at.shape(0))))
    wide = at.cast(x, accumulated_in(x.dtype))
    powers = at.op("Exp", at.op("Sub", wide, at.op("ReduceMax", wide, axes, keepdims=1)))
    at.narrow("Div", powers, at.op("ReduceSum", powers, axes, keepdims=1), dtype=x.dtype, out=at.y())


def _log_softmax(at: Rewriting) -> None:
    write_log_softmax(at, at.x(0), at.axis(-1, len(at.shape(0))), at.y())


# ---------------------------------------------------------------- reductions


def _reduces(node: gs.Node, facts: Facts) -> bool:
    axes = reduced_axes(node, facts, len(facts.shape(node.inputs[0].name)))
    return bool(axes)


def _reduction(at: Rewriting, op: str, x: gs.Tensor) -> gs.Tensor:
    """Reduce as the node does, by another op."""
    axes = sorted(_reduced(at))
    return at.op(op, x, at.ints(*axes), keepdims=at.node.attrs.get("keepdims", 1))


def _reduced(at: Rewriting) -> set[int]:
    rank = len(at.shape(0))
    if "axes" in at.node.attrs or not at.reads(1):
        axes = at.node.attrs.get("axes", range(rank))
    else:
        known = at.facts.value(at.x(1).name)
        assert known is not None
        axes = known.reshape(-1).tolist() or range(rank)
    return {int(axis) % rank for axis in axes}


def _reduce_log_sum_exp(at: Rewriting) -> None:
    """Infinities are not taken from each other."""
    x, axes = at.x(0), sorted(_reduced(at))
    wide = at.cast(x, accumulated_in(x.dtype))
    largest = at.op("ReduceMax", wide, at.ints(*axes), keepdims=1)
    is_infinite = at.op("IsInf", largest, dtype=np.dtype(np.bool_))
    level = at.op("Where", is_infinite, at.scalar(0, wide.dtype), largest, dtype=wide.dtype)
    total = _reduction(at, "ReduceSum", at.op("Exp", at.op("Sub", wide, level)))
    shift = level if at.node.attrs.get("keepdims", 1) else at.op("Squeeze", level, at.ints(*axes))
    at.narrow("Add", at.op("Log", total), shift, dtype=x.dtype, out=at.y())


def _after(reduction: str, last: str) -> Callable[[Rewriting], None]:
    """Make the form of a reduction that ends in a point-by-point op."""

    def write(at: Rewriting) -> None:
        x = at.x(0)
        total = _reduction(at, reduction, at.cast(x, accumulated_in(x.dtype)))
        at.narrow(last, total, dtype=x.dtype, out=at.y())

    return write


# ---------------------------------------------------------------- normalisation


def _centred(
    at: Rewriting, x: gs.Tensor, axes: gs.Tensor, widen: Callable[[gs.Tensor], gs.Tensor], keepdims: int
) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor]:
    """Return mean, x - mean and variance: in two passes, so that nothing large is subtracted."""
    mean = at.op("ReduceMean", x, axes, keepdims=keepdims)
    centred = at.op("Sub", x, widen(mean))
    variance = at.op("ReduceMean", at.op("Mul", centred, centred), axes, keepdims=keepdims)
    return mean, centred, variance


def _inverse_deviation(at: Rewriting, variance: gs.Tensor) -> gs.Tensor:
    epsilon = at.scalar(at.number("epsilon", 1e-5), variance.dtype)
    return at.op("Reciprocal", at.op("Sqrt", at.op("Add", variance, epsilon)))


def _scaled(at: Rewriting, normal: gs.Tensor, scale: gs.Tensor, bias: gs.Tensor | None) -> None:
    """normal scale + bias, in the element type of x."""
    normal = at.cast(normal, at.x(0).dtype)
    if bias is None:
        at.op("Mul", normal, scale, out=at.y())
    else:
        at.op("Add", at.op("Mul", normal, scale), bias, out=at.y())


def _layer_normalization(at: Rewriting) -> None:
    rank = len(at.shape(0))
    wide = at.cast(at.x(0), accumulated_in(at.x(0).dtype))
    axes = at.ints(*range(at.axis(-1, rank), rank))
    mean, centred, variance = _centred(at, wide, axes, lambda tensor: tensor, 1)
    inverse = _inverse_deviation(at, variance)
    _scaled(at, at.op("Mul", centred, inverse), at.x(1), at.x(2) if at.reads(2) else None)
    for index, statistic in ((1, mean), (2, inverse)):
        if at.makes(index):
            at.cast(statistic, at.y(index).dtype, at.y(index))


def _per_channel(at: Rewriting, vector: gs.Tensor) -> gs.Tensor:
    """Shape a vector [c] so that it broadcasts over [n, c, ..]."""
    rank = len(at.shape(0))
    return at.op("Unsqueeze", vector, at.ints(*range(1, rank - 1))) if rank > 2 else vector


def _space(node: gs.Node, facts: Facts) -> bool:
    return len(facts.shape(node.inputs[0].name)) > 2


def _trains(node: gs.Node, facts: Facts) -> bool:
    return bool(node.attrs.get("training_mode", 0)) and len(facts.shape(node.inputs[0].name)) > 1


def _batch_normalization(at: Rewriting) -> None:
    """y in one pass: BatchNormalization by given statistics mixes nothing.

    running' = running momentum + statistic (1 - momentum), the variance divided by n
    """
    x = at.cast(at.x(0), accumulated_in(at.x(0).dtype))
    axes = at.ints(0, *range(2, len(at.shape(0))))
    mean, centred, variance = _centred(at, x, axes, lambda tensor: _per_channel(at, tensor), 0)
    scale, bias = (at.cast(at.x(index), x.dtype) for index in (1, 2))
    zero = at.op("Sub", variance, variance)
    epsilon = at.number("epsilon", 1e-5)
    normal = at.op(
        "BatchNormalization",
        *(centred, scale, bias, zero, variance),
        out=at.y() if x is at.x(0) else None,
        epsilon=epsilon,
    )
    if x is not at.x(0):
        at.cast(normal, at.y().dtype, at.y())
    momentum = at.number("momentum", 0.9)
    for index, statistic in ((1, mean), (2, variance)):
        if at.makes(index):
            running = at.x(index + 2)
            old = at.op("Mul", running, at.scalar(momentum, running.dtype))
            new = at.op("Mul", statistic, at.scalar(1 - momentum, statistic.dtype))
            at.op("Add", old, at.cast(new, running.dtype), out=at.y(index))


def _instance_normalization(at: Rewriting) -> None:
    wide = at.cast(at.x(0), accumulated_in(at.x(0).dtype))
    axes = at.ints(*range(2, len(at.shape(0))))
    _, centred, variance = _centred(at, wide, axes, lambda tensor: tensor, 1)
    normal = at.op("Mul", centred, _inverse_deviation(at, variance))
    _scaled(at, normal, _per_channel(at, at.x(1)), _per_channel(at, at.x(2)))


def _scales_channels(node: gs.Node, facts: Facts) -> bool:
    shape = facts.shape(node.inputs[0].name)
    return len(shape) > 2 and facts.shape(node.inputs[1].name) == shape[1:2]


def _group_normalization(at: Rewriting) -> None:
    """In groups [n, g, c / g, ..], mixed from axis 2 on."""
    x, rank = at.x(0), len(at.shape(0))
    wide = at.cast(x, accumulated_in(x.dtype))
    sizes = at.op("Shape", x, dtype=np.dtype(np.int64))
    space = at.op("Slice", sizes, at.ints(2), at.ints(rank))
    groups = at.op("Concat", at.ints(0, at.node.attrs["num_groups"], -1), space, axis=0)
    grouped = at.op("Reshape", wide, groups)
    axes = at.ints(*range(2, rank + 1))
    _, centred, variance = _centred(at, grouped, axes, lambda tensor: tensor, 1)
    normal = at.op("Mul", centred, _inverse_deviation(at, variance))
    normal = at.op("Reshape", normal, sizes)
    _scaled(at, normal, _per_channel(at, at.x(1)), _per_channel(at, at.x(2)))


FORMS: Mapping[str, Form] = {
    "Softmax": Form(_softmax),
    "LogSoftmax": Form(_log_softmax),
    "ReduceLogSumExp": Form(_reduce_log_sum_exp, _reduces),
    "ReduceLogSum": Form(_after("ReduceSum", "Log"), _reduces),
    "ReduceL2": Form(_after("ReduceSumSquare", "Sqrt"), _reduces),
    "LayerNormalization": Form(_layer_normalization),
    "BatchNormalization": Form(_batch_normalization, _trains),
    "InstanceNormalization": Form(_instance_normalization, _space),
    "GroupNormalization": Form(_group_normalization, _scales_channels),
    **LABEL_FORMS,
}
