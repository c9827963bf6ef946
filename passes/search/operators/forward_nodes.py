"""Tell the way forward from the way back, and what on it comes from variables alone."""

from collections.abc import Collection, Iterable, Mapping

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.replicas.average_replicas import REPLICA_DOMAIN
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import rule_of


def forward_nodes(training: TrainingGraph, main: Collection[str]) -> list[gs.Node]:
    """Return the nodes of the main computation that the outputs come from, in the graph's order.

    An output that is an average over replicas comes from what is averaged.
    """
    leading = set(training.outputs)
    nodes: list[gs.Node] = []
    for node in reversed(training.graph.nodes):
        if not any(tensor.name in leading for tensor in node.outputs):
            continue
        if node.name in main:
            nodes.append(node)
        if node.name in main or node.domain == REPLICA_DOMAIN:
            leading.update(tensor.name for tensor in node.inputs)
    return nodes[::-1]


def find_variables_behind(
    nodes: Iterable[gs.Node], variables: Iterable[str], facts: Facts
) -> Mapping[str, frozenset[str]]:
    """Return tensor -> the variables that its entries are made of, and nothing else but what is known.

    Transposed, cast, cut and joined again, or scaled by another: but no products that an op sums. Rows
    looked up by ids of the data are of their table; but not what is made of them and of another variable.
    """
    none = frozenset[str]()
    behind = {name: frozenset({name}) for name in variables}
    fixed = set(behind)  # the same whatever the data
    for node in nodes:
        rule = rule_of(node, facts)
        if rule is not None and rule.is_contraction:
            continue
        unknown = [tensor.name for tensor in _operands(node, rule) if not _is_known(tensor, facts)]
        if unknown and all(name in behind and (name in fixed or len(unknown) == 1) for name in unknown):
            behind_node = none.union(*(behind[name] for name in unknown))
            behind.update((tensor.name, behind_node) for tensor in node.outputs)
            if all(tensor.name in fixed or _is_known(tensor, facts) for tensor in node.inputs):
                fixed.update(tensor.name for tensor in node.outputs)
    return behind


def _operands(node: gs.Node, rule: ShardingRule | None) -> list[gs.Tensor]:
    """Return what the entries of a node's outputs are made of: neither ids, nor sizes, nor bounds."""
    if rule is None:
        return list(node.inputs)
    if rule.moves:
        return [node.inputs[index] for term in rule.terms for index in term]
    return [tensor for index, tensor in enumerate(node.inputs) if index not in rule.shape_inputs]


def _is_known(tensor: gs.Tensor, facts: Facts) -> bool:
    return not tensor.name or isinstance(tensor, gs.Constant) or facts.value(tensor.name) is not None
