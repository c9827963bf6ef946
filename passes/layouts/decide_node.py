"""Decide how a node of a graph runs: on servers where they own what it reads, else axis by axis of its mesh.

In the order in which they are asked: how replicas are put together, owned rows, a strategy's wish, how a
gradient is kept, ids of a part of a table, sharding rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import (
    AxisDecision,
    Decision,
    decide_axes,
    decide_by_rule,
    decide_by_wish,
    decide_on_table,
    decide_one_axis,
    run_whole,
    whole_axis,
)
from partc.passes.layouts.decide_on_servers import (
    decide_on_servers,
    decide_request,
    keep_partial_on_servers,
    run_where_requested,
    slice_on_servers,
    slices_rows,
)
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import (
    REPLICAS,
    Gathered,
    Layout,
    Owned,
    Partial,
    PerReplica,
    Placement,
    Replicate,
    RequestedRows,
    Split,
)
from partc.passes.replicas import average_replicas
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import rule_of
from partc.runtime.plan.program import Site


def decide_node(
    graph: LaidOutGraph, node: gs.Node, sparse: Mapping[str, str], pushed: Mapping[str, str]
) -> Decision:
    """Decide how a node runs whose operands have layouts already.

    sparse  nodes that sum or scatter a parameter's indexed slices -> the parameter
    pushed  dense gradients of parameters on servers -> the parameter

    Raises NotServable.
    """
    layouts = [graph.layout(tensor.name) for tensor in node.inputs]
    if node.domain == average_replicas.REPLICA_DOMAIN:
        return _decide_replica_op(graph, node, layouts[0])
    if node.op in ("Shape", "Size"):
        return _decide_shape(graph, layouts[0])
    if node.name in sparse:
        method = graph.synchronised.method(sparse[node.name])
        if method == "servers":
            owned = Owned(sparse[node.name])
            return decide_one_axis("server", [owned for _ in node.inputs], [owned for _ in node.outputs])
        return run_whole(node, graph.configuration.site_of(node.name))
    rule = rule_of(node, graph.facts)
    if node.name not in graph.main:
        owners = _owners_of(node, layouts, pushed)
        if owners:
            return decide_on_servers(node, rule, layouts, owners, pushed)
        decision = keep_partial_on_servers(node, rule, layouts, graph.zeros)
        if decision is not None:
            return decision
    decision = _decide_on_workers(graph, node, rule, layouts)
    return _move_to_servers(graph, node, layouts, decision) or decision


def _decide_on_workers(
    graph: LaidOutGraph, node: gs.Node, rule: ShardingRule | None, layouts: Sequence[Layout]
) -> Decision:
    """Decide axis by axis. Where that would cut too small, wishes leave inner blocks to other axes; then axes
    with a wish come first, and one that cuts what others cut already keeps the node whole."""
    count, mesh = graph.meshes.axes, graph.meshes.of(graph.configuration.site_of(node.name))
    axes = [_decide_along(graph, node, rule, layouts, axis) for axis in range(count)]
    decision = decide_axes(mesh, axes)
    divided = [axis for axis in axes if not axis.is_whole]
    if not divided or (len(divided) == 1 and divided[0].is_even) or graph.divides(node, decision):
        return decision
    wishes = graph.configuration.wishes.get(node.name, {})
    axes = _before_blocks(graph, node, rule, wishes, axes)
    if graph.divides(node, decision := decide_axes(mesh, axes)):
        return decision
    fitting = [whole_axis(node) for _ in range(count)]
    for axis in sorted(range(count), key=lambda axis: axis not in wishes):
        fitting[axis] = axes[axis]
        if not graph.divides(node, decide_axes(mesh, fitting)):
            fitting[axis] = whole_axis(node)
    return decide_axes(mesh, fitting)


def _before_blocks(
    graph: LaidOutGraph,
    node: gs.Node,
    rule: ShardingRule | None,
    wishes: Mapping[int, Wish],
    axes: Sequence[AxisDecision],
) -> list[AxisDecision]:
    """Return the axes where wishes cut blocks whose entries another axis cuts, such as the samples of each.

    Of rows that are times x samples a wish for three parts of them cuts the times, if the samples are cut.
    """
    site, found = graph.configuration.site_of(node.name), list(axes)
    for axis, wish in wishes.items():
        if (split := wish.split) is None:
            continue
        others = [_placement(other, wish.operand) for number, other in enumerate(axes) if number != axis]
        behind = [p.outer for p in others if isinstance(p, Split) and p.axis == split.axis]
        if blocks := min((outer // split.outer for outer in behind if outer > split.outer), default=0):
            first = replace(wish, split=replace(split, uneven=blocks))
            cut = decide_by_wish(node, rule, first, graph.meshes.size(site, axis), graph.zeros)
            found[axis] = cut or axes[axis]
    return found


def _placement(decision: AxisDecision, operand: int | None) -> Placement:
    return decision.outputs[0] if operand is None else decision.inputs[operand]


def _decide_along(
    graph: LaidOutGraph, node: gs.Node, rule: ShardingRule | None, layouts: Sequence[Layout], axis: int
) -> AxisDecision:
    """Decide how the workers run a node along one axis of their mesh."""
    names = [tensor.name for tensor in node.inputs]
    site = graph.configuration.site_of(node.name)
    placements = [
        _fetched(graph, name, layout, axis, site) for name, layout in zip(names, layouts, strict=True)
    ]
    if any(isinstance(placement, PerReplica) for placement in placements):
        return _run_per_replica(node, placements)
    if graph.meshes.size(site, axis) == 1 and not graph.configuration.is_one_mesh:
        return whole_axis(node)
    if node.name not in graph.main:  # an update takes a gradient as its variable is kept
        homes = [graph.homes.get(name, {}).get(axis) for name in names]
        placements = [home or native for home, native in zip(homes, placements, strict=True)]
    ranks = graph.meshes.size(site, axis)
    wish = graph.configuration.wishes.get(node.name, {}).get(axis)
    if wish is not None and (asked := decide_by_wish(node, rule, wish, ranks, graph.zeros)):
        return asked
    if (kept := _kept_part(graph, node, layouts, axis)) and (
        asked := decide_by_wish(node, rule, Wish(kept), ranks, graph.zeros)
    ):
        return asked
    if axis != REPLICAS and (on_table := _decide_on_table(graph, node, layouts, axis)) is not None:
        return on_table
    stored = [axis == REPLICAS and name in graph.stored for name in names]  # of a replica, bytes decide
    if node.name in graph.main and all(stored) and rule is not None and rule.moves:
        return whole_axis(node)  # replicas gather what they share as it is kept, and turn it then
    kept = graph.homes.get(node.outputs[0].name, {}).get(axis) if node.name in graph.main else None
    return decide_by_rule(
        node, rule, placements, ranks, graph.zeros, graph.facts, stored, widens=True, kept=kept
    )


def _kept_part(graph: LaidOutGraph, node: gs.Node, layouts: Sequence[Layout], axis: int) -> Split | None:
    """Return which part of a gradient is kept, if no operand is divided that is here already."""
    site = graph.configuration.site_of(node.name)
    are_free = all(layout.site != site or isinstance(layout.along(axis), Replicate) for layout in layouts)
    return graph.homes.get(node.outputs[0].name, {}).get(axis) if are_free else None


def _decide_on_table(
    graph: LaidOutGraph, node: gs.Node, layouts: Sequence[Layout], axis: int
) -> AxisDecision | None:
    is_one_id_a_row = node.op != "ScatterND" or graph.facts.shape(node.inputs[1].name)[-1:] == (1,)
    if not layouts or not is_one_id_a_row:
        return None
    table, made = node.inputs[0].name, node.outputs[0].name
    site = graph.configuration.site_of(node.name)
    homes = graph.homes.get(made, {})  # perhaps on another mesh
    in_rows = [number for number, split in homes.items() if split.axis == 0] == [axis]
    wanted = graph.cut_at(site, made, axis, homes[axis]) if in_rows else None
    here = [graph.divided_at(site, table, layouts[0]), *layouts[1:]]
    kept = wanted if isinstance(wanted, Split) and wanted.outer == 1 else None
    return decide_on_table(node, here, axis, kept)


def _decide_shape(graph: LaidOutGraph, layout: Layout) -> Decision:
    """Shape and Size of the whole are had from any piece."""
    if isinstance(requested := layout.along(REPLICAS), RequestedRows):
        return decide_one_axis("worker", [requested.returned], [Replicate()])
    axes = range(max(1, len(layout.placements)))
    return Decision(layout.site, tuple(AxisDecision((layout.along(a),), (Replicate(),)) for a in axes))


def _fetched(graph: LaidOutGraph, tensor: str, layout: Layout, axis: int, site: Site) -> Placement:
    """Return how workers have a tensor along an axis, once they have fetched it: sums are made before.

    Of a mesh of another shape they take samples where they are divided there, in parts of their own, and all
    else as suits them.
    """
    if isinstance(requested := layout.along(REPLICAS), RequestedRows):
        return requested.returned if axis == REPLICAS else Replicate()
    if layout.site == "server":
        return Replicate()
    placement, meshes = layout.along(axis), graph.meshes
    if layout.site == site or meshes.are_paired(layout.site, site):
        is_summed = isinstance(placement, Partial) and layout.site != site
        return Replicate() if is_summed else placement
    if axis not in (REPLICAS, meshes.microbatch_axis) or isinstance(placement, Partial):
        return Replicate()
    return graph.cut_at(site, tensor, axis, placement) if isinstance(placement, Split) else placement


def _move_to_servers(
    graph: LaidOutGraph, node: gs.Node, layouts: Sequence[Layout], decision: Decision
) -> Decision | None:
    """Return how servers run a node of the main computation that reads what they own, if they do."""
    source = layouts[0].along(REPLICAS) if layouts else None
    if not isinstance(source, Owned | RequestedRows):
        return None
    if isinstance(source, Owned) and node.op == "Gather" and node.attrs.get("axis", 0) == 0:
        return decide_request(node, decision, source.parameter, graph.facts)
    if node.name not in graph.synchronised.chosen[source.parameter].on_servers:
        return None
    if isinstance(source, RequestedRows):
        return run_where_requested(decision, source)
    if slices_rows(node, graph.facts):
        return slice_on_servers(node, source.parameter)
    return decide_on_servers(node, rule_of(node, graph.facts), layouts, {source.parameter}, {})


def _owners_of(node: gs.Node, layouts: Sequence[Layout], pushed: Mapping[str, str]) -> set[str]:
    """Return the parameters whose owned rows the node reads."""
    placements = [layout.along(REPLICAS) for layout in layouts]
    owned = {placement.parameter for placement in placements if isinstance(placement, Owned | Gathered)}
    return owned | {pushed[tensor.name] for tensor in node.inputs if tensor.name in pushed}


def _decide_replica_op(graph: LaidOutGraph, node: gs.Node, layout: Layout) -> Decision:
    """Average, Sum and Stack take what each replica has of its own."""
    stacks = node.op == average_replicas.STACK
    is_own = isinstance(layout.along(REPLICAS), PerReplica)

    def result(placement: Placement) -> Placement:
        if isinstance(placement, PerReplica):
            return Split(0) if stacks else Partial("sum")
        if not (stacks and is_own and isinstance(placement, Split) and placement.axis == 0):
            return placement
        is_apart = placement.outer > 1 or placement.uneven  # among the blocks of all replicas
        return replace(placement, outer=placement.outer * graph.replicas) if is_apart else placement

    axes = [
        AxisDecision((placement,), (result(placement),))
        for placement in map(layout.along, range(max(1, len(layout.placements))))
    ]
    return Decision(graph.configuration.site_of(node.name), tuple(axes))


def _run_per_replica(node: gs.Node, placements: Sequence[Placement]) -> AxisDecision:
    inputs = tuple(p if isinstance(p, PerReplica) else Replicate() for p in placements)
    return AxisDecision(inputs, tuple(PerReplica() for _ in node.outputs))
