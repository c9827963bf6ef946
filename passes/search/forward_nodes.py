"""Tell the way forward from the way back, and what on it comes from variables alone."""

from collections.abc import Collection, Iterable, Mapping

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.replicas.average_replicas import REPLICA_DOMAIN
from partc.passes.rules.sharding_rules import rule_of


def forward_nodes(training: TrainingGraph, main: Collection[str]) -> list[gs.Node]:
    """Return the nodes of the main computation that the outputs come from, in the graph's order.

    An output that is an average over replicas comes from what is averaged.
    """
    wanted = set(training.outputs)
    nodes: list[gs.Node] = []
    for node in reversed(training.graph.nodes):
        if not any(tensor.name in wanted for tensor in node.outputs):
            continue
        if node.name in main:
            nodes.append(node)
        if node.name in main or node.domain == REPLICA_DOMAIN:
            wanted.update(tensor.name for tensor in node.inputs)
    return nodes[::-1]


def find_variables_behind(
    nodes: Iterable[gs.Node], variables: Iterable[str], facts: Facts
) -> Mapping[str, frozenset[str]]:
    """Return tensor -> the variables that it is, perhaps transposed, cast or reshaped."""
    behind = {name: frozenset({name}) for name in variables}
    for node in nodes:
        rule = rule_of(node, facts)
        is_contraction = rule is not None and rule.is_contraction
        if not is_contraction and (len(node.inputs) == 1 or (rule is not None and rule.moves)):
            found = behind.get(node.inputs[0].name, frozenset()) if node.inputs else frozenset()
            behind.update((tensor.name, found) for tensor in node.outputs)
    return behind
