"""Give every tensor a layout, walking the graph forward; sharding rules decide.

    data input    split on its sample axis, or per replica      variable   whole, or owned by servers
    op            split if a factor of its inputs is split and may be, partial if it sums that factor
                  or is linear in partials, per replica if an input is, whole otherwise

Partial tensors stay partial as long as ops are linear in them: where to sum is decided afterwards
(passes/layouts/aggregate_partials.py). Ops outside the main computation that read what servers own run on
the servers. Nothing is rewritten here: the result says, node by node, what its operands must be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_graphsurgeon as gs

from partc.cost.strategy import Synchronisation
from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.indexed_slices import gradient_read_by
from partc.passes.layouts.configuration import Configuration, Wish
from partc.passes.layouts.decide_layouts import (
    AxisDecision,
    Decision,
    decide_axes,
    decide_by_rule,
    decide_by_wish,
    decide_on_servers,
    decide_on_table,
    decide_one_axis,
    decide_request,
    divides,
    keep_partial_on_servers,
    run_on_workers,
    run_where_requested,
    run_whole,
    slice_on_servers,
    slices_rows,
    whole_axis,
)
from partc.passes.layouts.layouts import (
    REPLICAS,
    Gathered,
    Layout,
    Meshes,
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
from partc.passes.rules.sharding_rules import is_sum_rows, rule_of
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.program import DrawnInput, Site

WHOLE_ON_WORKERS = Layout("worker")


@dataclass(frozen=True)
class Synchronised:
    """How the parameters and their followers are kept, in the terms that layouts need.

    chosen  parameter -> how it is synchronised
    owner   variable (parameter or follower) on servers -> its parameter
    """

    chosen: Mapping[str, Synchronisation]
    owner: Mapping[str, str]

    def method(self, parameter: str) -> str | None:
        """Return all_reduce, all_gather or servers; None where nothing was chosen yet."""
        return self.chosen[parameter].method if parameter in self.chosen else None


@dataclass
class LaidOutGraph:
    """The training graph with a layout for every tensor and a decision for every node."""

    training: TrainingGraph
    facts: Facts
    zeros: frozenset[str]
    configuration: Configuration
    synchronised: Synchronised
    main: frozenset[str]  # names of the main computation's nodes
    layouts: dict[str, Layout] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    # partial tensors that are summed over the ranks along a mesh axis: (tensor, axis)
    made_whole: frozenset[tuple[str, int]] = frozenset()

    @cached_property
    def homes(self) -> dict[str, dict[int, Split]]:
        """Return how dense gradients are split where their variables are kept: tensor -> mesh axis."""
        return {
            gradient.dense: dict(self.configuration.homes[name].splits())
            for name, gradient in self.training.gradients.items()
            if gradient.dense is not None and name in self.configuration.homes
        }

    @cached_property
    def stored(self) -> set[str]:
        """Return the tensors that come from variables and constants alone."""
        found = set(self.training.variables)
        for node in self.training.graph.nodes:
            reads = [t.name for t in node.inputs if t.inputs or not isinstance(t, gs.Constant)]
            if reads and found.issuperset(filter(None, reads)):
                found.update(tensor.name for tensor in node.outputs)
        return found

    def sums_before(self, tensor: str, axis: int) -> bool:
        """Tell whether a tensor that is partial along a mesh axis is whole once its operands are summed."""
        return isinstance(self.layout(tensor).along(axis), Partial) and (tensor, axis) not in self.made_whole

    def has_fixed_pieces(self, tensor: str, *layouts: Layout) -> bool:
        """Tell whether the sizes of a tensor's pieces are known, whatever the data, and in some layouts the
        same on all ranks."""
        is_known = tensor in self.facts.fixed_shapes and all(self.facts.shape(tensor))
        return is_known and not any(layout.uneven() for layout in layouts)

    def cut_at(self, site: Site, tensor: str, axis: int, split: Split) -> Placement:
        """Return how a mesh divides what another splits so: evenly or not, or whole if entries are few."""
        if not self.has_fixed_pieces(tensor):
            return split
        mesh = self.meshes.of(site)
        entries = split.uneven or self.facts.shape(tensor)[split.axis] // split.outer
        if entries < mesh.size(axis):
            return Replicate()
        return mesh.cut(axis, split.axis, split.outer, entries)

    def divided_at(self, site: Site, tensor: str, layout: Layout) -> Layout:
        """Return how a mesh divides what another divides so, if it is another of other parts."""
        if layout.site == site or self.meshes.are_paired(layout.site, site):
            return layout
        mesh = self.meshes.of(site)
        placements = [
            self.cut_at(site, tensor, axis, place)
            if isinstance(place, Split) and mesh.size(axis) > 1
            else Replicate()
            for axis, place in enumerate(layout.placements)
        ]
        return Layout(site, *placements)

    @property
    def meshes(self) -> Meshes:
        """Return the workers' meshes."""
        return self.configuration.meshes

    @property
    def replicas(self) -> int:
        """Return how many replicas there are."""
        return self.meshes.replicas

    def divides(self, node: gs.Node, decision: Decision) -> bool:
        """Tell whether the axes of its mesh together cut what a node reads and writes into equal parts."""
        return divides(self.meshes, node, decision, self.facts)

    def layout(self, tensor: str) -> Layout:
        """Return a tensor's native layout; constants are whole everywhere."""
        return self.layouts.get(tensor, WHOLE_ON_WORKERS)


