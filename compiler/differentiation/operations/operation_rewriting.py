"""How a node is written anew, and what its PyTorch operation says."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import onnx

from partc.compiler.differentiation.parameters.exporter_facts import operation_of
from partc.passes.graph.operation_builder import OperationBuilder

# Returns what takes a node's place; the node may be changed for it.
OperationRewriting = Callable[[onnx.NodeProto, OperationBuilder], Sequence[onnx.NodeProto]]

UNOPTIMISED = "export with torch.onnx.export(..., optimize=False)"


def nodes_by_operation(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Return for each PyTorch operation, as its text names it, the places of its nodes."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, node in enumerate(graph.node):
        if text := operation_of(node):
            places[text].append(place)
    return dict(places)
