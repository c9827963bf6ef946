"""Decide how a node of a graph runs: on servers where they own what it reads, else axis by axis of its mesh.

In the order in which they are asked: how replicas are put together, owned rows, a strategy's wish, how a
gradient is kept, ids of a part of a table, sharding rules. A decision depends on what is in its arguments
alone: nodes of equal facts whose operands lie alike are decided once, whatever the graph and strategy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import onnx_graphsurgeon as gs

from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import (
    decide_by_owners,
    decide_by_rule,
    decide_by_wish,
    decide_on_table,
    gather_stored,
)
from partc.passes.layouts.decide_on_servers import (
    decide_on_servers,
    decide_request,
    keep_partial_on_servers,
    run_where_requested,
    slice_on_servers,
    slices_rows,
)
from partc.passes.layouts.decisions import (
    AxisDecision,
    Decision,
    decide_axes,
    decide_one_axis,
    divides,
    run_whole,
    whole_axis,
)
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import (
    MICROBATCHES,
    REPLICAS,
    Layout,
    Partial,
    PerReplica,
    Placement,
    Replicate,
    RequestedRows,
    Split,
)
from partc.passes.layouts.meshes import Mesh
from partc.passes.replicas import average_replicas
from partc.passes.rules.sharding_rules import NodeFacts, node_facts
from partc.runtime.plan.program import Site

NOT_DIVIDED = 0  # in place of ranks: along this axis other meshes alone have several
NO_WISHES: Mapping[int, Wish] = {}


def decide_node(graph: LaidOutGraph, node: gs.Node, sparse: Mapping[str, str]) -> Decision:
    """Decide how a node runs whose operands have layouts already.

    sparse  nodes that sum or scatter a parameter's indexed slices -> the parameter

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
            rows = Split(0, rows_of=sparse[node.name])
            return decide_one_axis("server", [rows for _ in node.inputs], [rows for _ in node.outputs])
        return run_whole(node, graph.configuration.site_of(node.name))
    known = node_facts(node, graph.facts, graph.zeros)
    if node.name not in graph.main:
        owners = _owners_of(graph, node, layouts)
        if owners:
            return decide_on_servers(node, known, layouts, owners, graph.pushed)
        decision = keep_partial_on_servers(known, layouts)
        if decision is not None:
            return decision
    decision = _decide_on_workers(graph, node, known, layouts)
    return _move_to_servers(graph, node, layouts, decision) or decision


class _Operand(NamedTuple):
    """An operand as the workers have it, by mesh axis, once they have fetched it: what is left out is whole.

    stored  it comes from variables and constants alone
    home    by mesh axis, which part of this gradient is kept where its variable is
    """

    placements: tuple[Placement, ...]
    is_here: bool  # on the node's own mesh
    stored: bool
    home: tuple[tuple[int, Split], ...]


class _Node(NamedTuple):
    """What a node's decision on the workers' meshes depends on, beside its facts. `axes`: of its mesh.

    home    by mesh axis, which part of the gradient that it makes is kept
    tables  by mesh axis, how ids index a table in parts
    """

    site: Site
    axes: tuple[tuple[str, int], ...]
    is_one_mesh: bool
    is_main: bool
    operands: tuple[_Operand, ...]
    home: tuple[tuple[int, Split], ...]
    wishes: tuple[tuple[int, Wish], ...]
    tables: tuple[AxisDecision | None, ...]


class _Along(NamedTuple):
    """The same along one axis, of so many ranks.

    `has_neighbours`: parts lie on other ranks, whose entries windows read; micro-batches are moments of one.
    """

    axis: int
    ranks: int
    has_neighbours: bool
    is_main: bool
    placements: tuple[Placement, ...]
    are_free: bool  # no operand is divided that is here already
    stored: tuple[bool, ...]
    homes: tuple[Split | None, ...]  # of operands
    home: Split | None
    wish: Wish | None
    table: AxisDecision | None


