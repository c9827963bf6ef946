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
    """Return tensor -> the variables that its entries are made of, and nothing else but what is known.

    Transposed, cast, cut and joined again, or scaled by another: but no products that an op sums.
    """
    none = frozenset[str]()
    behind = {name: frozenset({name}) for name in variables}
    for node in nodes:
        rule = rule_of(node, facts)
        if rule is not None and rule.is_contraction:
            continue
        spelled = () if rule is None else rule.shape_inputs
        made = [t for i, t in enumerate(node.inputs) if i not in spelled and not _is_known(t, facts)]
        if made and all(tensor.name in behind for tensor in made):
            found = none.union(*(behind[tensor.name] for tensor in made))
            behind.update((tensor.name, found) for tensor in node.outputs)
    return behind


def _is_known(tensor: gs.Tensor, facts: Facts) -> bool:
    return not tensor.name or isinstance(tensor, gs.Constant) or facts.value(tensor.name) is not None
