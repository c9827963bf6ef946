"""Divide a step into operator groups: what each computes on the way forward and back.

    group      an operator that sums products or reads a parameter, the light ones around it, and the nodes
               of their gradients: what has one configuration
    way        forward; aside, what gradients read that comes of activations alone; backward, from the loss to
               what several parameters' gradients come from; weights, what one parameter's gradient alone
               comes from. It has parts, none of which waits for a later one of its group: for each parameter
               of weights one; aside and backward, products for other groups alone come apart from what the
               gradients of its own parameters wait for; aside and of weights, what another group has made so
               comes apart from that; backward, too, where groups would wait for each other else, as those
               whose results a loss compares with each other do
    crossing   a tensor that one group makes and another reads, or another way of the same
    term       what a group adds to a parameter's gradient; the sums of all groups' terms are no group's

Which node goes with which operator is what placing the groups one behind the other as stages of a pipeline
tells (place_nodes.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from operator import itemgetter, or_

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.layouts.place_nodes import find_chain, find_served, place_nodes
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.search.operators.find_groups import OperatorGroup
from partc.passes.search.operators.forward_nodes import forward_nodes

PassLevel = tuple[int, int]  # one of the four below, and which part of it
FORWARD, ASIDE, BACKWARD, WEIGHTS = range(4)

_Part = tuple[int, int, str]  # one of the four, how often it has gone from group to group, and who is served
_LEVELLED = (ASIDE, WEIGHTS)  # kinds whose parts come apart where the way goes from group to group
_ANYONE, _OTHERS = "", "others"  # or a parameter


@dataclass(frozen=True, slots=True)
class StepGroup:
    """The nodes of an operator group in the order of the graph, by the ways on which it has any, in order."""

    operator: OperatorGroup
    nodes: Mapping[PassLevel, tuple[gs.Node, ...]]


@dataclass(frozen=True)
class GroupedStep:
    """A step in groups.

    maker    tensor -> the group that makes it, and on which way
    readers  tensor that crosses -> the groups that read it, and on which way, in order
    terms    parameter -> what groups add to its gradient
    homes    variable -> the group that keeps it
    updates  parameter -> the nodes that make its next value, and that of what follows it
    """

    analysis: Analysis
    groups: tuple[StepGroup, ...]
    maker: Mapping[str, tuple[int, PassLevel]]
    readers: Mapping[str, tuple[tuple[int, PassLevel], ...]]
    terms: Mapping[str, tuple[str, ...]]
    homes: Mapping[str, int]
    updates: Mapping[str, tuple[gs.Node, ...]]


def group_step(analysis: Analysis, operators: Sequence[OperatorGroup]) -> GroupedStep:
    """Return the nodes of every operator group, and what crosses between groups."""
    places = place_nodes(analysis, {group.node: n for n, group in enumerate(operators)}, len(operators))
    terms, sums = _find_terms(analysis)
    ways = _ways(analysis, places.nodes, terms, sums)
    updates = dict(_find_updates(analysis, terms))

    def divided(levelled: Collection[int]) -> GroupedStep:
        groups, maker = _divide(analysis, operators, places.nodes, ways, levelled)
        readers = _find_readers(analysis, groups, maker)
        return GroupedStep(analysis, groups, maker, readers, terms, dict(places.variables), updates)

    step = divided(_LEVELLED)
    return step if _has_order(step) else divided((*_LEVELLED, BACKWARD))


def _divide(
    analysis: Analysis,
    operators: Sequence[OperatorGroup],
    group_of: Mapping[str, int],
    ways: Mapping[str, tuple[int, str]],
    levelled: Collection[int],
) -> tuple[tuple[StepGroup, ...], dict[str, tuple[int, PassLevel]]]:
    """Return the groups with their nodes, and who makes each tensor. `levelled`: kinds that have levels."""
    nodes: list[dict[_Part, list[gs.Node]]] = [{} for _ in operators]
    made_on: dict[str, tuple[int, _Part]] = {}
    for node in analysis.training.graph.nodes:
        if node.name in ways:
            number, (kind, served) = group_of[node.name], ways[node.name]
            level = _level(node, number, kind, made_on) if kind in levelled else 0
            nodes[number].setdefault((kind, level, served), []).append(node)
            made_on.update((tensor.name, (number, (kind, level, served))) for tensor in node.outputs)
    numbered = [_numbered(own) for own in nodes]
    groups = tuple(
        StepGroup(operator, {way: tuple(own[part]) for part, way in ways_of.items()})
        for operator, own, ways_of in zip(operators, nodes, numbered, strict=True)
    )
    return groups, {tensor: (number, numbered[number][part]) for tensor, (number, part) in made_on.items()}


def _has_order(step: GroupedStep) -> bool:
    """Tell whether parts can be computed one behind the other: none waits for what waits for it."""
    order = TopologicalSorter[tuple[int, PassLevel]]()
    for tensor, readers in step.readers.items():
        if tensor in step.maker:
            for reader in readers:
                order.add(reader, step.maker[tensor])
    try:
        order.prepare()
    except CycleError:
        return False
    return True


def _numbered(parts: Iterable[_Part]) -> dict[_Part, PassLevel]:
    """Return a group's parts in order: by kind, by level, and in the order of the graph."""
    numbered: dict[_Part, PassLevel] = {}
    for kind, own in groupby(sorted(parts, key=itemgetter(0, 1)), key=itemgetter(0)):
        numbered.update((part, (kind, number)) for number, part in enumerate(own))
    return numbered


