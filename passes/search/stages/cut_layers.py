"""Divide the layers of a step among devices: what reads the same parameters is one layer, unrolled or not.

So FlexFlow's authors lay recurrent networks out by hand: data parallelism between nodes, and within a node a
layer on each device (flexflow.txt, section 8.2.1). A layer follows those that it reads, however its steps lie
among theirs; contiguous ones are put together so that the busiest device has as little to do as may be.
"""

from collections.abc import Mapping, Sequence

import networkx as nx
import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.passes.search.stages.cut_stages import cut, stage_line
from partc.passes.search.stages.line_work import NodeSeconds
from partc.runtime.errors import BadUsage


def cut_layers(
    analysis: Analysis, devices: int, seconds: NodeSeconds, shares: int = 1, microbatches: int = 1
) -> dict[str, int]:
    """Return the forward nodes that multiply or look up parameters -> the device that runs their layer.

    `seconds`: what a node takes; `shares`: into which hosts divide the graph's batch. Raises BadUsage where
    there are fewer layers than devices.
    """
    forward, line = forward_nodes(analysis.training, analysis.main), stage_line(analysis)
    layer_of = _layers(analysis, forward, line.nodes)
    layers = max(layer_of.values(), default=-1) + 1
    if layers < devices:
        # Not a name that divides parameters: what has no layers may have nothing to divide.
        others = f"use a cluster of {layers} devices a host, or --strategy auto"
        raise BadUsage(
            f"{layers} layers for {devices} devices of a host",
            at="--strategy layerwise",
            fix=others if layers else "use --strategy auto",
        )
    durations = [0.0 for _ in range(layers)]
    layer_of_tensor: dict[str, int] = {}
    for node, second in zip(line.nodes, line.work.times(seconds, shares, 1, microbatches).both, strict=True):
        behind = max(
            (layer_of_tensor[tensor.name] for tensor in node.inputs if tensor.name in layer_of_tensor),
            default=0,
        )
        layer = layer_of.get(node.name, behind)
        layer_of_tensor.update((tensor.name, layer) for tensor in node.outputs)
        durations[layer] += second
    ends = cut(durations, [0] * (layers + 1), devices)
    layers_in_order = ((node.name, layer_of[node.name]) for node in forward if node.name in layer_of)
    return {name: sum(end <= layer for end in ends) for name, layer in layers_in_order}


def _layers(analysis: Analysis, forward: Sequence[gs.Node], line: Sequence[gs.Node]) -> dict[str, int]:
    """Return the number of the layer of every node that multiplies or looks up parameters, in order."""
    parameters = {name: {name} for name in analysis.training.gradients}
    in_line = {node.name for node in line}
    links = nx.Graph()
    for node in forward:
        rule = rule_of(node, analysis.facts)
        read = {name for tensor in node.inputs for name in parameters.get(tensor.name, ())}
        if rule is None or rule.is_contraction or rule.indexed:  # a bias goes with what it is added to
            links.add_edges_from((("node", node.name), name) for name in read)
        if node.name not in in_line and read:  # a weight turned about is the weight
            parameters.update((tensor.name, read) for tensor in node.outputs)
    numbers: dict[str, int] = {}
    number = 0
    for node in line:
        at = "node", node.name
        if at in links and node.name not in numbers:
            component = nx.node_connected_component(links, at)
            numbers.update((entry[1], number) for entry in component if isinstance(entry, tuple))
            number += 1
    order = {layer: place for place, layer in enumerate(_in_order(line, numbers))}
    return {node: order[layer] for node, layer in numbers.items()}


def _in_order(line: Sequence[gs.Node], layer_of: Mapping[str, int]) -> list[int]:
    """Return the layers, each behind those that it reads; of others, and in a circle, the first to begin."""
    reads = nx.DiGraph()
    reads.add_nodes_from(layer_of.values())
    behind: dict[str, set[int]] = {}  # tensor -> the layers that it comes of, those before them left out
    for node in line:
        read = set().union(*(behind.get(tensor.name, set()) for tensor in node.inputs))
        if (layer := layer_of.get(node.name)) is not None:
            reads.add_edges_from((before, layer) for before in read - {layer})
            read = {layer}
        behind.update((tensor.name, read) for tensor in node.outputs)
    circles = nx.condensation(reads)
    members = nx.get_node_attributes(circles, "members")
    order = nx.lexicographical_topological_sort(circles, key=lambda circle: min(members[circle]))
    return [layer for circle in order for layer in sorted(members[circle])]
