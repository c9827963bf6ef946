"""Drop nodes that nothing reads.

graphsurgeon's own cleanup looks for every input in a list of all tensors, which takes minutes where a step
has thousands of variables.
"""

from collections.abc import Iterable

import onnx_graphsurgeon as gs

from partc.passes.analysis.reachability import ancestors


def drop_unread_nodes(graph: gs.Graph, named: Iterable[str] = ()) -> None:
    """Keep the nodes that lead to an output or to a named tensor. Needs: sorted nodes."""
    read = ancestors(graph, [*(tensor.name for tensor in graph.outputs), *named])
    kept: list[gs.Node] = []
    dropped: list[gs.Node] = []
    for node in graph.nodes:
        (kept if any(result.name in read for result in node.outputs) else dropped).append(node)
    graph.nodes = kept
    for node in dropped:
        node.inputs.clear()
        node.outputs.clear()
