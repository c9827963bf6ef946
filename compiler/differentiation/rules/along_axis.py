"""Turn round what an op did along one axis.

    y[j] = x[source[j]]        dx[i] = sum of dy[j] over the j with source[j] = i     gather_readers
    y[j] = sum W[j, i] x[i]    dx[i] = sum W[j, i] dy[j]                              multiply_along

The first needs no scatter: the j that read entry i, at most a few, become index vectors, and dx is a sum
of Gathers from dy with one entry of zeros behind its last.
"""

import numpy as np

from partc.compiler.differentiation.forward_node import ForwardNode
from partc.runtime.errors import UnsupportedModel

MAX_READERS = 6  # of one entry, before a product is cheaper than so many Gathers


def gather_readers(at: ForwardNode, dy: str, source: np.ndarray, size: int, axis: int) -> str:
    """Return dx, of `size` entries along `axis`, for y[j] = x[source[j]]; source int64[k] counts from 0."""
    vectors = _readers(source, size)
    if np.array_equal(source, np.arange(size)):
        return dy
    if len(vectors) > MAX_READERS:
        weights = (np.arange(size) == source[:, None]).astype(at.types[at.x(0)].dtype)
        return multiply_along(at, dy, weights, axis)
    widened = with_zeros_behind(at, dy, axis)
    parts = [at.op("Gather", widened, at.build.constant(vector), axis=axis) for vector in vectors]
    return parts[0] if len(parts) == 1 else at.op("Sum", *parts)


def _readers(source: np.ndarray, size: int) -> list[np.ndarray]:
    """Return vectors int64[size]: the r-th holds the r-th j that reads each entry, k where there is none."""
    readers: list[list[int]] = [[] for _ in range(size)]
    for j, entry in enumerate(source.tolist()):
        readers[entry].append(j)
    count = max([1, *map(len, readers)])
    padded = [positions + [len(source)] * (count - len(positions)) for positions in readers]
    return list(np.array(padded, np.int64).reshape(size, count).T)


def with_zeros_behind(at: ForwardNode, dy: str, axis: int) -> str:
    """Append one entry of zeros along an axis."""
    rank = at.rank(at.x(0))
    amounts = [0] * (2 * rank)
    amounts[rank + axis] = 1
    return at.op("Pad", dy, at.build.ints(*amounts), at.scalar(0, like=at.x(0)))


def multiply_along(at: ForwardNode, dy: str, weights: np.ndarray, axis: int) -> str:
    """Return dx for y = W x along `axis`; W float[entries of y, entries of x]."""
    rank = at.rank(at.x(0))
    if axis == rank - 1:
        return at.op("MatMul", dy, at.build.constant(weights))
    transposed = at.build.constant(np.ascontiguousarray(weights.T))
    if axis == rank - 2:
        return at.op("MatMul", transposed, dy)
    swap = list(range(rank))
    swap[axis], swap[-2] = rank - 2, axis
    return at.op("Transpose", at.op("MatMul", transposed, at.op("Transpose", dy, perm=swap)), perm=swap)


def static_size(at: ForwardNode, tensor: str, axis: int) -> int:
    """Return the size of one axis. Raises UnsupportedModel where it is symbolic."""
    size = at.shape(tensor)[axis]
    if isinstance(size, int):
        return size
    raise UnsupportedModel(
        f"the size of axis {axis} of tensor {tensor!r} must be known",
        at=at.place,
        fix="fix this axis' size when exporting the model",
    )
