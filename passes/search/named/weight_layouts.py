"""What a step's layouts send along a mesh axis: asked of one choice of weights' splits after another."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out
from partc.passes.graph.expand_normalised import can_expand
from partc.passes.graph.simplify import SIZES
from partc.passes.layouts.aggregate_partials import MESSAGE_BYTES, find_summed, summed_along
from partc.passes.layouts.change_homes import NodeOrder, with_homes
from partc.passes.layouts.configuration import Configuration, home_of_follower
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.layouts.scatter_sums import part_of_targets
from partc.passes.lowering.lower import MOVING


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
        """Return the bytes of what is sent along the axis, each tensor alone, and what messages are worth.

        Lowering sends less (`sent_along`); chosen by that, splits leave attention whole on every rank for a
        few bytes (docs/decisions/085-what-layouts-send.md).
        """
        graph = self.of(weights)
        sent = resharded_along(graph, self.analysis.order, self.axis)
        return sum(times * graph.facts.nbytes(name) + MESSAGE_BYTES for name, times in sent.items())

    def _homes(self, weights: Mapping[str, Split]) -> dict[str, Layout]:
        homes = {name: Layout("worker").with_along(self.axis, split) for name, split in weights.items()}
        for variable, parameter in self.analysis.followers.items():
            if parameter in homes:
                shapes = self.analysis.facts.shape(parameter), self.analysis.facts.shape(variable)
                homes[variable] = home_of_follower(homes[parameter], *shapes)
        return homes


def resharded_along(graph: LaidOutGraph, order: NodeOrder, axis: int) -> dict[str, int]:
    """Return the tensors whose layout along a mesh axis readers change, and how often each alone is sent.

    What a normalisation reads whole is not among them: said in primitives it sends maxima and sums.
    """
    gathered: set[str] = set()
    scattered: set[str] = set()
    partial: list[str] = []
    for name, layout in graph.layouts.items():
        native = layout.along(axis)
        if not isinstance(native, Split | Partial):
            continue
        targets = {target.along(axis) for target in _targets(graph, order, name)}
        if isinstance(native, Split) and targets - {native}:
            gathered.add(name)
        elif isinstance(native, Partial):
            partial.append(name)
            if any(isinstance(placement, Split) for placement in targets):
                scattered.add(name)
    around = order.around(partial)
    summed = set(summed_along(graph, axis, around=around))
    once = Counter((*gathered, *(scattered - summed - find_summed(graph, axis, summed, around))))
    return dict(once + Counter(dict.fromkeys(summed, 2)))  # an AllReduce is a scatter and a gather


def sent_along(graph: LaidOutGraph, order: NodeOrder, axis: int) -> dict[str, int]:
    """Return the tensors that ranks send along a mesh axis, and how often, as lowering does it.

    Of what readers change, sums that are wanted in parts alone are scattered, and nothing is gathered that
    every rank makes of what it gathers anyway, such as what a loop has gathered by steps.
    """
    changed = resharded_along(graph, order, axis)
    wanted = {name: _targets(graph, order, name) for name in changed}

    @cache
    def is_made(name: str) -> bool:
        node = order.nodes[order.makers[name]] if name in order.makers else None
        return node is not None and node.op in MOVING and all(is_there(t.name) for t in node.inputs)

    def is_there(name: str) -> bool:
        if not isinstance(placement := graph.layout(name).along(axis), Split):
            return isinstance(placement, Replicate)
        return any(map(is_whole, wanted.get(name, ()))) or is_made(name)

    def is_whole(target: Layout) -> bool:
        return isinstance(target.along(axis), Replicate)

    def times_sent(name: str, times: int) -> int:
        if isinstance(graph.layout(name).along(axis), Partial):
            is_kept = name in graph.training.results or graph.is_pushed(name, axis)
            is_part = not is_kept and part_of_targets(graph, name, wanted[name], axis) is not None
            return 1 if is_part else times
        return 0 if all(map(is_whole, wanted[name])) and is_made(name) else times

    sent = {name: times_sent(name, times) for name, times in changed.items()}
    return {name: times for name, times in sent.items() if times}


def _targets(graph: LaidOutGraph, order: NodeOrder, name: str) -> set[Layout]:
    """Return the layouts in which a tensor is read, but by normalisations and for its sizes alone."""
    reads = ((order.nodes[place], number) for place, number in order.readers.get(name, ()))
    return {
        graph.decisions[node.name].inputs[number]
        for node, number in reads
        if node.op not in SIZES and not can_expand(node, graph.facts)
    }
