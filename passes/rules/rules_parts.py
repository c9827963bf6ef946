"""Sharding rules of ops that join an axis from parts, and cut it into parts.

    Concat of [B, H] and [B, H]    b in, b in -> b (part in)       the parts are whole, what is in each is not
    Split of [B, 3 H] in three     b (part in) -> b in, b in, b in
    Slice of [B, 3 H] from H on    b (part in) -> b (piece in)    Pad, its gradient, the other way

Parts of unequal length, or of one that follows a symbolic size, leave the whole axis whole. Numbers that say
how long parts are, or where a cut lies, are the rule's bounds.
"""

from dataclasses import dataclass, replace
from math import gcd

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import UNKNOWN, Facts
from partc.passes.rules.rules_elementwise import named
from partc.passes.rules.sharding_rule import LINEAR_IN_FIRST, Dims, ShardingRule


def concat(node: gs.Node, facts: Facts) -> ShardingRule:
    """Concat: a sum of its operands, each in its place; of unequal ones the joined axis stays whole."""
    equal = equal_parts(node, facts) if _are_fixed(node.inputs, node, facts) else None
    return equal or _unequal_concat(node, facts)


def split(node: gs.Node, facts: Facts) -> ShardingRule:
    """Split: where the parts are unequal, the cut axis stays whole."""
    equal = equal_parts(node, facts) if _are_fixed(node.outputs, node, facts) else None
    if equal is None or len(node.inputs) == 1:  # without lengths, these follow what is cut
        return equal or _unequal_split(node, facts)
    lengths = facts.fixed_value(node.inputs[1].name)
    if lengths is None:
        return _unequal_split(node, facts)
    axis = node.attrs.get("axis", 0) % len(equal.outputs[0])
    return replace(equal, bounds={1: tuple((int(length), axis) for length in lengths.tolist())})


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
    return ShardingRule(inputs, tuple(outputs), sizes, ((0,),), LINEAR_IN_FIRST, whole=cut, moves=True)


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
    whole_factors = frozenset({"part"})
    if node.op == "Concat":
        indices = range(len(parts))
        terms = tuple((index,) for index in indices)
        each = tuple(part for _ in parts)
        return ShardingRule(each, (whole,), sizes, terms, frozenset(indices), whole=whole_factors, moves=True)
    outputs = tuple(part for _ in parts)
    inputs = (whole, *(None for _ in node.inputs[1:]))
    return ShardingRule(inputs, outputs, sizes, ((0,),), LINEAR_IN_FIRST, whole=whole_factors, moves=True)


@dataclass(frozen=True, slots=True)
class Cut:
    """A result's range on an axis, in the operand's positions: beyond its ends where it is padded."""

    size: int
    start: int
    stop: int

    @property
    def inner(self) -> int:
        """Return the longest parts that the operand and its range consist of."""
        return gcd(self.size, self.start, self.stop)


def aligned_cuts(node: gs.Node, facts: Facts) -> dict[int, Cut]:
    """Return axis -> cut of a Slice or constant Pad, where both sides consist of parts of several entries."""
    cuts = cuts_of(node, facts)
    return {axis: cut for axis, cut in cuts.items() if cut.inner > 1 and cut.stop > cut.start}


def cuts_of(node: gs.Node, facts: Facts) -> dict[int, Cut]:
    """Return axis -> cut of a Slice, of the axes that it names, or of a constant Pad; of other ops none.

    Sizes and numbers that follow a symbolic size, or that the data tells, give none.
    """
    read = {"Slice": _slice_cuts, "Pad": _pad_cuts}.get(node.op)
    return read(node, facts, len(facts.shape(node.inputs[0].name))) if read else {}


def bounds_of(
    node: gs.Node, facts: Facts, cuts: dict[int, Cut]
) -> dict[int, tuple[tuple[int, int | None], ...]]:
    """Return the bounds of a Slice or Pad that cuts axes at parts."""
    if not cuts:
        return {}
    if node.op == "Pad":
        rank = len(facts.shape(node.inputs[0].name))
        pads = _known(node, facts, 1)
        axes = [axis % rank for axis in range(2 * rank)]
        return {
            1: tuple((int(pad), axis if axis in cuts else None) for pad, axis in zip(pads, axes, strict=True))
        }
    axes = _slice_axes(node, facts)
    starts, ends = _known(node, facts, 1), _known(node, facts, 2)
    return {
        1: tuple((cuts[a].start, a) if a in cuts else (n, None) for a, n in zip(axes, starts, strict=True)),
        2: tuple((cuts[a].stop, a) if a in cuts else (n, None) for a, n in zip(axes, ends, strict=True)),
    }


def _known(node: gs.Node, facts: Facts, index: int, default: list[int] | None = None) -> list[int]:
    """Return the numbers of an input that are the same whatever the symbolic sizes are, else nothing."""
    if index >= len(node.inputs) or not node.inputs[index].name:
        return default or []
    value = facts.fixed_value(node.inputs[index].name)
    return [] if value is None else [int(number) for number in value.reshape(-1)]


def _slice_axes(node: gs.Node, facts: Facts) -> list[int]:
    rank = len(facts.shape(node.inputs[0].name))
    return [axis % rank for axis in _known(node, facts, 3, list(range(len(_known(node, facts, 1)))))]


def _slice_cuts(node: gs.Node, facts: Facts, rank: int) -> dict[int, Cut]:
    starts, ends, axes = _known(node, facts, 1), _known(node, facts, 2), _slice_axes(node, facts)
    steps = _known(node, facts, 4, [1] * len(starts))
    if not len(starts) == len(ends) == len(axes) == len(steps) == len(set(axes)):
        return {}
    cuts: dict[int, Cut] = {}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = facts.fixed_size(node.inputs[0].name, axis)
        if step == 1 and size is not None:
            first, stop, _ = slice(start, end).indices(size)
            cuts[axis] = Cut(size, first, stop)
    return cuts


def _pad_cuts(node: gs.Node, facts: Facts, rank: int) -> dict[int, Cut]:
    pads = _known(node, facts, 1)
    names_axes = len(node.inputs) > 3 and bool(node.inputs[3].name)
    if node.attrs.get("mode", "constant") != "constant" or len(pads) != 2 * rank or names_axes:
        return {}
    sizes = [facts.fixed_size(node.inputs[0].name, axis) for axis in range(rank)]
    return {
        axis: Cut(size, -pads[axis], size + pads[axis + rank])
        for axis, size in enumerate(sizes)
        if size is not None
    }
