"""Guess the sample axis of data inputs whose owner declared none.

The sample size is the size (a name or a number) that most inputs share; among equals a name wins
over a number, and the leading axis of the first input over later ones. An input that lacks it is
the same for all replicas.
"""

from collections import Counter
from collections.abc import Sequence

import onnx_graphsurgeon as gs


def find_sample_axes(inputs: Sequence[gs.Tensor]) -> dict[str, int | None]:
    """Return the sample axis of every data input, None where it has none."""
    size = _sample_size(inputs)
    axes: dict[str, int | None] = {}
    for tensor in inputs:
        shape = list(tensor.shape or ())
        axes[tensor.name] = shape.index(size) if size is not None and size in shape else None
    return axes


def _sample_size(inputs: Sequence[gs.Tensor]) -> int | str | None:
    shapes = [[size for size in tensor.shape or () if size != 1 and size is not None] for tensor in inputs]
    shares = Counter(size for shape in shapes for size in set(shape))
    if not shares:
        return None
    order = [size for shape in shapes for size in shape]
    sizes: list[int | str] = list(shares)
    return max(sizes, key=lambda size: (shares[size], isinstance(size, str), -order.index(size)))
