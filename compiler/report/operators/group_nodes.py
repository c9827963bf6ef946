"""Put every node of the training graph into an operator group, and groups into layers.

layer      groups whose parameters' names begin alike: `encoder.0` of encoder.0.weight and encoder.0.bias
group      an operator that a strategy configures, the light ones around it, their gradients and updates
way        forward, gradient or update

Layers are told by the names of what groups read, as deep as few enough come out; a group that reads no
parameter is in the layer of its node's name, or else in that of the group before it. Where names tell
nothing, layers are the blocks of alike operators that repeat.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import onnx_graphsurgeon as gs

from partc.compiler.compilation import Compilation
from partc.passes.search.operators.find_groups import OperatorGroup, find_groups
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.passes.search.operators.grouped_step import GroupedStep, group_step

MOST_LAYERS = 40
ALIKE = 0.8  # of operators, that blocks repeat
GRADIENT_WORD = "/gradient/"  # between the names of a node and of one of its gradient, by `partc grad`
SEPARATORS = re.compile(r"[./]+|::")


class Way(IntEnum):
    """What a node is part of."""

    FORWARD = 0
    GRADIENT = 1
    UPDATE = 2


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A group: the operator that it is told by, its layer's number, and its nodes in the graph's order.

    `operator` None: what belongs to no operator, such as a norm of all gradients.
    """

    operator: OperatorGroup | None
    layer: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class NodeGroups:
    """The groups, the names of the layers, the way of every node, and what gradients are of.

    `gradient_of`: node of the way back -> the node of the way forward that it is part of the gradient of: as
    `partc grad` names it, else, in its group, whose parameter's gradient it makes, or whose tensors it reads.
    """

    groups: tuple[NodeGroup, ...]
    layers: tuple[str, ...]
    ways: Mapping[str, Way]
    gradient_of: Mapping[str, str]


def group_nodes(compilation: Compilation) -> NodeGroups:
    """Return every node's group. Nodes keep the order of the graph."""
    analysis = compilation.analysis
    training = analysis.training
    operators = find_groups(training, analysis.facts, analysis.main)
    forward = {node.name for node in forward_nodes(training, analysis.main)}
    number: dict[str, int] = {}
    if operators:
        step = group_step(analysis, operators)
        number = _numbers(step)
    of_group: list[list[gs.Node]] = [[] for _ in range(len(operators) + 1)]
    for node in training.graph.nodes:
        of_group[number.get(node.name, len(operators))].append(node)
    operands = {n.name: [tensor.name for tensor in n.inputs] for n in training.graph.nodes}
    ways = {n.name: _way(n, forward, analysis.main) for n in training.graph.nodes}
    layers, layer_of = name_layers(
        [operator_path(operator, operands[operator.node]) for operator in operators], operators
    )
    groups = [
        NodeGroup(operator, layer_of[place], tuple(node.name for node in of_group[place]))
        for place, operator in enumerate(operators)
    ]
    if rest := of_group[-1]:
        groups.append(NodeGroup(None, len(layers), tuple(node.name for node in rest)))
        layers.append("shared by all layers" if operators else "the whole step")
    parameter_of = {
        tensor: gradient.parameter
        for gradient in training.gradients.values()
        for tensor in (gradient.dense, gradient.rows, gradient.ids)
        if tensor is not None
    }
    gradient_of: dict[str, str] = {}
    for nodes in of_group[:-1]:
        gradient_of |= _find_forward(nodes, ways, parameter_of)
    for name, way in ways.items():
        named = name.rpartition(GRADIENT_WORD)[0]
        if way is Way.GRADIENT and ways.get(named) is Way.FORWARD:
            gradient_of[name] = named
    return NodeGroups(tuple(groups), tuple(layers), ways, gradient_of)


def _numbers(step: GroupedStep) -> dict[str, int]:
    """Return node -> its group's number: of sums of gradients and updates, where the parameter is kept."""
    number_of = {
        n.name: g for g, group in enumerate(step.groups) for way in group.nodes.values() for n in way
    }
    made_by = {t.name: node for node in step.analysis.training.graph.nodes for t in node.outputs}
    for parameter, nodes in step.updates.items():
        home = step.homes.get(parameter, 0)
        for node in nodes:
            number_of.setdefault(node.name, home)
        gradient = step.analysis.training.gradients[parameter]
        waiting = [tensor for tensor in (gradient.dense, gradient.rows, gradient.ids) if tensor is not None]
        while waiting:  # sums of terms
            node = made_by.get(waiting.pop())
            if node is not None and node.name not in number_of:
                number_of[node.name] = home
                waiting += [tensor.name for tensor in node.inputs]
    return number_of


