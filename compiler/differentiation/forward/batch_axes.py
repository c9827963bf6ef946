"""Which axes of a forward graph's tensors the batch is in: those whose sizes differ at another batch.

x [4, 6] and [1009, 6]       axis 0          Concat (x, x) [8, 6] and [2018, 6]      axis 0, of old size 8
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from partc.compiler.differentiation.sizes.fold_sizes import fold_sizes
from partc.compiler.differentiation.tensor_types import (
    Shape,
    Types,
    infer_types,
    small_constants,
    without_large_values,
)

SYMBOLIC = (
    "export the model with a symbolic batch (dynamic_shapes, or dynamic_axes, of torch.onnx.export): "
    "what its size decides is then computed"
)


@dataclass(frozen=True)
class SizedGraph:
    """Types and small constants at one batch, what the graph computes of sizes among them."""

    types: Types
    constants: Mapping[str, np.ndarray]

    def shape(self, tensor: str) -> Shape | None:
        """Return a tensor's shape, None where its rank is unknown."""
        return self.types[tensor].shape if tensor in self.types else None


@dataclass(frozen=True)
class BatchAxes:
    """A graph at the model's own batch, which is `size`, and at another."""

    size: int
    before: SizedGraph
    after: SizedGraph

    def constants(self) -> dict[str, np.ndarray]:
        """Return the constants of the graph, and what it computes that no batch changes."""
        was = self.before.constants
        return {
            name: value
            for name, value in self.after.constants.items()
            if np.array_equal(value, was.get(name, value))
        }

    def axes(self, tensor: str) -> frozenset[int]:
        """Return the axes that the batch is in."""
        was, now = self._shapes(tensor)
        return frozenset(axis for axis, (a, b) in enumerate(zip(was, now, strict=False)) if a != b)

    def counted_axes(self, tensor: str) -> frozenset[int]:
        """Return the axes that the batch is in or may be in: how many entries data decide, too."""
        was, _ = self._shapes(tensor)
        return self.axes(tensor) | {axis for axis, size in enumerate(was) if not isinstance(size, int)}

    def old_size(self, tensor: str, axis: int) -> int:
        """Return a size at the model's own batch, which stands for what nobody can tell."""
        size = self._shapes(tensor)[0][axis]
        return size if isinstance(size, int) else self.size

    def rank(self, tensor: str) -> int:
        """Return the number of axes, 0 where it is unknown."""
        return len(self._shapes(tensor)[0])

    def _shapes(self, tensor: str) -> tuple[Shape, Shape]:
        return self.before.shape(tensor) or (), self.after.shape(tensor) or ()


def know_sizes(model: onnx.ModelProto) -> SizedGraph:
    """Return what is known of a model whose inputs have sizes; it stays as it is."""
    if not any(node.op_type in ("Shape", "Size") for node in model.graph.node):
        return SizedGraph(infer_types(model), small_constants(model.graph))
    copy = onnx.ModelProto()
    copy.CopyFrom(without_large_values(model))
    fold_sizes(copy)
    return SizedGraph(infer_types(copy), small_constants(copy.graph))
