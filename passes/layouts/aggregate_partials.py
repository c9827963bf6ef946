"""Sum partial tensors over the ranks, once, where readers need them whole.

before   dW partial ──┬── Mul ── norm            after   dW partial ── AllReduce ── dW ──┬── Mul ── norm
                      └── Sub ── W_next                                                  └── Sub ── W_next

A partial tensor may be summed at its birth or later, behind linear ops. The cheapest set of places
is a minimum vertex cut between the births and the readers that want it whole; the price of a place
is its bytes, half of them where its readers want the same part of it, and a constant per message.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs
from ortools.graph.python.max_flow import SimpleMaxFlow

from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split
from partc.passes.layouts.own_rows import keep_own_rows
from partc.passes.layouts.scatter_sums import move_parts, wanted_in_parts

_BIRTH, _WHOLE = 0, 1  # vertices: where partial tensors come from, and who wants them whole
MESSAGE_BYTES = 4096  # one more message is worth this many bytes


def aggregate_partials(graph: LaidOutGraph, message_bytes: int = MESSAGE_BYTES) -> None:
    """Fill `made_whole` and `summed_anyway`. Needs layouts and decisions; leaves no reader that wants a
    partial whole without a sum on every path to it. What is wanted in parts alone is in neither."""
    made_whole: set[tuple[str, int]] = set()
    summed_anyway: set[tuple[str, int]] = set()
    for axis in range(graph.meshes.axes):
        keep_own_rows(graph, axis)
        move_parts(graph, axis)
        summed = summed_along(graph, axis, message_bytes)
        summed_anyway.update((tensor, axis) for tensor in find_summed(graph, axis, summed))
        in_parts = wanted_in_parts(graph, axis, summed)
        made_whole.update((tensor, axis) for tensor in summed if tensor not in in_parts)
    graph.made_whole, graph.summed_anyway = frozenset(made_whole), frozenset(summed_anyway)


def summed_along(
    graph: LaidOutGraph, axis: int, message_bytes: int = MESSAGE_BYTES, around: Sequence[gs.Node] = ()
) -> list[str]:
    """Return the tensors that are summed along a mesh axis. Needs layouts and decisions.

    `around`: the nodes that read or make partial tensors, in order, if they are known.
    """
    partial = [name for name, layout in graph.layouts.items() if isinstance(layout.along(axis), Partial)]
    if not partial:
        return []
    # A tensor is an edge between two vertices, so that cutting it costs what sending it costs.
    enters = {name: 2 + 2 * index for index, name in enumerate(partial)}
    nodes = around or graph.training.graph.nodes
    in_parts = wanted_in_parts(graph, axis, partial, nodes)
    sent = [graph.facts.nbytes(name) / (2 if name in in_parts else 1) for name in partial]
    prices = np.array(sent, np.int64) + message_bytes
    tensors = np.array(list(enters.values()))
    flows = np.array([*_flows(graph, axis, enters, nodes)], np.int64).reshape(-1, 2)
    network = SimpleMaxFlow()
    network.add_arcs_with_capacity(tensors + 1, tensors, prices)
    network.add_arcs_with_capacity(flows[:, 1], flows[:, 0], np.full(len(flows), prices.sum() + 1))
    status = network.solve(_WHOLE, _BIRTH)
    assert status == network.OPTIMAL, status
    # Seen from the readers, so that of equally cheap places the one nearest to the births wins.
    births = set(network.get_sink_side_min_cut())
    return [name for name, vertex in enters.items() if vertex in births and vertex + 1 not in births]


def find_summed(
    graph: LaidOutGraph, axis: int, summed: Collection[str], around: Sequence[gs.Node] = ()
) -> set[str]:
    """Return the partial tensors behind sums that readers of the whole have made whatever else is read.

    Who wants a part of one cuts it there; who wants a part of another has it summed part by part.
    """
    sums: dict[str, set[str]] = {}  # tensor -> the sums that it is made of, itself where it is born partial
    read_whole = graph.training.results
    for node in around or graph.training.graph.nodes:
        inputs = zip(node.inputs, graph.decisions[node.name].inputs, strict=True)
        read = [(tensor.name, layout.along(axis)) for tensor, layout in inputs if tensor.name in sums]
        read_whole.update(name for name, placement in read if not isinstance(placement, Partial | Split))
        flowing = [sums[name] for name, placement in read if isinstance(placement, Partial)]
        for tensor in node.outputs:
            if isinstance(graph.layout(tensor.name).along(axis), Partial):
                is_first = tensor.name in summed or not flowing
                sums[tensor.name] = {tensor.name} if is_first else set().union(*flowing)
    made_anyway = {name for tensor in read_whole & sums.keys() for name in sums[tensor]}.intersection(summed)
    return {name for name, behind in sums.items() if name not in summed and behind <= made_anyway}


def _flows(
    graph: LaidOutGraph, axis: int, enters: Mapping[str, int], nodes: Sequence[gs.Node]
) -> Iterator[tuple[int, int]]:
    """Yield the edges that are never cut: from births to tensors, on to others, to readers of the whole."""
    results = graph.training.results
    yield from (
        (vertex + 1, _WHOLE)
        for name, vertex in enters.items()
        if name in results and not graph.is_pushed(name, axis)
    )
    for node in nodes:
        inputs = [tensor.name for tensor in node.inputs]
        outputs = [enters[tensor.name] for tensor in node.outputs if tensor.name in enters]
        targets = graph.decisions[node.name].inputs
        read = [(name, layout) for name, layout in zip(inputs, targets, strict=True) if name in enters]
        yield from (
            (enters[name] + 1, _WHOLE) for name, layout in read if _is_summed(graph, name, layout, axis)
        )
        flows = [enters[name] + 1 for name, layout in read if isinstance(layout.along(axis), Partial)]
        yield from ((flow, result) for result in outputs for flow in flows or [_BIRTH])


def _is_summed(graph: LaidOutGraph, name: str, target: Layout, axis: int) -> bool:
    """Tell whether a reader wants a partial tensor whole, and no part of it that is kept so."""
    is_kept_so = axis in dict(graph.homes.get(name, ())) and isinstance(target.along(axis), Split)
    ends = (layout.with_along(axis, Replicate()) for layout in (graph.layout(name), target))
    is_here = graph.layout(name).site == target.site  # else it is summed and sent
    is_scattered = is_kept_so and is_here and not any(layout.uneven() for layout in ends)
    flows_on = is_here and isinstance(target.along(axis), Partial)
    return not is_scattered and not flows_on and not graph.is_pushed(name, axis)
