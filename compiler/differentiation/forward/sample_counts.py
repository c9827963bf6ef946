"""Refuse numbers of samples among constants: what is reduced over the batch, scaled by the batch it had.

    loss = Div (ReduceSum (squares), 4)        a mean over a batch of 4, and three times that over 12
    loss = ReduceSum (Div (squares, 4))        the same
    variance = Mul (ReduceMean (squares), 4/3) an unbiased one

The weight of a loss may be 1 / 4 by chance. Both graphs are the same then: a clear refusal is better than
three times the loss. Numbers are compared as floats of their element type are: 0.333 is no third.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import log, prod, sqrt

import numpy as np
import onnx

from partc.compiler.differentiation.forward.batch_axes import SYMBOLIC, BatchAxes
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.runtime.errors import UnsupportedModel

SUMS = frozenset({"ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"})
MOVING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
LINEAR = MOVING | {"Add", "Div", "Mul", "Neg", "Sub", "Sum"}
# What is one number for the whole batch stays so, whatever single entries become.
ENTRYWISE = LINEAR | {"Abs", "Clip", "Concat", "Exp", "Log", "Max", "Min", "Pow", "Relu", "Sqrt", "Where"}
BESIDE = frozenset({"Add", "Clip", "Max", "Min", "Sub"})  # compare or move by a number of samples
PASSING = ENTRYWISE | SUMS | {"ReduceMean"}
ROOTS = frozenset({"Sqrt", "ReduceL2"})
MOST_AXES = 6  # of a reduction, whose sizes are multiplied with one another
ULPS = 4


@dataclass(frozen=True)
class _Suspects:
    """Numbers that would turn a tensor into another at a batch of its own."""

    divisors: frozenset[float] = frozenset()
    factors: frozenset[float] = frozenset()  # of means: the batch makes a sum of them
    terms: frozenset[float] = frozenset()

    def __or__(self, other: "_Suspects") -> "_Suspects":
        return _Suspects(
            self.divisors | other.divisors, self.factors | other.factors, self.terms | other.terms
        )


def refuse_sample_counts(
    graph: onnx.GraphProto, constants: Mapping[str, np.ndarray], batch: BatchAxes
) -> None:
    """Raise UnsupportedModel at the first node that scales by a number of samples."""
    makers = {name: node for node in graph.node for name in node.output}
    suspects: dict[str, _Suspects] = {}
    build = NodeBuilder()
    for node in graph.node:
        at = ForwardNode(build, node, batch.before.types, constants, frozenset(), frozenset(), 0)
        known = _union(suspects[name] for name in node.input if name in suspects)
        _check_scale(at, batch, known)
        made = _suspects_of(at, batch)
        if made.divisors:
            _check_operands(at, batch, made, makers)
        if node.op_type in PASSING:
            made |= _through(at, batch, known)
        if made != _Suspects():
            suspects[node.output[0]] = made


def _union(several: Iterable[_Suspects]) -> _Suspects:
    total = _Suspects()
    for suspects in several:
        total |= suspects
    return total


def _through(at: ForwardNode, batch: BatchAxes, known: _Suspects) -> _Suspects:
    """Return the suspects of what a node makes of a tensor that has some."""
    divisors, factors = known.divisors, known.factors
    if at.node.op_type in SUMS:
        multiples = _multiples(batch, *next(iter(_reduced_axes(at, batch))))
        divisors = frozenset(n * k for n in divisors for k in multiples)
    if at.node.op_type in ROOTS:
        divisors, factors = divisors | set(map(sqrt, divisors)), factors | set(map(sqrt, factors))
    return _Suspects(divisors, factors, known.terms)


def _multiples(batch: BatchAxes, tensor: str, axes: frozenset[int]) -> set[int]:
    """Return what sizes of axes make when some of them are multiplied."""
    sizes = [batch.old_size(tensor, axis) for axis in sorted(axes)[:MOST_AXES]]
    return {prod(some) for n in range(len(sizes) + 1) for some in combinations(sizes, n)}


# ---------------------------------------------------------------- what reduces the batch


def _suspects_of(at: ForwardNode, batch: BatchAxes) -> _Suspects:
    """Return the suspects of a reduction over the batch, none of any other node."""
    for tensor, axes in _reduced_axes(at, batch):
        within = batch.counted_axes(tensor) & axes
        if not within:
            continue
        counts = {batch.size, *(batch.old_size(tensor, axis) for axis in within)}
        return _suspects(counts, _multiples(batch, tensor, axes - within), at)
    return _Suspects()


def _suspects(counts: Collection[int], multiples: Collection[int], at: ForwardNode) -> _Suspects:
    terms = frozenset(log(n) for n in counts if n > 1)
    if at.node.op_type == "ReduceMean" or (_is_loss(at) and at.attribute("reduction", "mean") == "mean"):
        unbiased = {ratio for n in counts if n > 1 for ratio in (n / (n - 1), (n - 1) / n)}
        factors = {float(n * k) for n in counts if n > 1 for k in multiples} | unbiased
        return _Suspects(factors=frozenset(factors), terms=terms)
    samples = {float(n) for n in counts} | {n - 1.0 for n in counts if n > 1}
    pairs = {power for n in counts if n > 1 for power in (n * n, n * (n - 1), n * (n - 1) / 2, (n - 1) ** 2)}
    divisors = frozenset(n * k for n in samples | pairs for k in multiples)
    roots = frozenset(map(sqrt, divisors)) if at.node.op_type in ROOTS else frozenset()
    return _Suspects(divisors=divisors | roots, terms=terms)


def _reduced_axes(at: ForwardNode, batch: BatchAxes) -> Iterable[tuple[str, frozenset[int]]]:
    """Yield tensors with those of their axes that a node sums over."""
    op_type, x = at.node.op_type, at.x(0)
    if op_type in SUMS or op_type == "ReduceMean":
        yield x, axes_of_reduction(at, batch.rank(x))
    elif op_type == "MatMul" and batch.rank(x):
        yield x, frozenset({batch.rank(x) - 1})
    elif op_type == "Gemm":
        yield x, frozenset({0 if at.integer("transA", 0) else 1})
    elif op_type == "Einsum":
        yield from _axes_of_einsum(at)
    elif _is_loss(at) and at.attribute("reduction", "mean") != "none":
        yield x, frozenset(range(batch.rank(x))) - {1}


def axes_of_reduction(at: ForwardNode, rank: int) -> frozenset[int]:
    """Return the axes that a reduction names, all where it names none."""
    if not at.x(1):
        return frozenset() if at.integer("noop_with_empty_axes", 0) else frozenset(range(rank))
    values = at.constants.get(at.x(1))
    if values is None or not rank:
        return frozenset()
    return frozenset(int(axis) % rank for axis in values.ravel()) or frozenset(range(rank))


def _axes_of_einsum(at: ForwardNode) -> Iterable[tuple[str, frozenset[int]]]:
    equation = str(at.attribute("equation", "")).replace(" ", "")
    operands, _, result = equation.partition("->")
    if not result or "." in equation:
        return
    for tensor, labels in zip(at.node.input, operands.split(","), strict=False):
        yield tensor, frozenset(axis for axis, label in enumerate(labels) if label not in result)


def _is_loss(at: ForwardNode) -> bool:
    return at.node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


# ---------------------------------------------------------------- what scales


def _check_scale(at: ForwardNode, batch: BatchAxes, known: _Suspects) -> None:
    """Raise UnsupportedModel where a node scales by a suspect."""
    for index, name in enumerate(at.node.input):
        values = at.constants.get(name)
        if values is None or values.size != 1 or not np.issubdtype(values.dtype, np.number):
            continue
        if _is_among(_counts_in(at, index, float(values.item()), known), values.dtype):
            raise UnsupportedModel(
                f"the model's own batch ({batch.size}) may be held in a constant: {name!r} is "
                f"{values.item():.7g}, beside what is summed or averaged over that batch",
                at=at.place,
                fix=SYMBOLIC,
            )


def _counts_in(
    at: ForwardNode, index: int, number: float, known: _Suspects
) -> Iterator[tuple[float, Collection[float]]]:
    """Yield what a constant operand may count, and the suspects that it would be."""
    op_type = at.node.op_type
    inverse = 0.0 if number == 0 else 1 / number
    if op_type == "Div" and index == 1:
        yield number, known.divisors
    if number in (0, 1):
        return
    if op_type == "Mul" or (op_type == "Div" and index == 1):
        yield (number if op_type == "Mul" else inverse), known.factors
    if op_type == "Mul":
        yield inverse, known.divisors
    if op_type in BESIDE:
        yield abs(number), known.divisors | known.terms
    if op_type == "Pow" and index == 1 and number not in (0.5, 2):
        yield from ((n, known.divisors | known.factors) for n in (number, inverse))


def _is_among(counts: Iterable[tuple[float, Collection[float]]], dtype: np.dtype) -> bool:
    known = dtype if np.issubdtype(dtype, np.floating) else np.dtype(np.float64)
    tolerance = ULPS * float(np.finfo(known).eps)
    return any(
        abs(number - suspect) <= tolerance * abs(suspect)
        for number, suspects in counts
        for suspect in suspects
    )


def _check_operands(
    reduction: ForwardNode, batch: BatchAxes, made: _Suspects, makers: Mapping[str, onnx.NodeProto]
) -> None:
    """Look for the scale among the linear operations in front of a sum."""
    waiting: list[str] = [name for name in reduction.node.input if batch.counted_axes(name)]
    seen = set(waiting)
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.op_type not in LINEAR:
            continue
        at = ForwardNode(
            reduction.build, node, batch.before.types, reduction.constants, frozenset(), frozenset(), 0
        )
        _check_scale(at, batch, made)
        fresh = [name for name in node.input if name not in seen and batch.counted_axes(name)]
        seen.update(fresh)
        waiting += fresh
