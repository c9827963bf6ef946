"""Count the operations of one step, node by node, from the sharding rules."""

from collections.abc import Mapping

from partc.passes.analysis.facts import infer_facts
from partc.passes.sharding.sharding_rules import rule_of
from partc.passes.training_graph import TrainingGraph


def count_flops(training: TrainingGraph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return node name -> floating-point operations of one device's step under the given sizes."""
    facts = infer_facts(training, sizes)
    rules = {node.name: rule_of(node, facts) for node in training.graph.nodes}
    return {name: rule.flops for name, rule in rules.items() if rule is not None}
