"""Gradient rules of ops that move elements about."""

from collections.abc import Mapping, Sequence

import numpy as np

from partc.compiler.training.rules.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.training.rules.indexing import scatter_along_axis
from partc.runtime.errors import UnsupportedModel

END = np.iinfo(np.int64).max // 2  # a Slice's end beyond this means the end of the axis


def _reshape(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Reshape", dy, at.shape_of(at.x(0)))}


def _squeeze(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Unsqueeze", dy, at.x(1))} if at.x(1) else _reshape(at, dy)


def _unsqueeze(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Squeeze", dy, at.x(1))}


def _transpose(at: ForwardNode, dy: str) -> Gradients:
    rank = at.rank(at.x(0))
    order = at.attribute("perm", list(range(rank))[::-1])
    assert isinstance(order, Sequence)
    return {0: at.op("Transpose", dy, perm=np.argsort(np.array(order)).tolist())}


def _expand(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.unbroadcast(dy, at.y(), at.x(0))}


def _concat(at: ForwardNode, dy: str) -> Gradients:
    axis = at.integer("axis", 0)
    inputs = list(at.node.input)
    if len(inputs) == 1:
        return {0: dy}
    axis %= at.rank(at.y())
    sizes = [at.shape(x)[axis] for x in inputs]
    if all(isinstance(size, int) for size in sizes):
        lengths = at.build.ints(*(size for size in sizes if isinstance(size, int)))
    else:
        parts = [at.op("Shape", x, start=axis, end=axis + 1) for x in inputs]
        lengths = at.op("Concat", *parts, axis=0)
    pieces = at.build.call("Split", [dy, lengths], len(inputs), axis=axis)
    return dict(enumerate(pieces))


def _split(at: ForwardNode, gradients: Sequence[str | None]) -> Gradients:
    pieces = [
        gradient or at.zeros(output) for gradient, output in zip(gradients, at.node.output, strict=True)
    ]
    return {0: at.op("Concat", *pieces, axis=at.integer("axis", 0))}


def _pad(at: ForwardNode, dy: str) -> Gradients:
    if at.attribute("mode", "constant") != "constant":
        raise UnsupportedModel(
            f"the gradient of Pad in mode {at.attribute('mode')!r} is not known",
            at=at.place,
            fix="pad with a constant",
        )
    amounts = at.op("Neg", at.x(1))
    zero = at.scalar(0, like=at.x(0))
    return {0: at.op("Pad", dy, amounts, zero, *((at.x(3),) if at.x(3) else ()))}


def _trilu(at: ForwardNode, dy: str) -> Gradients:
    extra = (at.x(1),) if at.x(1) else ()
    return {0: at.op("Trilu", dy, *extra, upper=at.integer("upper", 1))}


# ---------------------------------------------------------------- slice


def _slice(at: ForwardNode, dy: str) -> Gradients:
    """Put the slice back: one Pad for all axes of step 1, a scatter for each other axis."""
    rank = at.rank(at.x(0))
    starts, ends = at.constant_input(1), at.constant_input(2)
    assert starts is not None
    assert ends is not None
    axes, steps = at.constant_input(3), at.constant_input(4)
    axes = np.arange(len(starts)) if axes is None else axes % rank
    steps = np.ones(len(starts), np.int64) if steps is None else steps
    before, after = [0] * rank, [0] * rank
    gradient = dy
    for axis, start, end, step in zip(
        axes.tolist(), starts.tolist(), ends.tolist(), steps.tolist(), strict=True
    ):
        if step == 1:
            before[axis], after[axis] = _padding(at, axis, start, end)
        else:
            gradient = _scatter_strided(at, gradient, axis, slice(start, end, step))
    if any(before) or any(after):
        amounts = at.build.ints(*before, *after)
        gradient = at.op("Pad", gradient, amounts, at.scalar(0, like=at.x(0)))
    return {0: gradient}


def _padding(at: ForwardNode, axis: int, start: int, end: int) -> tuple[int, int]:
    """Return how many entries a slice left out before and after itself."""
    size = at.shape(at.x(0))[axis]
    if isinstance(size, int):
        first, stop, _ = slice(start, end).indices(size)
        return first, size - max(stop, first)
    if start >= 0 and (end < 0 or end > END):
        return start, -end if end < 0 else 0
    raise UnsupportedModel(
        f"the gradient of a slice [{start}:{end}] of axis {axis}, whose size is not known",
        at=at.place,
        fix="fix this axis' size when exporting the model",
    )


def _scatter_strided(at: ForwardNode, gradient: str, axis: int, taken: slice) -> str:
    size = at.shape(at.x(0))[axis]
    if not isinstance(size, int) or len(at.constants[at.x(1)]) > 1:
        raise UnsupportedModel(
            "the gradient of a strided slice needs one axis, of known size",
            at=at.place,
            fix="slice one axis at a time, and fix its size when exporting the model",
        )
    # numpy and ONNX agree on [start:end:step] but for a negative end that means "before the first".
    end = None if taken.step < 0 and taken.stop < -size else taken.stop
    positions = np.arange(size, dtype=np.int64)[taken.start : end : taken.step]
    return scatter_along_axis(at, gradient, at.build.constant(positions), axis)


RULES: Mapping[str, Rule] = {
    "Reshape": of_first_output(_reshape),
    "Flatten": of_first_output(_reshape),
    "Squeeze": of_first_output(_squeeze),
    "Unsqueeze": of_first_output(_unsqueeze),
    "Transpose": of_first_output(_transpose),
    "Expand": of_first_output(_expand),
    "Concat": of_first_output(_concat),
    "Split": _split,
    "Pad": of_first_output(_pad),
    "Slice": of_first_output(_slice),
    "Trilu": of_first_output(_trilu),
}
