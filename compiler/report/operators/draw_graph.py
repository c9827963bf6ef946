"""The drawings of the user's graph: its layers, of each layer the groups, of each group the nodes.

Layers and groups are drawn with what the way forward hands from one to the other; the nodes of a group in
three lanes: forward, gradient and update.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.compiler.report.operators.group_nodes import NodeGroups, Way
from partc.compiler.report.operators.lay_out_boxes import BoxPlaces, Edge, place_boxes


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes, by the numbers of what they stand for; edges between boxes by their places among them."""

    boxes: tuple[int, ...]
    places: BoxPlaces
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class GraphDrawings:
    """Drawings of all layers, of each layer's groups, and of each group's nodes: one for each way."""

    layers: Drawing
    of_layers: tuple[Drawing, ...]
    of_groups: tuple[tuple[Drawing, ...], ...]


def draw_graph(nodes: Sequence[gs.Node], groups: NodeGroups) -> GraphDrawings:
    """Return the drawings. `nodes`: of the training graph, in order; boxes of groups have their numbers."""
    number = {node.name: place for place, node in enumerate(nodes)}
    group_of = {name: place for place, group in enumerate(groups.groups) for name in group.nodes}
    links = _links(nodes)
    forward = [
        (group_of[source], group_of[target])
        for source, target in links
        if groups.ways[source] is Way.FORWARD and groups.ways[target] is Way.FORWARD
    ]
    layer_of = [group.layer for group in groups.groups]
    members: list[list[int]] = [[] for _ in groups.layers]
    for place, layer in enumerate(layer_of):
        members[layer].append(place)
    return GraphDrawings(
        _draw(range(len(groups.layers)), ((layer_of[a], layer_of[b]) for a, b in forward)),
        tuple(_draw(own, forward) for own in members),
        _draw_groups(groups, links, group_of, number),
    )


def _links(nodes: Sequence[gs.Node]) -> list[tuple[str, str]]:
    """Return who reads what another makes, each pair once."""
    made_by = {tensor.name: node.name for node in nodes for tensor in node.outputs if tensor.name}
    return list(
        dict.fromkeys(
            (made_by[t.name], node.name) for node in nodes for t in node.inputs if t.name in made_by
        )
    )


def _draw_groups(
    groups: NodeGroups,
    links: Iterable[tuple[str, str]],
    group_of: Mapping[str, int],
    number: Mapping[str, int],
) -> tuple[tuple[Drawing, ...], ...]:
    inner: list[dict[Way, list[Edge]]] = [{way: [] for way in Way} for _ in groups.groups]
    for source, target in links:
        if group_of[source] == group_of[target] and groups.ways[source] is groups.ways[target]:
            inner[group_of[source]][groups.ways[source]].append((number[source], number[target]))
    return tuple(
        tuple(
            _draw([number[name] for name in group.nodes if groups.ways[name] is way], inner[place][way])
            for way in Way
        )
        for place, group in enumerate(groups.groups)
    )


def _draw(boxes: Iterable[int], edges: Iterable[Edge]) -> Drawing:
    """Draw boxes and the edges among them, each once."""
    boxes = tuple(boxes)
    at = {box: place for place, box in enumerate(boxes)}
    own = dict.fromkeys((at[a], at[b]) for a, b in edges if a != b and a in at and b in at)
    return Drawing(boxes, place_boxes(len(boxes), own), tuple(own))