def decide_alone(graph: LaidOutGraph, node: gs.Node, axis: int) -> AxisDecision:
    """Return how a node runs along one axis of its mesh where the others leave it entries enough."""
    known = node_facts(node, graph.facts, graph.zeros)
    described = _describe(graph, node, known, [graph.layout(tensor.name) for tensor in node.inputs])
    return _decide_along(known, _along(described, dict(described.wishes), axis))


def _decide_on_workers(
    graph: LaidOutGraph, node: gs.Node, known: NodeFacts, layouts: Sequence[Layout]
) -> Decision:
    return _decide(known, _describe(graph, node, known, layouts))


def _describe(graph: LaidOutGraph, node: gs.Node, known: NodeFacts, layouts: Sequence[Layout]) -> _Node:
    site = graph.configuration.site_of(node.name)
    homes, stored = graph.homes, graph.stored
    operands = tuple(
        [
            _Operand(
                _fetched(graph, tensor.name, layout, site),
                layout.site == site,
                tensor.name in stored,
                homes.get(tensor.name, ()),
            )
            for tensor, layout in zip(node.inputs, layouts, strict=True)
        ]
    )
    return _Node(
        site,
        graph.meshes.of(site).axes,
        graph.configuration.is_one_mesh,
        node.name in graph.main,
        operands,
        homes.get(node.outputs[0].name, ()),
        tuple(graph.configuration.wishes.get(node.name, NO_WISHES).items()),
        _tables(graph, node, known, layouts),
    )


@lru_cache(maxsize=1 << 16)
def _decide(known: NodeFacts, node: _Node) -> Decision:
    """Decide axis by axis. Where that would cut too small, wishes leave inner blocks to other axes; then axes
    with a wish come first, and one that cuts what others cut already keeps the node whole."""
    mesh, wishes = Mesh(node.site, node.axes), dict(node.wishes)
    axes = [_decide_along(known, _along(node, wishes, axis)) for axis in range(len(node.axes))]
    decision = decide_axes(mesh, axes)
    divided = [axis for axis in axes if not axis.is_whole]
    if not divided or (len(divided) == 1 and divided[0].is_even) or divides(mesh, known, decision):
        return decision
    axes = _before_blocks(known, node.axes, wishes, axes)
    if divides(mesh, known, decision := decide_axes(mesh, axes)):
        return decision
    fitting = [whole_axis(known) for _ in axes]
    for axis in sorted(range(len(axes)), key=lambda axis: axis not in wishes):
        fitting[axis] = axes[axis]
        if not divides(mesh, known, decide_axes(mesh, fitting)):
            fitting[axis] = whole_axis(known)
    return decide_axes(mesh, fitting)


