"""List a step's operator groups, with the dimensions that a strategy may split of each.

A group is an operator that sums products, or that reads parameters other than point by point, and the light
operators around it; the nodes of its gradient follow its layouts. A dimension is spelled as in a strategy's
`ops` (configure.py): `out:1`, `in:0:1`, `out:2/3`, with the largest number of equal parts. Every divisor of
it is allowed too.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import decide_by_wish
from partc.passes.layouts.decisions import decide_axes, divides
from partc.passes.layouts.layouts import Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.roles.find_zeros import find_zeros
from partc.passes.rules.sharding_rule import Dims, ShardingRule
from partc.passes.rules.sharding_rules import node_facts, rule_of
from partc.passes.search.operators.forward_nodes import find_variables_behind, forward_nodes


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """One operator and what it may split.

    node      its name, as a strategy's `ops` take it
    shape     of its first output
    reads     the variables that its operands are
    light     nodes folded into the group
    splits    dimension -> the largest number of equal parts
    """

    node: str
    op: str
    shape: tuple[int, ...]
    reads: tuple[str, ...]
    light: int
    splits: Mapping[str, int]


def find_groups(training: TrainingGraph, facts: Facts, main: Collection[str]) -> tuple[OperatorGroup, ...]:
    """Return the groups of the way forward in the order of the graph; of all of `main` without outputs."""
    nodes = forward_nodes(training, main)
    if not nodes:
        nodes = [node for node in training.graph.nodes if node.name in main]
    behind = find_variables_behind(nodes, training.variables, facts)
    reads = [_variables(node, behind) for node in nodes]
    heads = [
        place
        for place, node in enumerate(nodes)
        if _is_head(rule_of(node, facts), reads[place] & training.gradients.keys())
    ]
    light = _count_light(nodes, heads)
    zeros = find_zeros(training.graph, facts)
    return tuple(
        OperatorGroup(
            nodes[place].name,
            nodes[place].op,
            facts.shape(nodes[place].outputs[0].name),
            tuple(name for name in training.variables if name in reads[place]),
            light[place],
            dict(_splits(nodes[place], facts, zeros)),
        )
        for place in heads
    )


def _variables(node: gs.Node, behind: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*(behind.get(tensor.name, frozenset()) for tensor in node.inputs))


def _is_head(rule: ShardingRule | None, parameters: Collection[str]) -> bool:
    if rule is not None and rule.is_contraction:
        return True
    if not parameters:
        return False
    return rule is None or bool(rule.combine or rule.indexed or (rule.whole and not rule.moves))


def _count_light(nodes: Sequence[gs.Node], heads: Sequence[int]) -> dict[int, int]:
    """Return how many nodes join each head: the last that they follow, else the first that they lead to."""
    group = {place: place for place in heads}
    head_before: dict[str, int] = {}
    for place, node in enumerate(nodes):
        before = [head_before[tensor.name] for tensor in node.inputs if tensor.name in head_before]
        if place not in group and before:
            group[place] = max(before)
        if place in group:
            head_before.update((tensor.name, group[place]) for tensor in node.outputs)
    head_behind: dict[str, int] = {}
    for place in reversed(range(len(nodes))):
        after = [head_behind[tensor.name] for tensor in nodes[place].outputs if tensor.name in head_behind]
        if place not in group and after:
            group[place] = min(after)
        if place in group:
            for tensor in nodes[place].inputs:
                head_behind[tensor.name] = min(group[place], head_behind.get(tensor.name, group[place]))
    counted = dict.fromkeys(heads, 0)
    for place, head in group.items():
        counted[head] += place != head
    return counted


def _splits(node: gs.Node, facts: Facts, zeros: frozenset[str]) -> Iterator[tuple[str, int]]:
    known = node_facts(node, facts, zeros)
    rule = known.rule
    if rule is None:
        return
    seen: set[str] = set()
    for operand, dims in ((None, rule.outputs[0]), *enumerate(rule.inputs)):
        for factor, split in _places(rule, dims or ()):
            if factor in seen:
                continue
            seen.add(factor)
            parts = rule.sizes[factor]
            decision = decide_by_wish(known, Wish(split, operand), parts)
            mesh = Mesh("worker", (("any", parts),))
            if decision is not None and divides(mesh, known, decide_axes(mesh, [decision])):
                yield spell_dimension(split, operand), parts


def _places(rule: ShardingRule, dims: Dims) -> Iterator[tuple[str, Split]]:
    for factor in dict.fromkeys(factor for axis in dims for factor in axis):
        position = rule.position_of(dims, factor)
        if position is not None and rule.sizes[factor] > 1:
            yield factor, Split(*position)


def spell_dimension(split: Split, operand: int | None = None) -> str:
    """Return a dimension of the output, or of an operand, as a strategy's `ops` spell it."""
    place = f"out:{split.axis}" if operand is None else f"in:{operand}:{split.axis}"
    return place + (f"/{split.outer}" if split.outer > 1 else "")
