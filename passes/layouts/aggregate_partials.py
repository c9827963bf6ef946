"""Sum partial tensors over the ranks, once, where readers need them whole.

before   dW partial ──┬── Mul ── norm            after   dW partial ── AllReduce ── dW ──┬── Mul ── norm
                      └── Sub ── W_next                                                  └── Sub ── W_next

A partial tensor may be summed at its birth or later, behind linear ops. The cheapest set of places
is a minimum vertex cut between the births and the readers that want it whole; the price of a place
is its bytes and a constant per message.
"""

import networkx as nx

from partc.passes.layouts.decide_layouts import Decision
from partc.passes.layouts.layouts import Gathered, Layout, Owned, Partial
from partc.passes.layouts.propagate_layouts import LaidOutGraph

MESSAGE_BYTES = 4096  # one more message is worth this many bytes


def aggregate_partials(graph: LaidOutGraph, message_bytes: int = MESSAGE_BYTES) -> None:
    """Fill `made_whole`. Needs layouts and decisions; leaves no reader that wants a partial whole
    without a sum on every path to it."""
    network = _network(graph, message_bytes)
    if "birth" not in network or "whole" not in network:
        return
    # Seen from the readers, so that of equally cheap places the one nearest to the births wins.
    _, (_, births) = nx.minimum_cut(network.reverse(copy=False), "whole", "birth")
    graph.made_whole = frozenset(
        vertex[0]
        for vertex in network
        if isinstance(vertex, tuple)
        and vertex[1] == "in"
        and vertex in births
        and (vertex[0], "out") not in births
    )


def _network(graph: LaidOutGraph, message_bytes: int) -> nx.DiGraph:
    network = nx.DiGraph()
    results = set(graph.training.outputs) | {v.next for v in graph.training.variables.values()}
    for name, layout in graph.layouts.items():
        if isinstance(layout.placement, Partial):
            # A vertex becomes an edge, so that cutting it costs what sending it costs.
            price = graph.facts.nbytes(name) + message_bytes
            network.add_edge((name, "in"), (name, "out"), capacity=price)
            if name in results:
                network.add_edge((name, "out"), "whole")
    for node in graph.training.graph.nodes:
        _connect(graph, network, node.name, [t.name for t in node.inputs], [t.name for t in node.outputs])
    return network


def _connect(
    graph: LaidOutGraph, network: nx.DiGraph, node: str, inputs: list[str], outputs: list[str]
) -> None:
    decision = graph.decisions[node]
    results = [name for name in outputs if isinstance(graph.layout(name).placement, Partial)]
    flows = [
        name
        for name, wanted in zip(inputs, decision.inputs, strict=True)
        if isinstance(wanted, Partial) and isinstance(graph.layout(name).placement, Partial)
    ]
    for name, wanted in zip(inputs, decision.inputs, strict=True):
        if isinstance(graph.layout(name).placement, Partial) and _wants_whole(graph, name, wanted, decision):
            network.add_edge((name, "out"), "whole")
    for result in results:
        for flow in flows:
            network.add_edge((flow, "out"), (result, "in"))
        if not flows:
            network.add_edge("birth", (result, "in"))


def _wants_whole(graph: LaidOutGraph, tensor: str, wanted: object, decision: Decision) -> bool:
    """A partial is not wanted whole where it flows on, or is pushed to the servers that own it."""
    native: Layout = graph.layout(tensor)
    is_pushed = native.site == "worker" and isinstance(wanted, Owned | Gathered)
    return not is_pushed and not (isinstance(wanted, Partial) and native.site == decision.site)
