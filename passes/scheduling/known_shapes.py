"""The shapes and types that inference found for a segment's values."""

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
