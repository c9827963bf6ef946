"""Let ranks that keep a table by rows update their own rows, by ids that all of them have.

before   r = Gather (slot, ids) partial ── AllReduce ── Sqrt ── Div ── ScatterND (table, ids)
after    r = Gather (slot, ids) own rows ────────────── Sqrt ── Div ── ScatterND (table, ids)

A rank finds the rows that it keeps, and zeros at all other ids, and writes those that it keeps, whatever
stands at the others. In between nothing but points of the same row may meet: no rank needs another's rows.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import onnx_graphsurgeon as gs

from partc.passes.layouts.decisions import Decision, axes_up_to
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import OwnRows, Placement, Replicate
from partc.passes.rules.sharding_rules import rule_of

Along = Mapping[int, Placement]  # number of an operand, or result -> its placement along an axis


def keep_own_rows(graph: LaidOutGraph, axis: int) -> None:
    """Let rows stay where they are that updates look up and write by the same ids.

    Needs layouts and decisions, and changes both.
    """
    updates = [node for node in graph.training.graph.nodes if node.name not in graph.main]
    for place, node in enumerate(updates):
        if node.op == "Gather" and _cuts_table(graph.decisions[node.name], axis):
            changed = _kept_apart(graph, node, updates[place + 1 :], axis)
            graph.decisions.update(changed)
            for other in updates[place:]:
                if other.name in changed:
                    graph.layouts[other.outputs[0].name] = changed[other.name].outputs[0]


def _kept_apart(
    graph: LaidOutGraph, lookup: gs.Node, behind: Collection[gs.Node], axis: int
) -> dict[str, Decision]:
    """Return how nodes run where what a lookup finds stays, or nothing if one needs others' rows."""
    own, found = _own_rows(graph, lookup), {lookup.outputs[0].name}
    changed = {lookup.name: _with_along(graph, lookup, axis, {}, {0: own})}
    results = graph.training.results
    for node in behind:
        reads = {number: own for number, tensor in enumerate(node.inputs) if tensor.name in found}
        if not reads:
            continue
        if _writes_rows(graph, lookup, node, reads, axis):
            changed[node.name] = _with_along(graph, node, axis, reads, {})
        elif _keeps_rows(graph, lookup, node, reads, axis):
            changed[node.name] = _with_along(graph, node, axis, reads, {0: own})
            found.add(node.outputs[0].name)
        else:
            return {}
    return {} if found & results else changed


def _own_rows(graph: LaidOutGraph, lookup: gs.Node) -> OwnRows:
    table, ids = lookup.inputs
    return OwnRows(ids.name, graph.facts.shape(table.name)[0])


def _cuts_table(decision: Decision, axis: int) -> bool:
    return axis < len(decision.axes) and decision.axes[axis].cuts_table


def _writes_rows(graph: LaidOutGraph, lookup: gs.Node, node: gs.Node, reads: Along, axis: int) -> bool:
    """Tell whether a node writes at a lookup's ids, on a table of which each rank keeps the same rows."""
    decision, read = graph.decisions[node.name], graph.decisions[lookup.name]
    if node.op != "ScatterND" or reads.keys() != {2} or not _cuts_table(decision, axis):
        return False
    makers = node.inputs[1].inputs
    are_ids = (
        bool(makers) and makers[0].op == "Unsqueeze" and makers[0].inputs[0].name == lookup.inputs[1].name
    )
    rows = [graph.facts.shape(table.inputs[0].name)[:1] for table in (node, lookup)]
    return (
        are_ids
        and rows[0] == rows[1]
        and decision.site == read.site
        and decision.inputs[0].along(axis) == read.inputs[0].along(axis)
    )


def _keeps_rows(graph: LaidOutGraph, lookup: gs.Node, node: gs.Node, reads: Along, axis: int) -> bool:
    """Tell whether each row that a node makes comes of the same row, and of what all ranks have whole."""
    decision, rule = graph.decisions[node.name], rule_of(node, graph.facts)
    if rule is None or len(node.outputs) != 1 or decision.site != graph.decisions[lookup.name].site:
        return False
    own, made = _own_rows(graph, lookup), rule.outputs[0][:1]
    others = [layout.along(axis) for n, layout in enumerate(decision.inputs) if n not in reads]
    return (
        all(placement in (Replicate(), own) for placement in others)
        and all((rule.inputs[number] or ())[:1] == made for number in reads)
        and [len(factors) for factors in made] == [1]
        and made[0][0] not in rule.whole
    )


def _with_along(graph: LaidOutGraph, node: gs.Node, axis: int, inputs: Along, outputs: Along) -> Decision:
    """Return a node's decision with some of its placements along an axis in place of what they are."""
    decision = graph.decisions[node.name]
    axes = axes_up_to(axis, node, decision)
    axes[axis] = replace(
        axes[axis],
        inputs=tuple(inputs.get(number, own) for number, own in enumerate(axes[axis].inputs)),
        outputs=tuple(outputs.get(number, own) for number, own in enumerate(axes[axis].outputs)),
    )
    return Decision(decision.site, tuple(axes))
