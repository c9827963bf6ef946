"""Find which variables must be kept with which parameter: slots, averages, whatever its rows touch.

Axis 0 of two tensors belong together if an op outside the main computation gives them the same
factor (W - v: rows of W with rows of v), or if the same ids index both (W and its accumulator).
What is connected so is split by rows alike, or not at all. Two parameters may well be indexed by the
same data: the op that first sums or scatters a parameter's slices does not connect.
"""

from collections.abc import Iterable

import networkx as nx
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.rules.sharding_rules import rule_of

MOVES_IDS = frozenset(["Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast", "Flatten", "Expand"])


def find_followers(training: TrainingGraph, facts: Facts, main: Iterable[str]) -> dict[str, str | None]:
    """Return variable -> the parameter whose rows it shares; None where it must stay whole.

    A parameter maps to itself, or to None if its rows are tied to another parameter's, or it has but one.
    """
    links = nx.Graph()
    inside = set(main)
    slices = {gradient.rows for gradient in training.gradients.values() if gradient.is_sparse}
    for node in training.graph.nodes:
        if node.name not in inside:
            _link(links, node, facts)
            if not any(tensor.name in slices for tensor in node.inputs):
                _link_ids(links, node)
    result: dict[str, str | None] = dict.fromkeys(training.variables)
    for name in training.gradients:
        rows = ("axis 0", name)
        shape = training.variables[name].shape
        if not shape or shape[0] < 2:  # one row may be stretched along many: rules do not follow it
            continue
        group = nx.node_connected_component(links, rows) if rows in links else {rows}
        members = [v for kind, v in group if kind == "axis 0" and v in training.variables]
        if sum(member in training.gradients for member in members) > 1:
            continue
        alike = [m for m in members if training.variables[m].shape[:1] == shape[:1]]
        if len(alike) == len(members):
            result.update((member, name) for member in [*members, name])
    return result


def _link(links: nx.Graph, node: gs.Node, facts: Facts) -> None:
    rule = rule_of(node, facts)
    if rule is None:
        return
    by_factor: dict[str, tuple[str, str]] = {}
    tensors = [*zip(node.inputs, rule.inputs, strict=True), *zip(node.outputs, rule.outputs, strict=True)]
    for tensor, dims in tensors:
        if dims and len(dims[0]) == 1 and rule.sizes[dims[0][0]] != 1:
            key = by_factor.setdefault(dims[0][0], ("axis 0", tensor.name))
            links.add_edge(key, ("axis 0", tensor.name))


def _link_ids(links: nx.Graph, node: gs.Node) -> None:
    """Connect tables with the values that index them, and these with what they are made from."""
    if node.op in MOVES_IDS:
        links.add_edge(("values", node.inputs[0].name), ("values", node.outputs[0].name))
    elif node.op in ("Gather", "ScatterND") and node.attrs.get("axis", 0) == 0:
        links.add_edge(("axis 0", node.inputs[0].name), ("values", node.inputs[1].name))
