"""Sum partial tensors over the ranks, once, where readers need them whole.

before   dW partial ──┬── Mul ── norm            after   dW partial ── AllReduce ── dW ──┬── Mul ── norm
                      └── Sub ── W_next                                                  └── Sub ── W_next

A partial tensor may be summed at its birth or later, behind linear ops. The cheapest set of places
is a minimum vertex cut between the births and the readers that want it whole; the price of a place
is its bytes and a constant per message.
"""

import networkx as nx

from partc.passes.layouts.decide_layouts import Decision
from partc.passes.layouts.layouts import Gathered, Layout, Owned, Partial, Replicate, Split
from partc.passes.layouts.propagate_layouts import LaidOutGraph

MESSAGE_BYTES = 4096  # one more message is worth this many bytes


def aggregate_partials(graph: LaidOutGraph, message_bytes: int = MESSAGE_BYTES) -> None:
    """Fill `made_whole`. Needs layouts and decisions; leaves no reader that wants a partial whole
    without a sum on every path to it."""
    graph.made_whole = frozenset(
        (tensor, axis)
        for axis in range(graph.meshes.axes)
        for tensor in summed_along(graph, axis, message_bytes)
    )


def summed_along(graph: LaidOutGraph, axis: int, message_bytes: int = MESSAGE_BYTES) -> list[str]:
    """Return the tensors that are summed along a mesh axis. Needs layouts and decisions."""
    network = _network(graph, axis, message_bytes)
    if "birth" not in network or "whole" not in network:
        return []
    # Seen from the readers, so that of equally cheap places the one nearest to the births wins.
    _, (_, births) = nx.minimum_cut(network.reverse(copy=False), "whole", "birth")
    return [
        vertex[0]
        for vertex in network
        if isinstance(vertex, tuple)
        and vertex[1] == "in"
        and vertex in births
        and (vertex[0], "out") not in births
    ]


def _network(graph: LaidOutGraph, axis: int, message_bytes: int) -> nx.DiGraph:
    network = nx.DiGraph()
    results = set(graph.training.outputs) | {v.next for v in graph.training.variables.values()}
    for name, layout in graph.layouts.items():
        if isinstance(layout.along(axis), Partial):
            # A vertex becomes an edge, so that cutting it costs what sending it costs.
            price = graph.facts.nbytes(name) + message_bytes
            network.add_edge((name, "in"), (name, "out"), capacity=price)
            if name in results:
                network.add_edge((name, "out"), "whole")
    for node in graph.training.graph.nodes:
        inputs, outputs = [t.name for t in node.inputs], [t.name for t in node.outputs]
        _connect(graph, network, axis, graph.decisions[node.name], inputs, outputs)
    return network


def _connect(
    graph: LaidOutGraph,
    network: nx.DiGraph,
    axis: int,
    decision: Decision,
    inputs: list[str],
    outputs: list[str],
) -> None:
    partials = [
        (name, wanted)
        for name, wanted in zip(inputs, decision.inputs, strict=True)
        if isinstance(graph.layout(name).along(axis), Partial)
    ]
    for name, wanted in partials:
        is_kept_so = axis in graph.homes.get(name, {}) and isinstance(wanted.along(axis), Split)
        ends = (layout.with_along(axis, Replicate()) for layout in (graph.layout(name), wanted))
        is_here = graph.layout(name).site == wanted.site  # else it is summed and sent
        is_scattered = is_kept_so and is_here and not any(layout.uneven() for layout in ends)
        if not is_scattered and _wants_whole(graph.layout(name), wanted, axis):
            network.add_edge((name, "out"), "whole")
    flows = [name for name, wanted in partials if isinstance(wanted.along(axis), Partial)]
    for result in (name for name in outputs if isinstance(graph.layout(name).along(axis), Partial)):
        for flow in flows:
            network.add_edge((flow, "out"), (result, "in"))
        if not flows:
            network.add_edge("birth", (result, "in"))


def _wants_whole(native: Layout, wanted: Layout, axis: int) -> bool:
    """A partial is not wanted whole where it flows on, or is pushed to the servers that own it."""
    target = wanted.along(axis)
    is_pushed = native.site == "worker" and isinstance(target, Owned | Gathered)
    return not is_pushed and not (isinstance(target, Partial) and native.site == wanted.site)
