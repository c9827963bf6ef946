"""Lay a step out again with some variables kept otherwise: what no change reaches is as it was.

A node's decision follows from its operands' layouts, and from how the gradients that it reads or makes are
kept (decide_node.py), so that a walk from what changed, in the graph's order, ends where layouts are equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import onnx_graphsurgeon as gs

from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.propagate_layouts import decide, home_of, sparse_readers


@dataclass(frozen=True)
class NodeOrder:
    """The nodes of a step in their order, and by tensor the places of those that read it, and that make it.

    `readers`: with the number of the operand.
    """

    nodes: tuple[gs.Node, ...]
    readers: Mapping[str, tuple[tuple[int, int], ...]]
    makers: Mapping[str, int]

    @staticmethod
    def of(training: TrainingGraph) -> "NodeOrder":
        """Return the order of a step, whose graph changes no more."""
        nodes = tuple(training.graph.nodes)
        readers: dict[str, list[tuple[int, int]]] = {}
        for place, node in enumerate(nodes):
            for number, tensor in enumerate(node.inputs):
                readers.setdefault(tensor.name, []).append((place, number))
        makers = {tensor.name: place for place, node in enumerate(nodes) for tensor in node.outputs}
        return NodeOrder(nodes, {name: tuple(own) for name, own in readers.items()}, makers)

    def places_around(self, tensors: Iterable[str]) -> set[int]:
        """Return the places of the nodes that read or make some of the tensors."""
        places: set[int] = set()
        for name in tensors:
            places.update(place for place, _ in self.readers.get(name, ()))
            if name in self.makers:
                places.add(self.makers[name])
        return places

    def around(self, tensors: Iterable[str]) -> list[gs.Node]:
        """Return the nodes that read or make some of the tensors, in order."""
        return [self.nodes[place] for place in sorted(self.places_around(tensors))]


def with_homes(graph: LaidOutGraph, order: NodeOrder, homes: Mapping[str, Layout]) -> LaidOutGraph:
    """Return the layouts of the same step with its variables kept so; the graph stays as it is.

    Needs: nothing is on servers.
    """
    assert not graph.synchronised.owner, "workers keep all variables"
    changed = replace(
        graph,
        configuration=replace(graph.configuration, homes=homes),
        layouts=dict(graph.layouts),
        decisions=dict(graph.decisions),
    )
    tensors = [name for name in graph.training.variables if home_of(changed, name) != graph.layouts[name]]
    changed.layouts.update((name, home_of(changed, name)) for name in tensors)
    places = {place for name in tensors for place, _ in order.readers.get(name, ())}
    both = graph.homes.keys() | changed.homes.keys()
    places.update(
        order.places_around(name for name in both if graph.homes.get(name) != changed.homes.get(name))
    )
    _decide_again(changed, order, places)
    return changed


def _decide_again(graph: LaidOutGraph, order: NodeOrder, places: set[int]) -> None:
    """Decide the nodes at places, and those that read what lies otherwise now."""
    sparse, waiting = sparse_readers(graph), list(places)
    heapify(waiting)
    while waiting:
        node = order.nodes[heappop(waiting)]
        decision = decide(graph, node, sparse)
        graph.decisions[node.name] = decision
        for tensor, layout in zip(node.outputs, decision.outputs, strict=True):
            if layout == graph.layouts[tensor.name]:
                continue
            graph.layouts[tensor.name] = layout
            for place, _ in order.readers.get(tensor.name, ()):
                if place not in places:
                    places.add(place)
                    heappush(waiting, place)