def _way(node: gs.Node, forward: set[str], main: frozenset[str]) -> Way:
    if node.name in forward:
        return Way.FORWARD
    return Way.GRADIENT if node.name in main else Way.UPDATE


def _find_forward(
    nodes: Sequence[gs.Node], ways: Mapping[str, Way], parameter_of: Mapping[str, str]
) -> dict[str, str]:
    """Return for a group's nodes of the way back what they are the gradient of: the last that fits."""
    last: dict[str, str] = {}  # tensor -> the node of the way forward that makes it, or reads it last
    owners: dict[str, str] = {}
    came_of: dict[str, str] = {}  # tensor of the way back -> what it belongs to
    order = {node.name: place for place, node in enumerate(nodes)}
    for node in nodes:
        if ways[node.name] is Way.FORWARD:
            last.update((tensor.name, node.name) for tensor in (*node.inputs, *node.outputs))
    for node in nodes:
        if ways[node.name] is not Way.GRADIENT:
            continue
        ends = [last[parameter_of[t.name]] for t in node.outputs if parameter_of.get(t.name) in last]
        reads = [last[tensor.name] for tensor in node.inputs if tensor.name in last]
        before = [came_of[tensor.name] for tensor in node.inputs if tensor.name in came_of]
        candidates = ends or reads or before
        if candidates:
            owners[node.name] = owner = max(candidates, key=order.__getitem__)
            came_of.update((tensor.name, owner) for tensor in node.outputs)
    return owners


# ---------------------------------------------------------------- layers


def operator_path(operator: OperatorGroup, operands: Collection[str]) -> tuple[str, ...]:
    """Return the words of a name by which an operator is found: its parameter's, else its own, but the last.

    `operands`: what the node reads; of several parameters one of them.
    """
    direct = [name for name in operator.reads if name in operands]
    for name in (*(direct or operator.reads)[-1:], operator.node):
        words = tuple(word for word in SEPARATORS.split(name) if word)
        if len(words) > 1 and not (name == operator.node and name.startswith(f"{operator.op}:")):
            return words[:-1]
    return operator.reads[-1:]


def name_layers(
    paths: Sequence[tuple[str, ...]], operators: Sequence[OperatorGroup]
) -> tuple[list[str], list[int]]:
    """Return the layers' names in the order of their first group, and each group's number.

    An empty path is that of the group before it, or of the first that has one.
    """
    known = next((path for path in paths if path), ())
    filled = []
    for path in paths:
        known = path or known
        filled.append(known)
    deepest = max(map(len, filled), default=0)
    depth = next((d for d in range(deepest, 1, -1) if len({path[:d] for path in filled}) <= MOST_LAYERS), 1)
    names = [".".join(path[:depth]) or "the whole step" for path in filled]
    if len(set(names)) > MOST_LAYERS:
        names = _name_blocks(names, [(operator.op, operator.shape) for operator in operators])
    layers = list(dict.fromkeys(names))
    at = {name: number for number, name in enumerate(layers)}
    return layers, [at[name] for name in names]


def _name_blocks(names: Sequence[str], alike: Sequence[object]) -> list[str]:
    """Name groups by the blocks that repeat, from the first name of a block to the last: w1 – w8."""
    count = len(names)
    lengths = range(2, count // 3 + 1)
    repeats = {n: sum(a == b for a, b in zip(alike, alike[n:], strict=False)) / (count - n) for n in lengths}
    most = max(repeats.values(), default=0.0)
    length = next((n for n in lengths if most >= ALIKE and repeats[n] == most), count // MOST_LAYERS + 1)
    first = next((n for n in range(count - length) if alike[n] == alike[n + length]), 0) % length
    ends = sorted({0, *range(first, count, length), count})
    blocks: list[str] = []
    for start, stop in pairwise(ends):
        own = names[start], names[stop - 1]
        blocks += [own[0] if own[0] == own[1] else f"{own[0]} – {own[1]}"] * (stop - start)
    return blocks
