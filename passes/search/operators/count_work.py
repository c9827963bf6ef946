"""Count what a rank does of an operator group, and of a parameter's update, as of a segment of a plan."""

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.indexed_slices import functions_of
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.local_sizes import LocalSizes
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.kernels import Shape
from partc.passes.scheduling.segment_work import NO_SHAPES, NO_TRANSPOSES, Work, WorkCounter
from partc.passes.search.operators.grouped_step import GroupedStep


def count_work(
    graph: LaidOutGraph,
    sizes: LocalSizes,
    nodes: tuple[gs.Node, ...],
    results: set[str],
    transposes: Mapping[str, gs.Node],
) -> Work:
    """Return the work of a rank for some nodes of a group that is laid out as a step of its own.

    `results`: values that others want; `transposes`: those of the whole step that vanish in products.
    """
    lowered = LoweredGraph(graph.meshes, functions=functions_of(graph.training))
    read_shapes: dict[tuple[str, int], Shape] = {}
    for node in nodes:
        decision = graph.decisions[node.name]
        lowered.flops[node.name] = sizes.local_flops(node, decision) or 0
        ends = zip((*node.inputs, *node.outputs), (*decision.inputs, *decision.outputs), strict=True)
        for place, (tensor, layout) in enumerate(ends):
            if not tensor.name:
                continue
            shape, nbytes = sizes.piece(tensor.name, layout)
            if tensor.name not in lowered.nbytes:
                lowered.nbytes[tensor.name] = nbytes
                lowered.shapes[tensor.name] = shape
            elif shape != lowered.shapes[tensor.name] and place < len(node.inputs):
                read_shapes[node.name, place] = shape
    return _count(lowered, nodes, results, read_shapes, transposes)


def count_update(step: GroupedStep, parameter: str, home: Layout, mesh: Mesh) -> Work:
    """Return the work of a parameter's update where it is kept: in parts what has its shape, or its rows'."""
    training = step.analysis.training
    lowered = LoweredGraph(Meshes((mesh,)), functions=functions_of(training))
    facts, share = step.analysis.facts, mesh.share(home)
    shape = facts.shape(parameter)
    parts = [mesh.parts(home, axis) for axis in range(len(shape))]
    nodes = step.updates[parameter]
    for node in nodes:
        for tensor in (*node.inputs, *node.outputs):
            if tensor.name:
                own = facts.shape(tensor.name)
                is_cut = own == shape or (len(own) > 1 and own[1:] == shape[1:])
                lowered.nbytes[tensor.name] = facts.nbytes(tensor.name) // (share if is_cut else 1)
                local = [-(-n // each) for n, each in zip(own, parts, strict=True)] if is_cut else own
                lowered.shapes[tensor.name] = tuple(size or None for size in local)
    return _count(lowered, nodes, {variable.next for variable in training.variables.values()})


def _count(
    lowered: LoweredGraph,
    nodes: tuple[gs.Node, ...],
    results: set[str],
    read_shapes: Mapping[tuple[str, int], Shape] = NO_SHAPES,
    transposes: Mapping[str, gs.Node] = NO_TRANSPOSES,
) -> Work:
    return WorkCounter(lowered, 1, frozenset(), read_shapes, transposes).count(list(nodes), results)
