"""The shapes that inference found for a segment's values."""

import onnx

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
