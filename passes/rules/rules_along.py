"""Sharding rules of ops that work along some axes and take each place across those on its own."""

from collections.abc import Callable

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.rules.rules_elementwise import Rule, named
from partc.passes.rules.sharding_rule import Axis, Dims, ShardingRule

Axes = Callable[[gs.Node, Facts, int], set[int]]


def along(axes_of: Axes, linear: bool = True) -> Rule:
    """Make the rule of an op of one tensor that works along the axes that `axes_of` names."""

    def rule(node: gs.Node, facts: Facts) -> ShardingRule:
        source = facts.shape(node.inputs[0].name)
        dims, sizes = named("d", source)
        mixed = axes_of(node, facts, len(source))
        outputs: list[Dims] = []
        for tensor in node.outputs:
            out: list[Axis] = []
            for axis, size in enumerate(facts.shape(tensor.name)):
                sizes |= {f"o{axis}": size} if axis in mixed else {}
                out.append((f"o{axis}",) if axis in mixed else dims[axis])
            outputs.append(tuple(out))
        whole = frozenset(f"{prefix}{axis}" for axis in mixed for prefix in "do")
        return ShardingRule(
            (dims, *(None for _ in node.inputs[1:])),
            tuple(outputs),
            sizes,
            ((0,),) if linear else (),
            frozenset({0}) if linear else frozenset(),
            whole=whole,
        )

    return rule


def image_axes(node: gs.Node, facts: Facts, rank: int) -> set[int]:
    """DepthToSpace, SpaceToDepth: channels and space."""
    return set(range(1, rank))


def named_axis(node: gs.Node, facts: Facts, rank: int) -> set[int]:
    """TopK: its attribute."""
    return {node.attrs.get("axis", -1) % rank}


def reverse_sequence(node: gs.Node, facts: Facts) -> ShardingRule:
    """Each sample has its own length, and time is whole."""
    shape = facts.shape(node.inputs[0].name)
    dims, sizes = named("d", shape)
    time, batch = node.attrs.get("time_axis", 0), node.attrs.get("batch_axis", 1)
    inputs = (dims, (dims[batch],))
    return ShardingRule(inputs, (dims,), sizes, ((0,),), frozenset({0}), whole=frozenset({f"d{time}"}))
