"""Which tensors lead to which: ancestors and descendants in a graph, subgraphs' reads included.

Drop nodes that nothing reads.

graphsurgeon's own cleanup looks for every input in a list of all tensors, which takes minutes where a step
has thousands of variables.
"""

from collections.abc import Iterable, Iterator, Sequence

import onnx_graphsurgeon as gs


def reads_of(node: gs.Node) -> Iterator[gs.Tensor]:
    """Yield what a node reads, and what its subgraphs read of the graph around them."""
    yield from (tensor for tensor in node.inputs if tensor.name)  # an omitted input has none
    for attribute in node.attrs.values():
        if isinstance(attribute, gs.Graph):
            for inner in attribute.nodes:
                yield from reads_of(inner)
            yield from attribute.outputs


def readers_of(nodes: Sequence[gs.Node]) -> dict[str, list[int]]:
    """Return the places of the nodes that read each tensor, in order; those whose subgraphs do, too."""
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        for name in {tensor.name for tensor in reads_of(node)}:
            readers.setdefault(name, []).append(place)
    return readers


def ancestors(graph: gs.Graph, tensors: Iterable[str], cut: frozenset[str] = frozenset()) -> set[str]:
    """Return the tensors and all that they are computed from, not looking behind `cut`."""
    leading = set(tensors)
    for node in reversed(graph.nodes):
        results = {result.name for result in node.outputs}
        if (results & leading) - cut:
            leading.update(read.name for read in reads_of(node))
    return leading


def descendants(graph: gs.Graph, tensors: Iterable[str], cut: frozenset[str] = frozenset()) -> set[str]:
    """Return the tensors and all that is computed from them, not looking beyond `cut`."""
    reached = set(tensors)
    for node in graph.nodes:
        if any(read.name in reached and read.name not in cut for read in reads_of(node)):
            reached.update(result.name for result in node.outputs)
    return reached


def drop_unread_nodes(graph: gs.Graph, named: Iterable[str] = ()) -> None:
    """Keep the nodes that lead to an output or to a named tensor. Needs: sorted nodes."""
    read = ancestors(graph, [*(tensor.name for tensor in graph.outputs), *named])
    needed: list[gs.Node] = []
    dropped: list[gs.Node] = []
    for node in graph.nodes:
        (needed if any(result.name in read for result in node.outputs) else dropped).append(node)
    graph.nodes = needed
    for node in dropped:
        node.inputs.clear()
        node.outputs.clear()
