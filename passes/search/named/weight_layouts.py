"""What a step's layouts send along a mesh axis: asked of one choice of weights' splits after another."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out
from partc.passes.graph.expand_normalised import can_expand
from partc.passes.graph.simplify import SIZES
from partc.passes.layouts.aggregate_partials import MESSAGE_BYTES, find_summed, summed_along
from partc.passes.layouts.change_homes import NodeOrder, with_homes
from partc.passes.layouts.configuration import Configuration, home_of_follower
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout, Partial, Split
from partc.passes.layouts.meshes import Mesh, Meshes


@dataclass
class WeightLayouts:
    """Lays one step out for one choice of weights' splits after another, each from the one before."""

    analysis: Analysis
    mesh: Mesh
    axis: int
    _last: LaidOutGraph | None = None

    def of(self, weights: Mapping[str, Split]) -> LaidOutGraph:
        """Return the layouts where weights are split so, all others whole."""
        homes = self._homes(weights)
        if self._last is None:
            self._last = lay_out(self.analysis, {}, Configuration(Meshes((self.mesh,)), homes))
        else:
            self._last = with_homes(self._last, self.analysis.order, homes)
        return self._last

    def sent_bytes(self, weights: Mapping[str, Split]) -> int:
        """Return the bytes that are sent along the axis, and what its messages are worth."""
        graph = self.of(weights)
        sent = sent_along(graph, self.analysis.order, self.axis)
        return sum(times * graph.facts.nbytes(name) + MESSAGE_BYTES for name, times in sent.items())

    def _homes(self, weights: Mapping[str, Split]) -> dict[str, Layout]:
        homes = {name: Layout("worker").with_along(self.axis, split) for name, split in weights.items()}
        for variable, parameter in self.analysis.followers.items():
            if parameter in homes:
                shapes = self.analysis.facts.shape(parameter), self.analysis.facts.shape(variable)
                homes[variable] = home_of_follower(homes[parameter], *shapes)
        return homes


def sent_along(graph: LaidOutGraph, order: NodeOrder, axis: int) -> dict[str, int]:
    """Return the tensors that the layouts of a step make its ranks send along a mesh axis, and how often.

    What a normalisation reads whole is not among them: said in primitives it sends maxima and sums.
    """
    gathered: set[str] = set()
    scattered: set[str] = set()
    partial: list[str] = []
    for name, layout in graph.layouts.items():
        native = layout.along(axis)
        if not isinstance(native, Split | Partial):
            continue
        reads = ((order.nodes[place], number) for place, number in order.readers.get(name, ()))
        targets = (
            graph.decisions[node.name].inputs[number].along(axis)
            for node, number in reads
            if node.op not in SIZES and not can_expand(node, graph.facts)
        )
        if isinstance(native, Split) and any(placement != native for placement in targets):
            gathered.add(name)
        elif isinstance(native, Partial):
            partial.append(name)
            if any(isinstance(placement, Split) for placement in targets):
                scattered.add(name)
    around = order.around(partial)
    summed = set(summed_along(graph, axis, around=around))
    once = Counter((*gathered, *(scattered - summed - find_summed(graph, axis, summed, around))))
    return dict(once + Counter(dict.fromkeys(summed, 2)))  # an AllReduce is a scatter and a gather