def propagate_layouts(graph: LaidOutGraph, per_replica: bool) -> None:
    """Fill `layouts` and `decisions`. Raises NotServable if an update cannot run on servers."""
    _place_inputs(graph, per_replica)
    sparse = _sparse_readers(graph)
    pushed = _pushed_gradients(graph)
    on_workers = _post_aggregation_on_workers(graph, sparse, pushed)
    for node in graph.training.graph.nodes:
        if all(graph.facts.fixed_value(tensor.name) is not None for tensor in node.outputs):
            decision = run_whole(node, graph.configuration.site_of(node.name))
        else:
            decision = _decide(graph, node, sparse, pushed)
        if node.name in on_workers and decision.site == "server":
            decision = run_on_workers(decision)
        graph.decisions[node.name] = decision
        for tensor, layout in zip(node.outputs, decision.outputs, strict=True):
            graph.layouts[tensor.name] = layout


def _place_inputs(graph: LaidOutGraph, per_replica: bool) -> None:
    fed = graph.training.data_inputs | graph.training.drawn_inputs
    is_one_worker = graph.meshes.axes == 1 and graph.configuration.is_one_mesh
    is_alone = graph.replicas == 1 and not is_one_worker  # one replica of several workers
    first = graph.meshes.sites[0]
    for name, entry in fed.items():
        outer = entry.outer if isinstance(entry, DrawnInput) else 1
        if entry.sample_axis is None:
            graph.layouts[name] = Layout(first)
            continue
        split = Split(entry.sample_axis, outer)
        _check_divides(graph, name, split, per_replica or is_alone)
        samples = graph.facts.shape(name)[entry.sample_axis] // outer
        shared = graph.meshes.of(first).cut(REPLICAS, entry.sample_axis, outer, samples)
        graph.layouts[name] = Layout(
            first, Replicate() if is_alone else PerReplica() if per_replica else shared
        )
        if graph.meshes.microbatch_axis is not None:
            graph.layouts[name] = graph.layouts[name].with_along(graph.meshes.microbatch_axis, split)
    for name, given in graph.training.shard_inputs.items():
        is_own = given.holds == "shard_id" and not is_alone
        graph.layouts[name] = Layout(first, PerReplica() if is_own else Replicate())
    for name in graph.training.variables:
        owner = graph.synchronised.owner.get(name)
        home = graph.configuration.homes.get(name, WHOLE_ON_WORKERS)
        home = Layout(graph.configuration.keeper_of(name), *home.placements)
        graph.layouts[name] = Layout("server", Owned(owner)) if owner else home


def _check_divides(graph: LaidOutGraph, name: str, split: Split, is_own: bool) -> None:
    """Hold the samples of a batch, or of a replica's own, to those who share it.

    Earlier replicas may have one more where the batch has a size of its own, and is not divided further.
    """
    size = graph.facts.shape(name)[split.axis] // split.outer
    replicas, parts = 1 if is_own else graph.replicas, graph.meshes.microbatches
    is_uneven = parts == 1 and size > replicas and graph.has_fixed_pieces(name)
    if size % replicas and not is_uneven:
        raise UnsupportedModel(
            f"a batch of {size} does not divide among {replicas} replicas",
            at=f"input {name!r}, axis {split.axis}",
            fix=f"use a batch that is a multiple of {replicas * parts}, or of a size that the model tells, "
            f"{replicas} at least and without micro-batches, or --batch per-replica",
        )
    if parts > 1 and size % (replicas * parts):
        raise UnsupportedModel(
            f"a replica's batch of {size // replicas} does not divide into {parts} micro-batches",
            at=f"input {name!r}, axis {split.axis}",
            fix=f"use a batch that is a multiple of {replicas * parts}, or fewer micro-batches",
        )


def _sparse_readers(graph: LaidOutGraph) -> dict[str, str]:
    """Map each node that sums or scatters a parameter's indexed slices to the parameter."""
    readers: dict[str, str] = {}
    sparse = [gradient for gradient in graph.training.gradients.values() if gradient.is_sparse]
    for node in graph.training.graph.nodes:
        if node.name in graph.main or not (is_sum_rows(node) or node.op == "ScatterND"):
            continue
        gradient = gradient_read_by(node, sparse)
        if gradient is not None:
            readers[node.name] = gradient.parameter
    return readers


