"""Sharding rules of ops that join an axis from parts, and cut it into parts.

    Concat of [B, H] and [B, H]    b in, b in -> b (part in)       the parts are whole, what is in each is not
    Split of [B, 3 H] in three     b (part in) -> b in, b in, b in

Parts of unequal length, or of one that follows a symbolic size, leave the whole axis whole.
"""

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import UNKNOWN, Facts
from partc.passes.rules.rules_elementwise import named
from partc.passes.rules.sharding_rule import Dims, ShardingRule

LINEAR = frozenset({0})


def concat(node: gs.Node, facts: Facts) -> ShardingRule:
    """Concat: a sum of its operands, each in its place; of unequal ones the joined axis stays whole."""
    equal = equal_parts(node, facts) if _are_fixed(node.inputs, node, facts) else None
    return equal or _unequal_concat(node, facts)


def split(node: gs.Node, facts: Facts) -> ShardingRule:
    """Split: where the parts are unequal, the cut axis stays whole."""
    is_counted = len(node.inputs) == 1  # their lengths follow what is cut
    equal = equal_parts(node, facts) if is_counted and _are_fixed(node.outputs, node, facts) else None
    return equal or _unequal_split(node, facts)


def _are_fixed(parts: list[gs.Tensor], node: gs.Node, facts: Facts) -> bool:
    """Tell whether the lengths of parts follow no symbolic size: those that do may be equal by chance."""
    axis = node.attrs.get("axis", 0)
    ranks = [len(facts.shape(part.name)) for part in parts]
    return all(
        facts.fixed_size(part.name, axis % rank) is not None for part, rank in zip(parts, ranks, strict=True)
    )


def _unequal_concat(node: gs.Node, facts: Facts) -> ShardingRule:
    output = facts.shape(node.outputs[0].name)
    axis = node.attrs["axis"] % len(output)
    dims, sizes = named("d", output)
    inputs: list[Dims] = []
    for index, tensor in enumerate(node.inputs):
        sizes[f"j{index}"] = facts.shape(tensor.name)[axis]
        inputs.append((*dims[:axis], (f"j{index}",), *dims[axis + 1 :]))
    joined = frozenset({f"d{axis}", *(f"j{index}" for index in range(len(inputs)))})
    indices = range(len(inputs))
    return ShardingRule(
        tuple(inputs),
        (dims,),
        sizes,
        tuple((index,) for index in indices),
        frozenset(indices),
        whole=joined,
        moves=True,
    )


def _unequal_split(node: gs.Node, facts: Facts) -> ShardingRule:
    shape = facts.shape(node.inputs[0].name)
    axis = node.attrs.get("axis", 0) % len(shape)
    dims, sizes = named("d", shape)
    outputs: list[Dims] = []
    for index, tensor in enumerate(node.outputs):
        sizes[f"p{index}"] = facts.shape(tensor.name)[axis]
        outputs.append((*dims[:axis], (f"p{index}",), *dims[axis + 1 :]))
    cut = frozenset({f"d{axis}", *(f"p{index}" for index in range(len(outputs)))})
    inputs = (dims, *(None for _ in node.inputs[1:]))
    return ShardingRule(inputs, tuple(outputs), sizes, ((0,),), LINEAR, whole=cut, moves=True)


def equal_parts(node: gs.Node, facts: Facts) -> ShardingRule | None:
    """Concat of equal parts and Split into equal parts: b.. in, ... <-> b.. (part in); else None.

    The joined axis is that of parts, whole, and within it that of each: [B, H] T times is [T B, H]. It
    tells where samples lie under the assumed sizes; others may make unequal parts.
    """
    if node.op not in ("Concat", "Split"):
        return None
    joined = node.outputs[0] if node.op == "Concat" else node.inputs[0]
    parts = node.inputs if node.op == "Concat" else node.outputs
    shape = facts.shape(joined.name)
    axis = node.attrs.get("axis", 0) % len(shape)
    lengths = {facts.shape(part.name)[axis] for part in parts}
    if len(lengths) > 1 or UNKNOWN in lengths:
        return None
    dims, sizes = named("d", shape)
    sizes |= {"part": len(parts), "in": lengths.pop()}
    del sizes[f"d{axis}"]
    whole: Dims = (*dims[:axis], ("part", "in"), *dims[axis + 1 :])
    part: Dims = (*dims[:axis], ("in",), *dims[axis + 1 :])
    held = frozenset({"part"})
    if node.op == "Concat":
        indices = range(len(parts))
        terms = tuple((index,) for index in indices)
        each = tuple(part for _ in parts)
        return ShardingRule(each, (whole,), sizes, terms, frozenset(indices), whole=held, moves=True)
    outputs = tuple(part for _ in parts)
    inputs = (whole, *(None for _ in node.inputs[1:]))
    return ShardingRule(inputs, outputs, sizes, ((0,),), LINEAR, whole=held, moves=True)
