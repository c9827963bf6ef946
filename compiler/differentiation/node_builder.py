"""Emit the nodes of a training graph, and remember the types that inference may not find."""

from collections.abc import Iterable

from partc.compiler.differentiation.tensor_types import TensorType
from partc.passes.graph.operation_builder import FunctionBuilder, OperationBuilder


class NodeBuilder(OperationBuilder):
    """Operations of a graph, of which some call functions."""

    def __init__(self, used_names: Iterable[str] = ()) -> None:
        super().__init__(used_names)
        self.declared: dict[str, TensorType] = {}  # outputs of functions: inference may not look inside


class BodyBuilder(FunctionBuilder, NodeBuilder):
    """The body of a function that is written as a graph is: it may call functions itself."""
