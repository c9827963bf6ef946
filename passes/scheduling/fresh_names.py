"""Names for what a rewriting adds to a segment."""

from collections.abc import Iterator

import onnx


class FreshNames:
    """Names that neither a value nor a node of a graph bears, and that are given once.

    The model's own names are its author's choice: a rewriting that builds names from them meets `y/shape`
    where that is a tensor of the model, or an image that is the result of one convolution and the operand
    of the next.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._taken = set(_names(graph))

    def fresh(self, hint: str) -> str:
        """Return the hint, with a number behind it where it is taken."""
        name, number = hint, 1
        while name in self._taken:
            name, number = f"{hint}_{number}", number + 1
        self._taken.add(name)
        return name


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of values and nodes, of bodies too."""
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _names(attribute.g)
