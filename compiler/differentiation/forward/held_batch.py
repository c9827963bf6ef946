"""Refuse constants that act on the batch, for the size that the model was exported with may be in them.

    a position, bound or count    on an axis of the batch: z[:4] of 2 B entries, topk(2), x[3], Pad, Resize
    indices of fixed length       GatherElements of all samples, by labels [0, 1, 2, 3]
    as many copies                of anything, summed
    a number of samples           a sum over the batch divided by 4, by 3 (an unbiased one), times 0.25

What is in such a constant cannot be told: half of a batch of 4, or the first two samples of any. The first
and the last sample, and the next to these, are the same in any batch of more than three. Shape inference sees
none of this: every such graph is well formed at any batch, and means something else.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from partc.compiler.differentiation.forward.batch_axes import SYMBOLIC, BatchAxes
from partc.compiler.differentiation.forward.copied_samples import refuse_copied_samples
from partc.compiler.differentiation.forward.sample_counts import refuse_sample_counts
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.sizes.shapes import OPEN_END
from partc.runtime.errors import UnsupportedModel

COUNT = "a count"
LARGEST_OF_ONE = 3  # of which a half is 1


@dataclass(frozen=True, slots=True)
class _Reading:
    """Numbers that act on an axis of a node's first input; `what` says where they stand."""

    axis: int
    numbers: tuple[int, ...]
    what: str
    is_count: bool = False  # of parts, copies or strides, which have no place


def refuse_held_batch(graph: onnx.GraphProto, batch: BatchAxes) -> None:
    """Raise UnsupportedModel at the first node that reads a constant which may hold the batch."""
    constants = batch.constants()
    build = NodeBuilder()
    for node in graph.node:
        at = ForwardNode(build, node, batch.before.types, constants, frozenset(), frozenset(), 0)
        if node.op_type in ("GatherElements", "ScatterElements"):
            _check_lengths(at, batch)
        if node.op_type in _READERS and batch.axes(at.x(0)):
            _check_readings(at, batch)
    refuse_sample_counts(graph, constants, batch)
    refuse_copied_samples(graph, constants, batch)


def _check_readings(at: ForwardNode, batch: BatchAxes) -> None:
    rank = at.rank(at.x(0))
    for reading in _READERS[at.node.op_type](at):
        axis = reading.axis % rank
        if axis in batch.axes(at.x(0)) and not _is_of_any_batch(reading, batch, at.x(0), axis):
            numbers = reading.numbers if len(reading.numbers) > 1 else reading.numbers[0]
            raise UnsupportedModel(
                f"the model's own batch ({batch.size}) may be held in a constant: {reading.what} of "
                f"{numbers} on axis {axis} of {at.x(0)!r}",
                at=at.place,
                fix=SYMBOLIC,
            )


def _is_of_any_batch(reading: _Reading, batch: BatchAxes, tensor: str, axis: int) -> bool:
    if reading.is_count:
        return batch.size == 1 or all(number % batch.size != 0 for number in reading.numbers)
    if len(reading.numbers) > 1 or batch.old_size(tensor, axis) == 1:
        return False
    (number,) = reading.numbers
    if reading.what == COUNT:
        return False
    return number in (0, -1) or abs(number) >= OPEN_END or (abs(number) == 1 and batch.size > LARGEST_OF_ONE)


def _check_lengths(at: ForwardNode, batch: BatchAxes) -> None:
    """Beside their own axis, data and indices are read as far as the indices go."""
    data, indices = at.x(0), at.x(1)
    rank = batch.rank(data)
    own = {at.integer("axis", 0) % rank} if rank else set()
    if apart := (batch.axes(data) ^ batch.axes(indices)) - own:
        fixed = indices if min(apart) in batch.axes(data) else data
        raise UnsupportedModel(
            f"the model's own batch ({batch.size}) is held in {fixed!r}: axis {min(apart)} stays as it is",
            at=at.place,
            fix=SYMBOLIC,
        )


