"""Gradient rules of ops that cut an axis or lengthen it: Slice, Pad, CenterCropPad, Compress."""

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.rules.along_axis import gather_readers, static_size, with_zeros_behind
from partc.compiler.differentiation.rules.indexing import scatter_along_axis
from partc.compiler.differentiation.tensor_types import Size

OPEN_END = np.iinfo(np.int64).max // 2  # a Slice's end beyond this means the end of the axis

# ---------------------------------------------------------------- slice


def _slice(at: ForwardNode, dy: str) -> Gradients:
    """Put the slice back: one Pad for all axes of step 1, Gathers for each other axis."""
    axes, steps = _axes_and_steps(at)
    starts, ends = at.constants.get(at.x(1)), at.constants.get(at.x(2))
    rank = at.rank(at.x(0))
    before, after = [0] * rank, [0] * rank
    for entry, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        if starts is None or ends is None:
            dy = _computed_slice(at, dy, axis, entry)
            continue
        size, start, end = at.shape(at.x(0))[axis], int(starts[entry]), int(ends[entry])
        padding = _padding(size, start, end) if step == 1 else None
        if padding is not None:
            before[axis], after[axis] = padding
        elif isinstance(size, int):
            dy = gather_readers(at, dy, _slice_indices(size, start, end, step), size, axis)
        else:
            dy = _computed_slice(at, dy, axis, entry)
    if any(before) or any(after):
        dy = at.op("Pad", dy, at.build.ints(*before, *after), at.scalar(0, like=at.x(0)))
    return {0: dy}


def _axes_and_steps(at: ForwardNode) -> tuple[list[int], list[int]]:
    """Return the sliced axes, from the front, and their steps; 0 stands for one that is computed."""
    rank = at.rank(at.x(0))
    axes = at.constant_input(3)
    if axes is None:
        axes = np.arange(static_size(at, at.x(1), 0))
    steps = np.ones(len(axes), np.int64)
    if at.x(4):
        steps = at.constants.get(at.x(4), np.zeros(len(axes), np.int64))
    return [axis % rank for axis in axes.tolist()], steps.tolist()


def _padding(size: Size, start: int, end: int) -> tuple[int, int] | None:
    """Return how many entries a slice left out before and after itself, None if only the size tells."""
    if isinstance(size, int):
        first, stop, _ = slice(start, end).indices(size)
        return first, size - max(stop, first)
    if start >= 0 and (end < 0 or end > OPEN_END):
        return start, -end if end < 0 else 0
    return None


def _slice_indices(size: int, start: int, end: int, step: int) -> np.ndarray:
    # numpy and ONNX agree on [start:end:step] but for a negative end that means "before the first".
    stop = None if step < 0 and end < -size else end
    start = -size if step > 0 and start < -size else start
    return np.arange(size, dtype=np.int64)[start:stop:step]


def _computed_slice(at: ForwardNode, dy: str, axis: int, entry: int) -> str:
    """Turn a slice round at run time: slice the positions, and note at each which entry of dy it is."""
    zero, one = (at.build.constant(np.array(value, np.int64)) for value in (0, 1))
    size = at.op("Shape", at.x(0), start=axis, end=axis + 1)
    here = at.build.ints(entry)
    start, end = (at.op("Gather", _as_int64(at, at.x(index)), here) for index in (1, 2))
    step = at.op("Gather", _as_int64(at, at.x(4)), here) if at.x(4) else at.build.ints(1)
    positions = at.op("Range", zero, at.op("Squeeze", size), one)
    indices = at.op("Slice", positions, start, end, at.build.ints(0), step)
    count = at.op("Squeeze", at.op("Shape", indices))
    nobody = at.op("Expand", count, size)
    readers = at.op("ScatterElements", nobody, indices, at.op("Range", zero, count, one), axis=0)
    return at.op("Gather", with_zeros_behind(at, dy, axis), readers, axis=axis)


def _as_int64(at: ForwardNode, tensor: str) -> str:
    return tensor if at.types[tensor].element == TensorProto.INT64 else at.op("Cast", tensor, to=7)


# ---------------------------------------------------------------- pad


def _pad(at: ForwardNode, dy: str) -> Gradients:
    mode = str(at.attribute("mode", "constant"))
    if mode != "constant":
        return {0: _unpad_entries(at, dy, mode)}
    amounts = at.op("Neg", at.x(1))
    zero = at.scalar(0, like=at.x(0))
    return {0: at.op("Pad", dy, amounts, zero, *((at.x(3),) if at.x(3) else ()))}


def _unpad_entries(at: ForwardNode, dy: str, mode: str) -> str:
    """Modes reflect, edge and wrap. numpy pads the positions as ONNX pads the entries."""
    amounts, axes = at.constant_input(1), at.constant_input(3)
    assert amounts is not None
    rank = at.rank(at.x(0))
    padded = range(rank) if axes is None else (axes % rank).tolist()
    for axis, before, after in zip(padded, *amounts.reshape(2, -1).tolist(), strict=True):
        if before or after:
            size = static_size(at, at.x(0), axis)
            indices = np.arange(max(0, -before), size - max(0, -after))
            widths = (max(0, before), max(0, after))
            source = np.pad(indices, widths, mode=mode)  # type: ignore[call-overload]  # mode is text
            dy = gather_readers(at, dy, source, size, axis)
    return dy


def _center_crop_pad(at: ForwardNode, dy: str) -> Gradients:
    """Pad what was cropped and crop what was padded; an odd entry more lies behind."""
    rank = at.rank(at.x(0))
    before, after = [0] * rank, [0] * rank
    for axis in range(rank):
        size, output_size = at.shape(at.x(0))[axis], at.shape(at.y())[axis]
        if size != output_size:
            missing = static_size(at, at.x(0), axis) - static_size(at, at.y(), axis)
            before[axis] = abs(missing) // 2 * (1 if missing > 0 else -1)
            after[axis] = missing - before[axis]
    return {0: at.op("Pad", dy, at.build.ints(*before, *after), at.scalar(0, like=at.x(0)))}


# ---------------------------------------------------------------- compress


def _compress(at: ForwardNode, dy: str) -> Gradients:
    indices = at.op("Reshape", at.op("NonZero", at.x(1)), at.build.ints(-1))
    axis = at.attribute("axis")
    if isinstance(axis, int):
        return {0: scatter_along_axis(at, dy, indices, axis % at.rank(at.x(0)))}
    flat = at.op("Reshape", at.zeros(at.x(0)), at.build.ints(-1))
    flat_gradient = at.op("ScatterElements", flat, indices, dy, axis=0)
    return {0: at.op("Reshape", flat_gradient, at.shape_of(at.x(0)))}


RULES: Mapping[str, Rule] = {
    "CenterCropPad": of_first_output(_center_crop_pad),
    "Compress": of_first_output(_compress),
    "Pad": of_first_output(_pad),
    "Slice": of_first_output(_slice),
}
