"""Parameters that no op contracts, such as biases: split as their readers want them."""

from collections.abc import Collection

from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout, Placement, Split
from partc.runtime.plan.program import Site


def follow_readers(graph: LaidOutGraph, axis: int, chosen: Collection[str]) -> dict[str, Split]:
    """Return where each parameter beside those `chosen` is split along a mesh axis: as all readers want it.

    Needs layouts and decisions. One whose readers differ, or that does not divide, is left out.
    """
    wanted: dict[str, set[tuple[Site, Placement]]] = {}
    for node in graph.training.graph.nodes:
        if node.name in graph.main:
            for tensor, layout in zip(node.inputs, graph.decisions[node.name].inputs, strict=True):
                wanted.setdefault(tensor.name, set()).add((layout.site, layout.along(axis)))
    return {
        name: split
        for name in graph.training.gradients
        if name not in chosen and len(wanted.get(name, ())) == 1
        for site, split in wanted[name]
        if isinstance(split, Split)
        and site == graph.layout(name).site
        and graph.meshes.divides(Layout(site).with_along(axis, split), graph.facts.shape(name))
    }