def _level(node: gs.Node, number: int, kind: int, made_on: Mapping[str, tuple[int, _Part]]) -> int:
    """Return how often what a node reads has gone from group to group on ways of its kind."""
    level = 0
    for tensor in node.inputs:
        if tensor.name in made_on:
            group, (other, before, _) = made_on[tensor.name]
            level = max(level, before + (group != number) if other == kind else 0)
    return level


def _ways(
    analysis: Analysis,
    group_of: Mapping[str, int],
    terms: Mapping[str, Sequence[str]],
    sums: Collection[str],
) -> dict[str, tuple[int, str]]:
    """Return the way of every node of the main computation that is not a sum of terms, and whom it serves."""
    training = analysis.training
    main = [node for node in training.graph.nodes if node.name in analysis.main and node.name not in sums]
    ahead = forward_nodes(training, analysis.main)
    forward = {node.name for node in ahead}
    back = [node for node in main if node.name not in forward]
    chain = find_chain(training, ahead, back)
    bits = {parameter: 1 << number for number, parameter in enumerate(terms)}
    parameter_of = {bit: parameter for parameter, bit in bits.items()}
    serves = find_served(back, terms)
    own: dict[int, int] = {}  # group -> the bits of what it reads
    for node in main:
        read = reduce(or_, (bits.get(tensor.name, 0) for tensor in node.inputs), 0)
        own[group_of[node.name]] = own.get(group_of[node.name], 0) | read
    onward = [node for node in back if not serves[node.name] & own[group_of[node.name]]]
    for_others = _behind_products(analysis, onward, group_of)
    ways = dict.fromkeys(forward, (FORWARD, _ANYONE))
    for node in back:
        is_chain = any(tensor.name in chain for tensor in node.outputs)
        parameter = parameter_of.get(serves[node.name])
        if is_chain and parameter is not None:
            ways[node.name] = WEIGHTS, parameter
        else:
            served = _OTHERS if node.name in for_others else _ANYONE
            ways[node.name] = BACKWARD if is_chain else ASIDE, served
    return ways


def _behind_products(
    analysis: Analysis, nodes: Sequence[gs.Node], group_of: Mapping[str, int]
) -> frozenset[str]:
    """Return which of these nodes sum products, or are behind such in their group."""
    found: dict[str, int] = {}  # tensor -> the group that makes it so
    names = set[str]()
    for node in nodes:
        group, rule = group_of[node.name], rule_of(node, analysis.facts)
        is_product = rule is not None and rule.is_contraction
        if is_product or any(found.get(tensor.name) == group for tensor in node.inputs):
            found.update((tensor.name, group) for tensor in node.outputs)
            names.add(node.name)
    return frozenset(names)


def _find_readers(
    analysis: Analysis, groups: Sequence[StepGroup], maker: Mapping[str, tuple[int, PassLevel]]
) -> dict[str, tuple[tuple[int, PassLevel], ...]]:
    """Return who reads what another block of work makes, or a variable."""
    readers: dict[str, dict[tuple[int, PassLevel], None]] = {}
    for way in sorted({way for group in groups for way in group.nodes}):
        for number, group in enumerate(groups):
            for node in group.nodes.get(way, ()):
                for tensor in node.inputs:
                    source = maker.get(tensor.name)
                    crosses = source is not None and source != (number, way)
                    if crosses or tensor.name in analysis.training.variables:
                        readers.setdefault(tensor.name, {})[number, way] = None
    return {tensor: tuple(reading) for tensor, reading in readers.items()}


def _find_terms(analysis: Analysis) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """Return parameter -> the terms of its gradient, and the nodes that only add them and move them."""
    made_by = {t.name: node for node in analysis.training.graph.nodes for t in node.outputs}
    ahead = {node.name for node in forward_nodes(analysis.training, analysis.main)}
    sums = set[str]()
    terms: dict[str, tuple[str, ...]] = {}
    for parameter, gradient in analysis.training.gradients.items():
        last = gradient.rows if gradient.is_sparse else gradient.dense
        if last is None:
            continue
        tensors: list[str] = []
        waiting = [last]
        while waiting:
            tensor = waiting.pop()
            node = made_by.get(tensor)
            operands = None if node is None or node.name in ahead else _summed(node)
            if node is not None and operands is not None and node.name in analysis.main:
                sums.add(node.name)
                waiting += operands
            else:
                tensors.append(tensor)
        terms[parameter] = tuple(dict.fromkeys(tensors[::-1]))
    return terms, frozenset(sums)


def _summed(node: gs.Node) -> list[str] | None:
    """Return the terms that a node adds, None where it does something else."""
    return [tensor.name for tensor in node.inputs] if node.op in ("Add", "Sum") else None


def _find_updates(analysis: Analysis, parameters: Iterable[str]) -> Iterator[tuple[str, tuple[gs.Node, ...]]]:
    """Yield for each parameter the nodes of its update; those that several share are the first one's."""
    training = analysis.training
    following: dict[str, list[str]] = {}
    for name, leader in analysis.followers.items():
        following.setdefault(leader or name, []).append(training.variables[name].next)
    nodes = [node for node in training.graph.nodes if node.name not in analysis.main]
    maker = {tensor.name: number for number, node in enumerate(nodes) for tensor in node.outputs}
    taken: set[int] = set()
    for parameter in parameters:
        waiting = [training.variables[parameter].next, *following.get(parameter, ())]
        own: list[int] = []
        while waiting:
            number = maker.get(waiting.pop())
            if number is not None and number not in taken:
                taken.add(number)
                own.append(number)
                waiting += [tensor.name for tensor in nodes[number].inputs]
        yield parameter, tuple(nodes[number] for number in sorted(own))
