"""DFT and STFT written as products with constant matrices of cosines and sines.

X[k] = sum_n x[n] exp(-2 pi i k n / N), the inverse with + and divided by N       (ONNX, DFT-20)
"""

from collections.abc import Sequence

import numpy as np

from partc.compiler.differentiation.forward_node import ForwardNode


def expand_dft(at: ForwardNode) -> Sequence[str]:
    """Emit the transform of x [.., n along an axis, .., 1 or 2], the last axis real and imaginary part."""
    x, rank = at.x(0), at.rank(at.x(0))
    axis = at.constant_input(2) if at.x(2) else np.array(at.integer("axis", -2 if at.opset >= 20 else 1))
    assert axis is not None
    place = int(axis) % rank
    length = at.constant_input(1)
    sizes = at.static_sizes(x, place)
    inverse, onesided = bool(at.integer("inverse", 0)), bool(at.integer("onesided", 0))
    halved = inverse and onesided  # half a spectrum in, a real signal out
    points = (2 * (sizes[0] - 1) if halved else sizes[0]) if length is None else int(length)
    perm = [other for other in range(rank - 1) if other != place] + [place]
    parts = [at.op("Transpose", part, perm=perm) for part in _parts(at, x, sizes[-1])]
    samples = min(sizes[0], points // 2 + 1 if halved else points)
    if samples < sizes[0]:
        build = at.build
        parts = [at.op("Slice", part, build.ints(0), build.ints(samples), build.ints(-1)) for part in parts]
    bins = points // 2 + 1 if onesided and not inverse else points
    spectrum = _transform(at, parts, samples, bins, points, inverse, halved)
    back = [int(position) for position in np.argsort(perm)]
    return (_join(at, [at.op("Transpose", part, perm=back) for part in spectrum]),)


def expand_stft(at: ForwardNode) -> Sequence[str]:
    """Emit the transforms [batch, frames, bins, 2] of frames of a signal [batch, length, 1 or 2]."""
    step, frame = at.constant_input(1), at.constant_input(3)
    length, channels = at.static_sizes(at.x(0), 1)
    assert step is not None
    points = int(frame) if frame is not None else at.static_shape(at.x(2))[0]
    starts = np.arange(0, length - points + 1, int(step))
    indices = at.build.constant(starts[:, None] + np.arange(points))
    parts = [at.op("Gather", part, indices, axis=1) for part in _parts(at, at.x(0), channels)]
    if at.x(2):
        parts = [at.op("Mul", part, at.x(2)) for part in parts]
    bins = points // 2 + 1 if at.integer("onesided", 1) else points
    return (_join(at, _transform(at, parts, points, bins, points)),)


def _parts(at: ForwardNode, x: str, count: int) -> list[str]:
    """Return the real part, and the imaginary one if there is one, without their axis."""
    if count == 1:
        return [at.op("Squeeze", x, at.build.ints(-1))]
    parts = at.build.call("Split", (x,), 2, axis=-1, num_outputs=2)
    return [at.op("Squeeze", part, at.build.ints(-1)) for part in parts]


def _transform(
    at: ForwardNode,
    parts: Sequence[str],
    read: int,
    bins: int,
    points: int,
    inverse: bool = False,
    halved: bool = False,
) -> list[str]:
    """Transform the last axis, of `read` entries, into `bins`; of `halved` there are real parts alone."""
    entries = np.arange(read)
    # The half that is missing mirrors this one, but for its two ends.
    counts = np.where((entries == 0) | (2 * entries == points), 1, 2) if halved else np.ones(read)
    angle = 2 * np.pi * np.outer(entries, np.arange(bins)) / points
    scale, sign = (counts[:, None] / points, 1) if inverse else (1, -1)
    dtype = at.types[at.x(0)].dtype
    cosine = at.build.constant((scale * np.cos(angle)).astype(dtype))
    sine = at.build.constant((scale * sign * np.sin(angle)).astype(dtype))
    real = at.op("MatMul", parts[0], cosine)
    if len(parts) > 1:
        real = at.op("Sub", real, at.op("MatMul", parts[1], sine))
    if halved:
        return [real]
    imaginary = at.op("MatMul", parts[0], sine)
    if len(parts) > 1:
        imaginary = at.op("Add", imaginary, at.op("MatMul", parts[1], cosine))
    return [real, imaginary]


def _join(at: ForwardNode, parts: Sequence[str]) -> str:
    return at.op("Concat", *(at.op("Unsqueeze", part, at.build.ints(-1)) for part in parts), axis=-1)
