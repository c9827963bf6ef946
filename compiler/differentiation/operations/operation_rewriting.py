"""How a node is written anew, and what its PyTorch operation says."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

import onnx

from partc.compiler.differentiation.parameters.exporter_facts import operation_of
from partc.passes.graph.operation_builder import OperationBuilder

# Returns what takes a node's place; the node may be changed for it.
OperationRewriting = Callable[[onnx.NodeProto, OperationBuilder], Sequence[onnx.NodeProto]]


def nodes_by_operation(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Return for each PyTorch operation, as its text names it, the places of its nodes."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, node in enumerate(graph.node):
        if text := operation_of(node):
            places[text].append(place)
    return dict(places)


def number_given(operation: str, function: str, place: int, name: str) -> float:
    """Return a number that an operation is given, by its place among the arguments or by its name.

    0 where it is given none, or is of another function.
    """
    found = re.search(rf"\.{function}\.\w+\]\(args = \((.*)\), kwargs = \{{(.*)\}}\)", operation)
    if found is None:
        return 0.0
    arguments, named = found[1].split(", "), re.search(rf"\b{name}: ([^,]+)", found[2])
    return float(named[1] if named else arguments[place] if len(arguments) > place else 0)
