"""What rewriting a segment needs to know: shapes and types that were inferred, who reads what, free names."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx
from onnx import TensorProto

Shape = tuple[int | None, ...]  # None: a size that is not known


def known_shapes(typed: onnx.GraphProto) -> dict[str, Shape]:
    """Return value -> shape, of a graph with shapes inferred; a value of unknown rank is left out."""
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in typed.initializer}
    for value in (*typed.input, *typed.value_info, *typed.output):
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            sizes = (d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
            shapes[value.name] = tuple(sizes)
    return shapes


def singles_of(typed: onnx.GraphProto) -> set[str]:
    """Return the names of the float32 values, of a graph with shapes inferred."""
    values = (*typed.input, *typed.value_info, *typed.output)
    return {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}


@dataclass(frozen=True, slots=True)
class Images:
    """What decides about the bodies of convolutions: see choose_bodies."""

    shapes: Mapping[str, Shape]
    singles: AbstractSet[str]  # float32 values
    only: AbstractSet[str] | None
    replicas: int

    def may_change(self, node: onnx.NodeProto) -> bool:
        """Tell whether a node's body may be chosen."""
        return self.only is None or node.name in self.only

    def samples(self, image: str) -> float:
        """Return how many samples of an image one rank has; a size that is not known is taken for 4."""
        batch = self.shapes[image][0]
        return 4 if batch is None else batch / self.replicas


def images_of(typed: onnx.GraphProto, only: AbstractSet[str] | None = None, replicas: int = 1) -> Images:
    """Return what inference found, for choices among the nodes named in `only`."""
    return Images(known_shapes(typed), singles_of(typed), only, replicas)


def is_node(node: onnx.NodeProto, op: str) -> bool:
    """Tell whether a node is of an op of ONNX itself."""
    return bool(node.op_type == op and not node.domain)


def read_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the values that are read, as often as they are: by nodes, by bodies, as outputs."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from read_names(attribute.g)
    yield from (output.name for output in graph.output)


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
