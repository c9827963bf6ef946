"""What is known of every tensor before anything runs: shape, dtype, and small integer values.

infer_facts.py finds it out, under two values of every symbolic size: what comes out equal both times is
*fixed* and may be written into a segment; what differs follows the symbolic sizes and may not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

Shape = tuple[int, ...]
UNKNOWN = 0  # the size of a dimension that only the data tells
SMALL = 1024  # elements of a tensor whose values are worth knowing


@dataclass(frozen=True, slots=True, eq=False)
class TensorFacts:
    """All that is known of one tensor, by whatever name. Equal ones are one object.

    doubled_shape  under twice the symbolic sizes, None where it is not known
    value          small and known under the assumed sizes, or None
    """

    is_named: bool  # an operand that is left out has no name
    shape: Shape
    doubled_shape: Shape | None
    dtype: np.dtype | None
    has_fixed_shape: bool
    value: np.ndarray | None
    has_fixed_value: bool

    @property
    def has_fixed_sizes(self) -> bool:
        """Tell whether all sizes are known, and none follows a symbolic size."""
        return self.has_fixed_shape and all(self.shape)

    @property
    def fixed_value(self) -> np.ndarray | None:
        """Return the value that holds whatever the symbolic sizes are, or None."""
        return self.value if self.has_fixed_value else None

    @property
    def nbytes(self) -> int:
        """Return the size in bytes under the assumed sizes."""
        return 0 if self.dtype is None else prod(self.shape) * self.dtype.itemsize


_Content = tuple[np.dtype, Shape, bytes | tuple[object, ...]]  # bytes, or the texts themselves


def _content(value: np.ndarray) -> _Content:
    return value.dtype, value.shape, tuple(value.ravel()) if value.dtype.hasobject else value.tobytes()


@lru_cache(maxsize=1 << 16)
def _tensor_facts(
    is_named: bool,
    shapes: tuple[Shape, Shape | None],
    dtype: np.dtype | None,
    has_fixed_shape: bool,
    value: _Content | None,
    has_fixed_value: bool,
) -> TensorFacts:
    """Return the one object."""
    array = None
    if value is not None:
        dtype, shape, content = value
        flat = np.frombuffer(content, dtype) if isinstance(content, bytes) else np.array(content, dtype)
        array = flat.reshape(shape)
    return TensorFacts(is_named, *shapes, dtype, has_fixed_shape, array, has_fixed_value)


@dataclass(frozen=True)
class Facts:
    """Shapes (under the assumed sizes), dtypes and known values of a graph's tensors."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, np.dtype]
    values: Mapping[str, np.ndarray]
    fixed_shapes: frozenset[str]  # tensors whose shape does not follow a symbolic size
    fixed_values: frozenset[str]
    doubled_shapes: Mapping[str, Shape] = field(default_factory=dict)  # under twice the symbolic sizes
    # Remembered, because several strategies are lowered from the same facts:
    _nbytes: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    _tensors: dict[str, TensorFacts] = field(default_factory=dict, compare=False, repr=False)
    # by the node's identity, which the node kept here makes lasting (sharding_rules.node_facts)
    nodes: dict[int, tuple[gs.Node, object]] = field(default_factory=dict, compare=False, repr=False)

    def of(self, tensor: str) -> TensorFacts:
        """Return all that is known of a tensor."""
        if tensor not in self._tensors:
            value = self.values.get(tensor)
            self._tensors[tensor] = _tensor_facts(
                bool(tensor),
                (self.shape(tensor), self.doubled_shapes.get(tensor)),
                self.dtypes.get(tensor),
                tensor in self.fixed_shapes,
                None if value is None else _content(value),
                tensor in self.fixed_values,
            )
        return self._tensors[tensor]

    @staticmethod
    def alone(tensors: Mapping[str, TensorFacts]) -> "Facts":
        """Return the facts of some tensors, by names."""
        known = {n: t.doubled_shape for n, t in tensors.items() if t.doubled_shape is not None}
        return Facts(
            {name: tensor.shape for name, tensor in tensors.items()},
            {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype is not None},
            {name: tensor.value for name, tensor in tensors.items() if tensor.value is not None},
            frozenset(name for name, tensor in tensors.items() if tensor.has_fixed_shape),
            frozenset(name for name, tensor in tensors.items() if tensor.has_fixed_value),
            known,
        )

    def shape(self, tensor: str) -> Shape:
        """Return the concrete shape; UNKNOWN where only the data tells."""
        return self.shapes.get(tensor, ())

    def fixed_size(self, tensor: str, axis: int) -> int | None:
        """Return the size of one axis if it is the same whatever the symbolic sizes are, else None."""
        size, doubled = self.shape(tensor)[axis], self.doubled_shapes.get(tensor, ())
        is_fixed = axis < len(doubled) and doubled[axis] == size != UNKNOWN
        return size if is_fixed else None

    def value(self, tensor: str) -> np.ndarray | None:
        """Return the known value under the assumed sizes, or None."""
        return self.values.get(tensor)

    def fixed_value(self, tensor: str) -> np.ndarray | None:
        """Return the value that holds whatever the symbolic sizes are, or None."""
        return self.values.get(tensor) if tensor in self.fixed_values else None

    def nbytes(self, tensor: str) -> int:
        """Return the tensor's size in bytes under the assumed sizes."""
        if tensor not in self._nbytes:
            self._nbytes[tensor] = prod(self.shape(tensor)) * self.dtypes[tensor].itemsize
        return self._nbytes[tensor]