def _before_blocks(
    known: NodeFacts,
    mesh_axes: Sequence[tuple[str, int]],
    wishes: Mapping[int, Wish],
    axes: Sequence[AxisDecision],
) -> list[AxisDecision]:
    """Return the axes where wishes cut blocks whose entries another axis cuts, such as the samples of each.

    Of rows that are times x samples a wish for three parts of them cuts the times, if the samples are cut.
    """
    decisions = list(axes)
    for axis, wish in wishes.items():
        if (split := wish.split) is None:
            continue
        others = [_placement(other, wish.operand) for number, other in enumerate(axes) if number != axis]
        behind = [p.outer for p in others if isinstance(p, Split) and p.axis == split.axis]
        if blocks := min((outer // split.outer for outer in behind if outer > split.outer), default=0):
            first = replace(wish, split=replace(split, uneven=blocks))
            decisions[axis] = decide_by_wish(known, first, mesh_axes[axis][1]) or axes[axis]
    return decisions


def _placement(decision: AxisDecision, operand: int | None) -> Placement:
    return decision.outputs[0] if operand is None else decision.inputs[operand]


def _along(node: _Node, wishes: Mapping[int, Wish], axis: int) -> _Along:
    name, ranks = node.axes[axis]
    placements = tuple(
        [own.placements[axis] if axis < len(own.placements) else Replicate() for own in node.operands]
    )
    return _Along(
        axis,
        ranks if ranks > 1 or node.is_one_mesh else NOT_DIVIDED,
        name != MICROBATCHES,
        node.is_main,
        placements,
        not any(
            own.is_here and not isinstance(placement, Replicate)
            for own, placement in zip(node.operands, placements, strict=True)
        ),
        tuple([axis == REPLICAS and own.stored for own in node.operands]),  # of a replica, bytes decide
        tuple([dict(own.home).get(axis) for own in node.operands]),
        dict(node.home).get(axis),
        wishes.get(axis),
        node.tables[axis] if node.tables else None,
    )


@lru_cache(maxsize=1 << 16)
def _decide_along(known: NodeFacts, along: _Along) -> AxisDecision:
    """Decide how the workers run a node along one axis of their mesh."""
    placements: Sequence[Placement] = along.placements
    if any(isinstance(placement, PerReplica) for placement in placements):
        return _run_per_replica(known, placements)
    if along.ranks == NOT_DIVIDED:
        return whole_axis(known)
    if not along.is_main:  # an update takes a gradient as its variable is kept
        placements = [home or native for home, native in zip(along.homes, placements, strict=True)]
    by_wish = partial(decide_by_wish, known, ranks=along.ranks, widens=along.has_neighbours)
    if along.wish is not None and (wished := by_wish(along.wish)):
        return wished
    if along.are_free and along.home and (wished := by_wish(Wish(along.home))):
        return wished
    if along.table is not None:
        return along.table
    if along.is_main and all(along.stored) and known.rule is not None and known.rule.moves:
        return whole_axis(known)  # replicas gather what they share as it is kept, and turn it then
    if along.is_main and (whole := gather_stored(known, placements, along.stored)):
        return whole
    own_home = along.home if along.is_main else None
    return decide_by_rule(
        known, placements, along.ranks, along.stored, widens=along.has_neighbours, home=own_home
    )


def _tables(
    graph: LaidOutGraph, node: gs.Node, known: NodeFacts, layouts: Sequence[Layout]
) -> tuple[AxisDecision | None, ...]:
    if node.op not in ("Gather", "ScatterND"):
        return ()
    return tuple(_decide_on_table(graph, node, known, layouts, axis) for axis in range(graph.meshes.axes))


def _decide_on_table(
    graph: LaidOutGraph, node: gs.Node, known: NodeFacts, layouts: Sequence[Layout], axis: int
) -> AxisDecision | None:
    is_one_id_a_row = node.op != "ScatterND" or graph.facts.shape(node.inputs[1].name)[-1:] == (1,)
    if not layouts or not is_one_id_a_row:
        return None
    table, result = node.inputs[0].name, node.outputs[0].name
    site = graph.configuration.site_of(node.name)
    if axis == REPLICAS:
        if layouts[0].site != site or not isinstance(layouts[0].along(axis), Split):
            return None
        if node.name in graph.main:
            is_looked_up = node.op == "Gather" and table in graph.looked_up and graph.meshes.microbatches == 1
            ranks = graph.meshes.of(site).size(axis)
            return decide_by_owners(known, layouts, axis, ranks) if is_looked_up else None
    homes = dict(graph.homes.get(result, ()))  # perhaps on another mesh
    in_rows = [number for number, split in homes.items() if split.axis == 0] == [axis]
    placement = graph.cut_at(site, result, axis, homes[axis]) if in_rows else None
    here = [graph.divided_at(site, table, layouts[0]), *layouts[1:]]
    table_split = placement if isinstance(placement, Split) and placement.outer == 1 else None
    return decide_on_table(known, here, axis, table_split)


def _decide_shape(graph: LaidOutGraph, layout: Layout) -> Decision:
    """Shape and Size of the whole are had from any piece."""
    if isinstance(requested := layout.along(REPLICAS), RequestedRows):
        return decide_one_axis("worker", [requested.returned], [Replicate()])
    axes = range(max(1, len(layout.placements)))
    return Decision(layout.site, tuple(AxisDecision((layout.along(a),), (Replicate(),)) for a in axes))


def _fetched(graph: LaidOutGraph, tensor: str, layout: Layout, site: Site) -> tuple[Placement, ...]:
    """Return how workers have a tensor along every axis, once they have fetched it: sums are made before.

    Of a mesh of another shape they take samples where they are divided there, in parts of their own, and all
    else as suits them.
    """
    if layout.site == site or layout.is_whole:
        return layout.placements
    return tuple([_fetched_along(graph, tensor, layout, axis, site) for axis in range(graph.meshes.axes)])


def _fetched_along(graph: LaidOutGraph, tensor: str, layout: Layout, axis: int, site: Site) -> Placement:
    if isinstance(requested := layout.along(REPLICAS), RequestedRows):
        return requested.returned if axis == REPLICAS else Replicate()
    if layout.site == "server":
        return Replicate()
    placement, meshes = layout.along(axis), graph.meshes
    if meshes.are_paired(layout.site, site):
        return Replicate() if isinstance(placement, Partial) else placement
    if axis not in (REPLICAS, meshes.microbatch_axis) or isinstance(placement, Partial):
        return Replicate()
    return graph.cut_at(site, tensor, axis, placement) if isinstance(placement, Split) else placement


def _move_to_servers(
    graph: LaidOutGraph, node: gs.Node, layouts: Sequence[Layout], decision: Decision
) -> Decision | None:
    """Return how servers run a node of the main computation that reads what they own, if they do."""
    if not layouts:
        return None
    chosen, parameter = graph.synchronised.chosen, layouts[0].rows_of
    if isinstance(requested := layouts[0].along(REPLICAS), RequestedRows):
        moves = node.name in chosen[requested.parameter].on_servers
        return run_where_requested(decision, requested) if moves else None
    if parameter and node.op == "Gather" and node.attrs.get("axis", 0) == 0:
        return decide_request(node, decision, parameter, graph.facts)
    if not parameter or node.name not in chosen[parameter].on_servers:
        return None
    if slices_rows(node, graph.facts):
        return slice_on_servers(node, parameter)
    return decide_on_servers(node, node_facts(node, graph.facts), layouts, {parameter}, {})


def _owners_of(graph: LaidOutGraph, node: gs.Node, layouts: Sequence[Layout]) -> set[str]:
    """Return the parameters whose rows the node reads."""
    pushed = {graph.pushed[tensor.name] for tensor in node.inputs if tensor.name in graph.pushed}
    return pushed | {layout.rows_of for layout in layouts if layout.rows_of}


def _decide_replica_op(graph: LaidOutGraph, node: gs.Node, layout: Layout) -> Decision:
    """Average, Sum and Stack take what each replica has of its own; Stack, what all have alike, of each."""
    stacks = node.op == average_replicas.STACK
    uneven = {(factor.axis, factor.outer) for factor in layout.uneven()}

    def result(axis: int, placement: Placement) -> Placement:
        if isinstance(placement, PerReplica):
            return Split(0) if stacks else Partial("sum")
        if stacks and axis == REPLICAS:
            return Split(0)
        if not (stacks and isinstance(placement, Split) and placement.axis == 0):
            return placement
        # Among the blocks of all replicas: a factor as a whole, also along axes that cut it evenly.
        is_apart = placement.outer > 1 or (placement.axis, placement.outer) in uneven
        return replace(placement, outer=placement.outer * graph.replicas) if is_apart else placement

    axes = [
        AxisDecision((placement,), (result(axis, placement),))
        for axis, placement in enumerate(map(layout.along, range(max(1, len(layout.placements)))))
    ]
    return Decision(graph.configuration.site_of(node.name), tuple(axes))


def _run_per_replica(node: NodeFacts, placements: Sequence[Placement]) -> AxisDecision:
    inputs = tuple(p if isinstance(p, PerReplica) else Replicate() for p in placements)
    return AxisDecision(inputs, tuple(PerReplica() for _ in node.outputs))
