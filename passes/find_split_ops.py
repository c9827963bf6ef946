"""Find the ops that keep whole what a strategy splits, and that can be said in others that do not.

A split that reaches a Softmax's own axis would be gathered for it. In primitives its sums are made rank by
rank, and what is sent is a row's maximum and sum. Where parts of different sizes are joined, what is computed
of the whole axis is computed of each part.
"""

from collections.abc import Callable, Mapping, Sequence

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out
from partc.passes.graph.expand_normalised import can_expand, expand
from partc.passes.graph.separate_parts import (
    ReadOrder,
    Separation,
    can_separate,
    follow_parts,
    separate,
    to_expand,
)
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.configuration import Configuration
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import REPLICAS, Layout, Replicate, Split
from partc.passes.layouts.meshes import Meshes

Rewrite = Callable[[TrainingGraph], Mapping[str, Sequence[str]]]


def find_rewriting(analysis: Analysis, configuration: Configuration) -> Rewrite | None:
    """Return how to say in other ops what keeps whole what is split; None: there is nothing.

    It changes a training graph in place, and returns node -> the names of those in its place. Facts are to be
    inferred again then, and this to be asked again: a split may reach further ops.
    """
    graph = lay_out(analysis, {}, configuration)
    separations = _separations(graph)
    reached = {
        node.name
        for node in graph.training.graph.nodes
        if can_expand(node, graph.facts) and _gathers_parts(graph, node)
    }
    nodes = reached.union(*(to_expand(found, graph.facts) for found in separations))
    if nodes:
        return lambda training: expand(training, nodes, graph.facts)
    found = next((found for found in separations if found.is_useful), None)
    return None if found is None else lambda training: separate(training, found, graph.facts)


def _separations(graph: LaidOutGraph) -> list[Separation]:
    """Return what may be computed of parts, of concatenations that nothing then has to read."""
    order = ReadOrder(graph.training.graph)
    found = (
        follow_parts(order, node, graph.facts)
        for node in order.nodes
        if node.op == "Concat" and _gathers_parts(graph, node)
    )
    return [each for each in found if can_separate(each, graph.facts)]


def _gathers_parts(graph: LaidOutGraph, node: gs.Node) -> bool:
    """Tell whether ranks gather what a node reads, of which no strategy says how it is divided."""
    return node.name not in graph.configuration.wishes and any(
        _is_gathered(graph.layout(tensor.name), target, graph.meshes)
        for tensor, target in zip(node.inputs, graph.decisions[node.name].inputs, strict=True)
    )


def _is_gathered(native: Layout, target: Layout, meshes: Meshes) -> bool:
    """Tell whether ranks of one replica gather what they have parts of."""
    return any(
        isinstance(split, Split) and isinstance(target.along(axis), Replicate)
        for axis, split in native.splits()
        if axis not in (REPLICAS, meshes.microbatch_axis)
    )
