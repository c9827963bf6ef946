"""Find what is to be said in primitives: ops that keep whole what a strategy splits.

A split that reaches a Softmax's own axis would be gathered for it. In primitives its sums are made rank by
rank, and what is sent is a row's maximum and sum.
"""

from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out
from partc.passes.graph.expand_normalised import can_expand
from partc.passes.layouts.configuration import Configuration
from partc.passes.layouts.layouts import REPLICAS, Layout, Replicate, Split
from partc.passes.layouts.meshes import Meshes


def find_split_ops(analysis: Analysis, configuration: Configuration) -> set[str]:
    """Return the nodes that a split reaches, and that can be said in primitives.

    Once they are and facts are inferred again, this is to be asked again: a split may reach further ops.
    """
    graph = lay_out(analysis, {}, configuration)
    return {
        node.name
        for node in analysis.training.graph.nodes
        if can_expand(node, analysis.facts) and node.name not in configuration.wishes
        for tensor, wanted in zip(node.inputs, graph.decisions[node.name].inputs, strict=True)
        if _is_gathered(graph.layout(tensor.name), wanted, graph.meshes)
    }


def _is_gathered(native: Layout, wanted: Layout, meshes: Meshes) -> bool:
    """Tell whether ranks of one replica gather what they have parts of."""
    return any(
        isinstance(split, Split) and isinstance(wanted.along(axis), Replicate)
        for axis, split in native.splits()
        if axis not in (REPLICAS, meshes.microbatch_axis)
    )
