"""Give every tensor a layout, walking the graph forward; sharding rules decide.

    data input    split on its sample axis, or per replica      variable   whole, or owned by servers
    op            split if a factor of its inputs is split and may be, partial if it sums that factor
                  or is linear in partials, per replica if an input is, whole otherwise

Partial tensors stay partial as long as ops are linear in them: where to sum is decided afterwards
(passes/layouts/aggregate_partials.py). Ops outside the main computation that read what servers own run on
the servers. Nothing is rewritten here: the result says, node by node, what its operands must be.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.simplify import SIZES
from partc.passes.indexed_rows.indexed_slices import gradient_read_by
from partc.passes.layouts.decide_node import decide_node
from partc.passes.layouts.decisions import Decision, run_whole
from partc.passes.layouts.laid_out_graph import WHOLE_ON_WORKERS, LaidOutGraph
from partc.passes.layouts.layouts import (
    REPLICAS,
    WORKER,
    Layout,
    PerReplica,
    Replicate,
    Split,
    served_rows,
)
from partc.passes.rules.sharding_rules import is_sum_rows
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.variables import DrawnInput


def propagate_layouts(graph: LaidOutGraph, per_replica: bool) -> None:
    """Fill `layouts` and `decisions`. Raises NotServable if an update cannot run on servers."""
    _place_inputs(graph, per_replica)
    sparse = sparse_readers(graph)
    graph.pushed = _pushed_gradients(graph)
    on_workers = _post_aggregation_on_workers(graph, sparse)
    for node in graph.training.graph.nodes:
        decision = decide(graph, node, sparse)
        if node.name in on_workers and decision.site == "server":
            results = zip(node.outputs, decision.outputs, strict=True)
            graph.pushed.update((tensor.name, rows.rows_of) for tensor, rows in results if rows.rows_of)
            decision = run_whole(node, WORKER)
        graph.decisions[node.name] = decision
        for tensor, layout in zip(node.outputs, decision.outputs, strict=True):
            graph.layouts[tensor.name] = layout


def decide(graph: LaidOutGraph, node: gs.Node, sparse: Mapping[str, str]) -> Decision:
    """Decide how a node runs whose operands have layouts: what is known before anything runs is whole."""
    is_known = all(graph.facts.fixed_value(tensor.name) is not None for tensor in node.outputs)
    if is_known and node.op not in SIZES:  # which are told of any part
        return run_whole(node, graph.configuration.site_of(node.name))
    return decide_node(graph, node, sparse)


def home_of(graph: LaidOutGraph, variable: str) -> Layout:
    """Return how the workers keep a variable."""
    home = graph.configuration.homes.get(variable, WHOLE_ON_WORKERS)
    return Layout(graph.configuration.keeper_of(variable), *home.placements)


def _place_inputs(graph: LaidOutGraph, per_replica: bool) -> None:
    fed = graph.training.data_inputs | graph.training.drawn_inputs
    is_alone = graph.replicas == 1 and not graph.meshes.are_replicas
    first = graph.meshes.sites[0]
    for name, entry in fed.items():
        outer = entry.outer if isinstance(entry, DrawnInput) else 1
        if entry.sample_axis is None:
            graph.layouts[name] = Layout(first)
            continue
        split = Split(entry.sample_axis, outer)
        _check_divides(graph, name, split, per_replica or is_alone)
        samples = graph.facts.shape(name)[entry.sample_axis] // outer
        layout = Layout(first, Replicate() if is_alone else PerReplica() if per_replica else split)
        if graph.meshes.microbatch_axis is not None:
            layout = layout.with_along(graph.meshes.microbatch_axis, split)
        factors = [samples] * len(layout.placements)
        graph.layouts[name] = Layout(first, *graph.meshes.of(first).nest(layout.placements, factors))
    for name, shard_input in graph.training.shard_inputs.items():
        is_own = shard_input.holds == "shard_id" and not is_alone
        graph.layouts[name] = Layout(first, PerReplica() if is_own else Replicate())
    for name in graph.training.variables:
        owner = graph.synchronised.owner.get(name)
        graph.layouts[name] = served_rows(owner) if owner else home_of(graph, name)


def _check_divides(graph: LaidOutGraph, name: str, split: Split, is_own: bool) -> None:
    """Hold the samples of a batch, or of a replica's own, to those who share it and to micro-batches.

    Earlier ones may have one more where the batch has a size of its own.
    """
    size = graph.facts.shape(name)[split.axis] // split.outer
    replicas, parts = 1 if is_own else graph.replicas, graph.meshes.microbatches
    if size % (replicas * parts) == 0 or (size > replicas * parts and graph.has_fixed_pieces(name)):
        return
    least = replicas * parts
    others = f"a multiple of {least} (`partc grad --batch-size {least}` makes one)"
    if size % replicas and (size < replicas or not graph.has_fixed_pieces(name)):
        raise UnsupportedModel(
            f"a batch of {size} does not divide among {replicas} replicas",
            at=f"input {name!r}, axis {split.axis}",
            fix=f"use a batch that is {others}, or {_of_fewer(graph, name, size)}",
        )
    raise UnsupportedModel(
        f"a replica's batch of {size // replicas} does not divide into {parts} micro-batches",
        at=f"input {name!r}, axis {split.axis}",
        fix=f"use a batch that is {others}, or {_fewer_microbatches(graph, name, size // replicas)}",
    )


def _of_fewer(graph: LaidOutGraph, name: str, samples: int) -> str:
    """Return what lets a batch be shared by fewer: each replica a batch of its own, where that can be."""
    configuration = graph.configuration
    is_divided_otherwise = any(
        wish.at and wish.split is not None and node not in configuration.samples
        for node, wishes in configuration.wishes.items()
        for axis, wish in wishes.items()
        if axis == REPLICAS
    )
    if is_divided_otherwise or len({mesh.size(REPLICAS) for mesh in graph.meshes.each}) > 1:
        return f"let it be divided among {samples} at most"
    own = "--batch per-replica"
    most = _fewer_microbatches(graph, name, samples)
    return (
        own
        if graph.meshes.microbatches <= 1 or samples % graph.meshes.microbatches == 0
        else f"{own} with {most}"
    )


def _fewer_microbatches(graph: LaidOutGraph, name: str, samples: int) -> str:
    fewer = range(1, min(samples, graph.meshes.microbatches) + 1)
    most = max(n for n in fewer if samples % n == 0 or graph.has_fixed_pieces(name))
    return f"microbatches={most}" if most > 1 else "no micro-batches"


def sparse_readers(graph: LaidOutGraph) -> dict[str, str]:
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


def _post_aggregation_on_workers(graph: LaidOutGraph, sparse: Mapping[str, str]) -> set[str]:
    """Return the nodes between a summed gradient and what owners keep, where workers are to run them."""
    chosen = graph.synchronised.chosen
    on_workers = {p for p, how in chosen.items() if how.post_aggregation == "worker"}
    if not on_workers:
        return set()
    summed = {dense: parameter for dense, parameter in graph.pushed.items() if parameter in on_workers}
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
