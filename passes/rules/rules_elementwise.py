"""Sharding rules of ops that work point by point, reduce, or contract."""

from collections.abc import Callable, Sequence
from typing import Literal

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import UNKNOWN, Facts, Shape
from partc.passes.rules.sharding_rule import Axis, Combine, Dims, ShardingRule

Rule = Callable[[gs.Node, Facts], ShardingRule | None]


def named(prefix: str, shape: Shape) -> tuple[Dims, dict[str, int]]:
    """Return one factor per axis, and their sizes."""
    sizes = {f"{prefix}{axis}": size for axis, size in enumerate(shape)}
    return tuple((factor,) for factor in sizes), sizes


def broadcast_dims(shape: Shape, output: Shape, prefix: str = "d") -> Dims:
    """Return an operand's factors where the output's axes are d0, d1, ..."""
    offset = len(output) - len(shape)
    return tuple(
        () if size == 1 and output[axis + offset] != 1 else (f"{prefix}{axis + offset}",)
        for axis, size in enumerate(shape)
    )


def is_rounded(node: gs.Node, facts: Facts) -> bool:
    """Tell whether a node rounds what it makes to integers: those of parts do not add up to the whole's."""
    return facts.dtypes[node.outputs[0].name].kind in "iu"


def perhaps_broadcast(shape: Shape, output: Shape, prefix: str = "d") -> frozenset[str]:
    """Return the factors along which only the data tells whether an operand is broadcast.

    Such an axis stays whole: were the operand cut where it has size 1, nothing of it would be left.
    """
    offset = len(output) - len(shape)
    return frozenset(
        f"{prefix}{axis + offset}"
        for axis, size in enumerate(shape)
        if size == UNKNOWN and output[axis + offset] != UNKNOWN
    )


def elementwise(
    terms: str = "none",
    linear: Sequence[int] | None = None,
    moves: bool = False,
    count: int | None = None,
    divides: Sequence[int] = (),
    picks: Literal["max", "min"] | None = None,
) -> Rule:
    """Make the rule of a broadcasting op.

    terms: "none" (not linear), "each" (a sum of its operands), "product". `linear` names the
    operands that may be partial; `count`, how many inputs are operands; `divides`, those that divide;
    `picks`, which one the op picks.
    """

    def rule(node: gs.Node, facts: Facts) -> ShardingRule:
        output = facts.shape(node.outputs[0].name)
        out_dims, sizes = named("d", output)
        operands = len(node.inputs) if count is None else min(count, len(node.inputs))
        inputs = tuple(
            broadcast_dims(facts.shape(tensor.name), output) if index < operands and tensor.name else None
            for index, tensor in enumerate(node.inputs)
        )
        indices = tuple(range(operands)) if linear is None else tuple(linear)
        kind = "none" if divides and is_rounded(node, facts) else terms
        per_term = {"none": (), "each": tuple((i,) for i in indices), "product": (tuple(range(operands)),)}
        outputs = tuple(out_dims for _ in node.outputs)
        allowed = frozenset() if kind == "none" else frozenset(indices)
        shapes = [facts.shape(tensor.name) for tensor in node.inputs[:operands] if tensor.name]
        whole = frozenset[str]().union(*(perhaps_broadcast(shape, output) for shape in shapes))
        return ShardingRule(
            inputs,
            outputs,
            sizes,
            per_term[kind],
            allowed,
            whole=whole,
            moves=moves,
            divides=frozenset(divides),
            picks=picks,
        )

    return rule


def cast(node: gs.Node, facts: Facts) -> ShardingRule:
    """Cast: linear from a number to a floating-point number or a wider integer."""
    source = facts.dtypes[node.inputs[0].name]
    target = facts.dtypes[node.outputs[0].name]
    to_integer = target.kind in "iu" and source.kind in "iu"
    is_linear = source.kind in "iuf" and (target.kind == "f" or to_integer)
    return elementwise("each" if is_linear else "none")(node, facts)  # type: ignore[return-value]


def reduce(how: Combine | None, linear: bool = True) -> Rule:
    """Make the rule of a reduction; `how` None where its parts do not combine: nor do means of integers."""

    def rule(node: gs.Node, facts: Facts) -> ShardingRule | None:
        shape = facts.shape(node.inputs[0].name)
        combine = None if how == "mean" and is_rounded(node, facts) else how
        is_linear = linear and combine in ("sum", "mean")
        axes = reduced_axes(node, facts, len(shape))
        if axes is None:
            return None
        dims, sizes = named("d", shape)
        keep = node.attrs.get("keepdims", 1)
        out: list[Axis] = []
        for axis, factors in enumerate(dims):
            if axis not in axes:
                out.append(factors)
            elif keep:
                out.append(())
        reduced = [f"d{axis}" for axis in sorted(axes)]
        return ShardingRule(
            (dims, *(None for _ in node.inputs[1:])),
            (tuple(out),),
            sizes,
            ((0,),) if is_linear else (),
            frozenset({0}) if is_linear else frozenset(),
            combine=dict.fromkeys(reduced, combine) if combine else {},
            whole=frozenset() if combine else frozenset(reduced),
        )

    return rule


