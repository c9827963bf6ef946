"""Divide products of looked-up rows that all ranks along a mesh axis would make whole.

    rows [S, P] of a table that ranks keep by rows: partial ──┬── scores [n, S], whole on every rank
    states [n, P], whole ─────────────────────────────────────┘

Weights' splits divide the products that read weights, but not those of rows that are looked up: each rank has
some of these, and their sum is all. In place of the sum, twice the bytes, each rank is sent its part of it,
and makes that part of the product. That is asked for where what follows keeps parts until they are summed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.graph.expand_normalised import can_expand
from partc.passes.graph.separate_parts import ReadOrder, can_separate, follow_parts
from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import decide_by_rule, decide_by_wish
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Partial, Placement, Replicate, Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.rules.sharding_rules import node_facts, rule_of
from partc.passes.search.named.weight_layouts import WeightLayouts
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.passes.search.stages.line_work import NodeSeconds

MESSAGE_S = 70e-6  # of one more message, seconds (decision 67)
MESSAGES = 4  # of what is largest, of sums, and of the gradients of rows and of what is added to them


def divide_products(
    analysis: Analysis, mesh: Mesh, axis: int, weights: Mapping[str, Split], seconds: NodeSeconds
) -> dict[str, Split]:
    """Return what products are asked to split of their output.

    `weights`: where variables are split; `seconds`: of operations and bytes on one worker. Each of the two
    products of the way back takes as long as this one.
    """
    nodes, ranks = forward_nodes(analysis.training, analysis.main), mesh.size(axis)
    rows = _looked_up_rows(analysis, nodes)
    products = {
        place: node
        for place, node in enumerate(nodes)
        if not rows.isdisjoint(tensor.name for tensor in node.inputs)
        and 3 * _product_s(node, analysis, seconds) * (1 - 1 / ranks) > MESSAGES * MESSAGE_S
    }
    if not products or not weights:
        return {}
    graph = WeightLayouts(analysis, mesh, axis).of(weights)
    divided: dict[str, Split] = {}
    for place, node in products.items():
        known, made = node_facts(node, analysis.facts, analysis.zeros), node.outputs[0].name
        for split in _parts_of_rows(graph, node, axis, rows) if _is_made_whole(graph, node, axis) else ():
            can_be = decide_by_wish(known, Wish(split), ranks) is not None
            if can_be and _keeps_parts(analysis, nodes[place + 1 :], made, split, ranks):
                divided[node.name] = split
                break
    return divided


def _looked_up_rows(analysis: Analysis, nodes: Sequence[gs.Node]) -> set[str]:
    """Return the rows of variables that nodes look up, and those tensors that only move them."""
    rows: set[str] = set()
    for node in nodes:
        rule = rule_of(node, analysis.facts)
        if node.op == "Gather" and node.inputs[0].name in analysis.training.variables:
            rows.add(node.outputs[0].name)
        elif rule is not None and rule.moves:
            moved = {node.inputs[number].name for term in rule.terms for number in term}
            rows.update(tensor.name for tensor in node.outputs if moved and moved <= rows)
    return rows


def _is_product(node: gs.Node, analysis: Analysis) -> bool:
    rule = rule_of(node, analysis.facts)
    return rule is not None and rule.is_contraction


def _product_s(node: gs.Node, analysis: Analysis, seconds: NodeSeconds) -> float:
    """Return what a product takes on one worker, 0 for another op."""
    rule = rule_of(node, analysis.facts)
    if rule is None or not rule.is_contraction:
        return 0.0
    return seconds(rule.flops, sum(analysis.facts.nbytes(t.name) for t in (*node.inputs, *node.outputs)))


def _is_made_whole(graph: LaidOutGraph, node: gs.Node, axis: int) -> bool:
    """Tell whether all ranks along the axis make the same."""
    decision = graph.decisions[node.name]
    layouts = (*decision.inputs, *decision.outputs)
    return all(isinstance(layout.along(axis), Replicate) for layout in layouts)


def _parts_of_rows(graph: LaidOutGraph, node: gs.Node, axis: int, rows: Collection[str]) -> Iterator[Split]:
    """Yield the dimensions of the output that it has of rows which ranks look up and sum."""
    rule = rule_of(node, graph.facts)
    assert rule is not None
    for tensor, dims in zip(node.inputs, rule.inputs, strict=True):
        is_sum = isinstance(graph.layout(tensor.name).along(axis), Partial)
        if dims is not None and is_sum and tensor.name in rows:
            yield from (
                Split(at) for at, factors in enumerate(rule.outputs[0]) if factors and factors in dims
            )


def _keeps_parts(
    analysis: Analysis, behind: Sequence[gs.Node], product: str, split: Split, ranks: int
) -> bool:
    """Tell whether what follows keeps the parts of a product until they are summed."""
    placements: dict[str, Placement] = {product: split}
    for node in behind:
        read = [placements.get(tensor.name, Replicate()) for tensor in node.inputs]
        if all(isinstance(placement, Replicate) for placement in read):
            continue
        decision = decide_by_rule(node_facts(node, analysis.facts, analysis.zeros), read, ranks)
        pairs = zip(read, decision.inputs, strict=True)
        if all(placement in (Replicate(), target) for placement, target in pairs):
            made = decision.outputs
        elif can_expand(node, analysis.facts):  # a loss has no parts
            shapes = [analysis.facts.shape(tensor.name) for tensor in (node.inputs[0], node.outputs[0])]
            made = tuple(read[:1]) if shapes[0] == shapes[1] else ()
        elif _is_separable(analysis, node):
            made = ()
        else:
            return False
        if _is_product(node, analysis) and any(isinstance(p, Partial) for p in made):
            return False
        results = zip(node.outputs, made, strict=False)
        placements.update((tensor.name, part) for tensor, part in results if isinstance(part, Split))
    return True


def _is_separable(analysis: Analysis, node: gs.Node) -> bool:
    """Tell whether what follows a concatenation can be computed of each of its parts."""
    if node.op != "Concat":
        return False
    found = follow_parts(ReadOrder(analysis.training.graph), node, analysis.facts)
    return can_separate(found, analysis.facts)