# ---------------------------------------------------------------- one reader an op


def _numbers(at: ForwardNode, index: int) -> list[int] | None:
    """Return the numbers of a constant input, None where it is computed or left out."""
    values = at.constants.get(at.x(index)) if at.x(index) else None
    return None if values is None else [int(value) for value in np.ravel(values)]


def _axes(at: ForwardNode, index: int, count: int) -> list[int]:
    return _numbers(at, index) or list(range(count))


def _slice(at: ForwardNode) -> Iterator[_Reading]:
    for index, what in ((1, "a start"), (2, "an end"), (4, "a step")):
        numbers = _numbers(at, index) or []
        for axis, number in zip(_axes(at, 3, len(numbers)), numbers, strict=False):
            if not (index == 1 and number == 0):
                yield _Reading(axis, (number,), what, is_count=index == 4)


def _pad(at: ForwardNode) -> Iterator[_Reading]:
    pads = _numbers(at, 1) or []
    axes = _axes(at, 3, len(pads) // 2)
    for axis, number in zip([*axes, *axes], pads, strict=False):
        if number:
            yield _Reading(axis, (number,), "padding")


def _resize(at: ForwardNode) -> Iterator[_Reading]:
    """A size says how long the axis is to be: the batch as it was, if nothing else."""
    attribute = at.attribute("axes")
    sizes = _numbers(at, 3 if at.node.op_type == "Resize" else 1) or []
    axes = attribute if isinstance(attribute, list) else range(len(sizes))
    for axis, size in zip(axes, sizes, strict=False):
        yield _Reading(int(axis), (size, size), "a size")


def _along(index: int, what: str, default_axis: int = 0) -> Callable[[ForwardNode], Iterator[_Reading]]:
    """Return the reader of an input whose numbers act along the node's axis."""

    def read(at: ForwardNode) -> Iterator[_Reading]:
        if numbers := _numbers(at, index):
            yield _Reading(at.integer("axis", default_axis), tuple(numbers), what)

    return read


def _of_tuples(at: ForwardNode) -> Iterator[_Reading]:
    """GatherND and ScatterND: a column of the indices is of one axis."""
    indices = at.constants.get(at.x(1))
    if indices is not None and indices.ndim:
        first = at.integer("batch_dims", 0)
        for column in range(indices.shape[-1]):
            yield _Reading(first + column, tuple(map(int, indices[..., column].ravel())), "positions")


def _compress(at: ForwardNode) -> Iterator[_Reading]:
    if (mask := _numbers(at, 1)) is not None:
        yield _Reading(at.integer("axis", 0), tuple(mask), "a mask")


def _trilu(at: ForwardNode) -> Iterator[_Reading]:
    for number in _numbers(at, 1) or []:
        if number:
            yield from (_Reading(axis, (number,), "a diagonal") for axis in (-2, -1))


def _split(at: ForwardNode) -> Iterator[_Reading]:
    """Sizes of parts that no longer add up are seen by shape inference."""
    if parts := at.integer("num_outputs", 0):
        yield _Reading(at.integer("axis", 0), (parts,), "a number of parts", is_count=True)


def _tile(at: ForwardNode) -> Iterator[_Reading]:
    for axis, copies in enumerate(_numbers(at, 1) or []):
        yield _Reading(axis, (copies,), "a number of copies", is_count=True)


_READERS: Mapping[str, Callable[[ForwardNode], Iterator[_Reading]]] = {
    "CenterCropPad": _resize,
    "Compress": _compress,
    "Gather": _along(1, "positions"),
    "GatherElements": _along(1, "positions"),
    "GatherND": _of_tuples,
    "Pad": _pad,
    "Resize": _resize,
    "ScatterElements": _along(1, "positions"),
    "ScatterND": _of_tuples,
    "Slice": _slice,
    "Split": _split,
    "Tile": _tile,
    "TopK": _along(1, COUNT, default_axis=-1),
    "Trilu": _trilu,
}