def reduced_axes(node: gs.Node, facts: Facts, rank: int) -> set[int] | None:
    """Return the axes a reduction works on, or None if they are not known."""
    if "axes" in node.attrs:
        axes = list(node.attrs["axes"])
    elif "axis" in node.attrs:
        axes = [node.attrs["axis"]]
    elif len(node.inputs) > 1 and node.inputs[1].name:
        value = facts.value(node.inputs[1].name)
        if value is None:
            return None
        axes = [int(axis) for axis in value.reshape(-1)]
    else:
        axes = []
    if not axes and node.attrs.get("noop_with_empty_axes", 0):
        return set()
    return {axis % rank for axis in axes} if axes else set(range(rank))


def along_axis(default: int = -1, linear: bool = False, to_end: bool = False) -> Rule:
    """Make the rule of an op that mixes one axis (Softmax, CumSum) or all from it on."""

    def rule(node: gs.Node, facts: Facts) -> ShardingRule | None:
        shape = facts.shape(node.inputs[0].name)
        axis = node.attrs.get("axis", default)
        if len(node.inputs) > 1 and node.op == "CumSum":
            known = facts.value(node.inputs[1].name)
            if known is None:
                return None
            axis = int(known.reshape(-1)[0])
        dims, sizes = named("d", shape)
        axis %= len(shape)
        mixed = range(axis, len(shape)) if to_end else (axis,)
        return ShardingRule(
            (dims, *(None for _ in node.inputs[1:])),
            tuple(dims for _ in node.outputs),
            sizes,
            ((0,),) if linear else (),
            frozenset({0}) if linear else frozenset(),
            whole=frozenset(f"d{mixed_axis}" for mixed_axis in mixed),
        )

    return rule


def matmul(node: gs.Node, facts: Facts) -> ShardingRule:
    """MatMul: b.. m k, b.. k n -> b.. m n."""
    left, right = (facts.shape(tensor.name) for tensor in node.inputs)
    output = facts.shape(node.outputs[0].name)
    batch = output[: len(output) - (len(left) > 1) - (len(right) > 1)]
    batch_dims, sizes = named("b", batch)
    sizes["k"] = left[-1]
    out = list(batch_dims)
    left_dims, right_dims = (
        list(broadcast_dims(left[:-2], batch, "b")),
        list(broadcast_dims(right[:-2], batch, "b")),
    )
    if len(left) > 1:
        sizes["m"] = left[-2]
        left_dims.append(("m",))
        out.append(("m",))
    right_dims.append(("k",))
    if len(right) > 1:
        sizes["n"] = right[-1]
        right_dims.append(("n",))
        out.append(("n",))
    inputs = ((*left_dims, ("k",)), tuple(right_dims))
    whole = perhaps_broadcast(left[:-2], batch, "b") | perhaps_broadcast(right[:-2], batch, "b")
    return ShardingRule(
        inputs, (tuple(out),), sizes, ((0, 1),), frozenset({0, 1}), combine={"k": "sum"}, whole=whole
    )


def gemm(node: gs.Node, facts: Facts) -> ShardingRule:
    """Gemm: m k, k n, (m) n -> m n, terms (A B) + (C)."""
    left = facts.shape(node.inputs[0].name)
    output = facts.shape(node.outputs[0].name)
    transposed = node.attrs.get("transA", 0), node.attrs.get("transB", 0)
    sizes = {"m": output[0], "n": output[1], "k": left[0] if transposed[0] else left[1]}
    a: Dims = (("k",), ("m",)) if transposed[0] else (("m",), ("k",))
    b: Dims = (("n",), ("k",)) if transposed[1] else (("k",), ("n",))
    inputs: list[Dims | None] = [a, b]
    terms: list[tuple[int, ...]] = [(0, 1)]
    whole: frozenset[str] = frozenset()
    if len(node.inputs) > 2 and node.inputs[2].name:
        added = facts.shape(node.inputs[2].name)
        axes = broadcast_dims(added, output)
        whole = frozenset({"d0": "m", "d1": "n"}[factor] for factor in perhaps_broadcast(added, output))
        inputs.append(tuple(tuple({"d0": "m", "d1": "n"}[f] for f in axis) for axis in axes))
        terms.append((2,))
    return ShardingRule(
        tuple(inputs),
        ((("m",), ("n",)),),
        sizes,
        tuple(terms),
        frozenset(range(len(inputs))),
        combine={"k": "sum"},
        whole=whole,
    )


def einsum(node: gs.Node, facts: Facts) -> ShardingRule | None:
    """Einsum, as its equation says (no ellipsis, no repeated letter in one operand)."""
    equation = node.attrs["equation"].replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    operands = left.split(",")
    if any(len(set(letters)) != len(letters) for letters in operands):
        return None
    sizes: dict[str, int] = {}
    for letters, tensor in zip(operands, node.inputs, strict=True):
        for letter, size in zip(letters, facts.shape(tensor.name), strict=True):
            if sizes.setdefault(letter, size) != size:
                return None  # broadcast, or perhaps
    spell = [tuple((letter,) for letter in letters) for letters in operands]
    indices = tuple(range(len(operands)))
    return ShardingRule(
        tuple(spell),
        (tuple((letter,) for letter in right),),
        sizes,
        (indices,),
        frozenset(indices),
        combine={letter: "sum" for letter in sizes if letter not in right},
    )
