"""Sum along several axes of a mesh at once, where nothing reads what lies between.

before   m ── AllReduce (spatial) ── m' ── AllReduce (data) ── m"
after    m ── AllReduce (data, spatial) ── m"

One after the other may be the better way: within hosts, then among them; and where gradients are summed along
`data`, what is summed there last goes along with them. Messages of a rank take turns, and most begin a
segment: what all of these take together decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.microbatches.find_repeated import find_repeated, joins_microbatches
from partc.passes.scheduling.bucket_communications import Bucket, communications_ahead
from partc.passes.scheduling.schedule import Item, schedule

Bucketing = Callable[[LoweredGraph], Mapping[str, Bucket]]
LIKE = ("site", "reduction", "rounds_to")  # what sums that are made at once have in common


def join_sums(
    lowered: LoweredGraph,
    in_buckets: Bucketing,
    position_of: Mapping[str, int],
    seconds: Callable[[Item], float],
) -> None:
    """Join no sums along axes, those that another message waits for, or all: whichever takes least.

    `position_of`: lowered node -> place in the original. `seconds`: of a message, and to begin a segment.
    """
    chains = _find_chains(lowered)
    if not chains:
        return
    ahead = communications_ahead(lowered)
    awaited = {last: first for last, first in chains.items() if ahead[last]}
    ways = [lowered.nodes, *(_joined(lowered, chosen) for chosen in (awaited, chains))]

    def taken_s(nodes: list[gs.Node]) -> float:
        way = replace(lowered, nodes=nodes)
        repeated = find_repeated(way)
        return sum(
            seconds(item) * (repeated.count if item.nodes[0].name in repeated.nodes else 1)
            for item in schedule(way, in_buckets(way), position_of, repeated)
            if not joins_microbatches(item.nodes[0], lowered.meshes)
        )

    least = min(ways, key=taken_s)
    lowered.nodes = least


def _find_chains(lowered: LoweredGraph) -> dict[str, tuple[gs.Node, ...]]:
    """Map each AllReduce of what another one made for it alone to that one, and a copy that is between."""
    makers = {tensor.name: node for node in lowered.nodes for tensor in node.outputs}
    readers: dict[str, int] = {}
    for node in lowered.nodes:
        for tensor in node.inputs:
            readers[tensor.name] = readers.get(tensor.name, 0) + 1
    results = {state.next for state in lowered.states} | {value for _, value, _ in lowered.outputs}

    def behind(node: gs.Node) -> gs.Node | None:
        value = node.inputs[0].name
        return makers.get(value) if readers[value] == 1 and value not in results else None

    chains: dict[str, tuple[gs.Node, ...]] = {}
    for node in lowered.nodes:
        if not _is_sum(node, lowered) or (first := behind(node)) is None:
            continue
        copy = (first,) if first.op == "Identity" else ()
        if copy and (first := behind(first)) is None:
            continue
        is_alike = all(first.attrs.get(name) == node.attrs.get(name) for name in LIKE)
        if _is_sum(first, lowered) and is_alike:
            chains[node.name] = (first, *copy)
    return chains


def _is_sum(node: gs.Node, lowered: LoweredGraph) -> bool:
    return node.op == "AllReduce" and not joins_microbatches(node, lowered.meshes)


def _joined(lowered: LoweredGraph, chains: Mapping[str, Sequence[gs.Node]]) -> list[gs.Node]:
    """Return the nodes, the last of each chain in place of all."""
    in_chains = {node.name for chain in chains.values() for node in chain}
    joint: dict[str, gs.Node] = {}
    nodes: list[gs.Node] = []
    for node in lowered.nodes:
        if node.name in chains:
            first = chains[node.name][0]
            node = joint[node.name] = _at_once(joint.get(first.name, first), node)
        if node.name not in in_chains:
            nodes.append(node)
    return nodes


def _at_once(first: gs.Node, last: gs.Node) -> gs.Node:
    attributes = last.attrs | {"axes": tuple(sorted(first.attrs["axes"] + last.attrs["axes"]))}
    inputs, outputs = ([gs.Variable(t.name, t.dtype) for t in ts] for ts in (first.inputs, last.outputs))
    return gs.Node("AllReduce", last.name, attributes, inputs, outputs, domain=last.domain)