def _pushed_gradients(graph: LaidOutGraph) -> dict[str, str]:
    """Map each dense gradient of a parameter on servers to the parameter."""
    return {
        gradient.dense: gradient.parameter
        for gradient in graph.training.gradients.values()
        if gradient.dense is not None
        and not gradient.is_sparse
        and graph.synchronised.method(gradient.parameter) == "servers"
    }


def _post_aggregation_on_workers(
    graph: LaidOutGraph, sparse: Mapping[str, str], pushed: Mapping[str, str]
) -> set[str]:
    """Return the nodes between a summed gradient and what owners keep, where workers are to run them."""
    chosen = graph.synchronised.chosen
    on_workers = {p for p, how in chosen.items() if how.post_aggregation == "worker"}
    summed = {dense: parameter for dense, parameter in pushed.items() if parameter in on_workers}
    owned = set(graph.synchronised.owner)
    updates: set[str] = set()
    nodes: list[gs.Node] = []
    for node in graph.training.graph.nodes:
        results = [tensor.name for tensor in node.outputs]
        reads = {tensor.name for tensor in node.inputs}
        is_float = all(np.issubdtype(graph.facts.dtypes[name], np.floating) for name in results if name)
        if node.name in sparse:
            is_on_workers = is_sum_rows(node) and sparse[node.name] in on_workers
            summed.update(dict.fromkeys(results[1:] if is_on_workers else (), sparse[node.name]))
            owned.update(() if is_sum_rows(node) else results)
            updates.add(node.name)
        elif node.name in graph.main:
            continue
        elif reads & owned:
            owned.update(results)
            updates.add(node.name)
        elif is_float and len(parameters := {summed[name] for name in reads & summed.keys()}) == 1:
            nodes.append(node)
            summed.update(dict.fromkeys(results, parameters.pop()))
    return _up_to_last_shared(graph, nodes, updates, summed)


def _up_to_last_shared(
    graph: LaidOutGraph, nodes: Sequence[gs.Node], updates: set[str], summed: Mapping[str, str]
) -> set[str]:
    """Keep the nodes up to the last that shares a value with another gradient's; servers run those behind."""
    result: set[str] = set()
    for node in reversed(nodes):
        readers = {reader.name for tensor in node.outputs for reader in tensor.outputs}
        meets = any(
            operand.inputs and operand.name not in summed and graph.facts.fixed_value(operand.name) is None
            for operand in node.inputs
        )
        if meets or readers - updates:
            result.add(node.name)
        else:
            updates.add(node.name)
    return result


def _decide(
    graph: LaidOutGraph, node: gs.Node, sparse: Mapping[str, str], pushed: Mapping[str, str]
) -> Decision:
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
    """Decide axis by axis. Where that would cut too small, axes with a wish come first, and one that cuts
    what others cut already keeps the node whole."""
    count, site = graph.meshes.axes, graph.configuration.site_of(node.name)
    axes = [_decide_along(graph, node, rule, layouts, axis) for axis in range(count)]
    decision = decide_axes(site, axes)
    divided = [axis for axis in axes if not axis.is_whole]
    if not divided or (len(divided) == 1 and divided[0].is_even) or graph.divides(node, decision):
        return decision
    wishes = graph.configuration.wishes.get(node.name, {})
    fitting = [whole_axis(node) for _ in range(count)]
    for axis in sorted(range(count), key=lambda axis: axis not in wishes):
        fitting[axis] = axes[axis]
        if not graph.divides(node, decide_axes(site, fitting)):
            fitting[axis] = whole_axis(node)
    return decide_axes(site, fitting)


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
    stored = [name in graph.stored for name in names]
    if axis == REPLICAS and node.name in graph.main and all(stored) and rule is not None and rule.moves:
        return whole_axis(node)  # replicas gather what they share as it is kept, and turn it then
    return decide_by_rule(node, rule, placements, ranks, graph.zeros, graph.facts, stored, widens=True)


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
        if stacks and is_own and isinstance(placement, Split) and placement.axis == 0 and placement.outer > 1:
            return replace(placement, outer=placement.outer * graph.replicas)  # the blocks of all replicas
        return placement

    axes = [
        AxisDecision((placement,), (result(placement),))
        for placement in map(layout.along, range(max(1, len(layout.placements))))
    ]
    return Decision(graph.configuration.site_of(node.name), tuple(axes))


def _run_per_replica(node: gs.Node, placements: Sequence[Placement]) -> AxisDecision:
    inputs = tuple(p if isinstance(p, PerReplica) else Replicate() for p in placements)
    return AxisDecision(inputs, tuple(PerReplica() for _ in node.outputs))
