"""Find how one stored tensor is a view of another: a part, rearranged.

    source ── Slice ── Reshape ── Transpose ── Reshape ── copy        any of the four may be missing

A view counts as found where every element agrees, bit by bit, and no other view agrees too: a matrix of zeros
is its own transpose, and each of its rows is any other. What an exporter calls the operations in between
may leave one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, permutations, product

import numpy as np
import onnx
from onnx import helper, numpy_helper

Shape = tuple[int, ...]

RESHAPING = frozenset({"_unsafe_view", "flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"})
PERMUTING = frozenset({"movedim", "numpy_t", "permute", "swapaxes", "t", "transpose"})
SLICING = frozenset({"embedding", "narrow", "select", "slice"})
COPYING = frozenset({"_to_copy", "alias", "clone", "contiguous", "detach", "to"})

MAX_PERMUTED = 5  # axes longer than 1 that are permuted
MAX_PARTS = 4096  # ways to choose lengths and an order that are tried
MAX_PLACES = 256  # in a source, at which a part may begin
SAMPLE = 64  # elements that are compared before all are
CHUNK = 1 << 20  # elements whose places are compared at once


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """How a part is laid out anew: `first` is its shape where its axes are permuted."""

    first: Shape
    permutation: Shape

    @property
    def is_permuted(self) -> bool:
        """Tell whether elements leave the order of their rows."""
        return self.permutation != tuple(range(len(self.permutation)))

    @property
    def permuted(self) -> Shape:
        """Return the shape behind the Transpose."""
        return tuple(self.first[axis] for axis in self.permutation)

    def places_in_part(self, places: np.ndarray) -> np.ndarray:
        """Return which element of the part each of the copy's is, both counted row by row."""
        coordinates = np.unravel_index(places, self.permuted)
        ordered = [coordinates[self.permutation.index(axis)] for axis in range(len(self.first))]
        return np.asarray(np.ravel_multi_index(ordered, self.first))

    def places_in_copy(self, places: np.ndarray) -> np.ndarray:
        """Return where each element of the part is in the copy."""
        coordinates = np.unravel_index(places, self.first)
        ordered = [coordinates[axis] for axis in self.permutation]
        return np.asarray(np.ravel_multi_index(ordered, self.permuted))


@dataclass(frozen=True, slots=True)
class View:
    """A view of a tensor of shape `source`."""

    source: Shape
    starts: Shape
    lengths: Shape
    steps: Shape
    order: Rearrangement
    shape: Shape

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return the view of an array."""
        part = array[self._slices()].reshape(self.order.first)
        return part.transpose(self.order.permutation).reshape(self.shape)

    def places(self, places: np.ndarray) -> np.ndarray:
        """Return which element of the source each of the copy's is, both counted row by row."""
        part = np.unravel_index(self.order.places_in_part(places), self.lengths)
        coordinates = [s + i * step for s, i, step in zip(self.starts, part, self.steps, strict=True)]
        return np.asarray(np.ravel_multi_index(coordinates, self.source))

    def nodes(
        self, source: str, name: str, fresh: Callable[[str], str]
    ) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        """Return nodes that make the view, and the constants that they read; `fresh` makes new names."""
        constants: list[onnx.TensorProto] = []

        def numbers(suffix: str, values: Sequence[int]) -> str:
            tensor = numpy_helper.from_array(np.array(values, np.int64), fresh(f"{name}.{suffix}"))
            constants.append(tensor)
            return tensor.name

        steps: list[tuple[str, tuple[str, ...], Shape]] = []
        if self.lengths != self.source:
            ends = [s + (n - 1) * step + 1 for s, n, step in self._bounds()]
            axes = range(len(self.source))
            bounds = {"starts": self.starts, "ends": ends, "axes": axes, "steps": self.steps}
            steps.append(("Slice", tuple(numbers(key, list(value)) for key, value in bounds.items()), ()))
        if self.order.is_permuted:
            if self.order.first != self.lengths:
                steps.append(("Reshape", (numbers("unpermuted", self.order.first),), ()))
            steps.append(("Transpose", (), self.order.permutation))
        before = self.order.permuted if self.order.is_permuted else self.lengths
        if before != self.shape or not steps:
            steps.append(("Reshape", (numbers("shape", self.shape),), ()))
        between = [fresh(f"{name}.{op_type.lower()}") for op_type, _, _ in steps[:-1]]
        return _chain([source, *between, name], steps), constants

    def _bounds(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.starts, self.lengths, self.steps, strict=True)

    def _slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + (n - 1) * step + 1, step) for s, n, step in self._bounds())


def _chain(
    tensors: Sequence[str], steps: Sequence[tuple[str, tuple[str, ...], Shape]]
) -> list[onnx.NodeProto]:
    """Return nodes from tensor to tensor; the numbers of a step are its permutation."""
    nodes = []
    for (op_type, operands, permutation), (read, made) in zip(steps, pairwise(tensors), strict=True):
        nodes.append(helper.make_node(op_type, [read, *operands], [made], name=f"{op_type}:{made}"))
        if permutation:
            nodes[-1].attribute.append(helper.make_attribute("perm", permutation))
    return nodes


# ---------------------------------------------------------------- the search


def find_view(source: np.ndarray, copy: np.ndarray, operations: frozenset[str] = frozenset()) -> View | None:
    """Return the only view of `source` that is equal to `copy`; None where there is none, or several.

    `operations` are PyTorch's names of all that lies between them; empty where that is not known.
    """
    if not 0 < copy.size <= source.size or source.dtype != copy.dtype:
        return None
    source = np.atleast_1d(source)
    found: View | None = None
    for view in _equal_views(source, copy, operations):
        if found is not None and not _are_same(found, view):
            return None
        found = found or view
    return found


def _equal_views(source: np.ndarray, copy: np.ndarray, operations: frozenset[str]) -> Iterator[View]:
    candidates = _whole_views(source, copy) if copy.size == source.size else _parts(source, copy, operations)
    sample = np.random.default_rng(0).integers(0, copy.size, SAMPLE)
    values, flat = copy.reshape(-1)[sample], source.reshape(-1)
    for view in candidates:
        if not _is_told(view, operations) or not (flat[view.places(sample)] == values).all():
            continue
        if np.array_equal(view.of(source), copy):
            yield view


def _whole_views(source: np.ndarray, copy: np.ndarray) -> Iterator[View]:
    nothing, ones = (0,) * source.ndim, (1,) * source.ndim
    for order in _orders(source.shape, copy.shape):
        yield View(source.shape, nothing, source.shape, ones, order, copy.shape)


def _is_told(view: View, operations: frozenset[str]) -> bool:
    """Tell whether operations of these names may make such a view."""
    if not operations:
        return True
    named = operations - COPYING
    if view.order.is_permuted and not named & PERMUTING:
        return False
    if view.lengths != view.source and named <= RESHAPING | PERMUTING:
        return False
    return not named or not named <= PERMUTING or _is_transposed(view)


def _is_transposed(view: View) -> bool:
    """Tell whether a view permutes the axes that its source has, some of them to another place."""
    before, after = _wide(view.source), _wide(view.shape)
    if view.order.is_permuted:
        return (view.order.first, view.order.permuted) == (before, after)
    return before == after and (len(before) < 2 or view.source != view.shape)


def _orders(part: Shape, copy: Shape) -> Iterator[Rearrangement]:
    """Yield the ways to lay out a part: permuted and reshaped, or reshaped and permuted."""
    before, after = _wide(part), _wide(copy)
    orders: set[Rearrangement] = set()
    for axes, is_before in ((before, True), (after, False)):
        is_many = len(axes) > MAX_PERMUTED
        for permutation in [tuple(range(len(axes)))] if is_many else permutations(range(len(axes))):
            first = axes if is_before else tuple(axes[permutation.index(axis)] for axis in range(len(axes)))
            order = Rearrangement(first, permutation)
            if not order.is_permuted:
                order = Rearrangement((math.prod(axes),), (0,))
            if order not in orders:
                orders.add(order)
                yield order


def _wide(shape: Sequence[int]) -> Shape:
    return tuple(size for size in shape if size > 1)


def _parts(source: np.ndarray, copy: np.ndarray, operations: frozenset[str]) -> Iterator[View]:
    """Yield the views of parts whose first elements agree: where they begin, and with which steps."""
    if operations and not operations & SLICING:
        return
    flat, values = source.reshape(-1), copy.reshape(-1)
    beginnings = np.flatnonzero(flat == values[0])
    if len(beginnings) > MAX_PLACES:
        return
    starts = [tuple(int(i) for i in np.unravel_index(place, source.shape)) for place in beginnings]
    arrangements = (
        (lengths, order)
        for lengths in _lengths(source.shape, copy.size)
        for order in _orders(lengths, copy.shape)
    )
    for lengths, order in islice(arrangements, MAX_PARTS):
        seconds = _second_elements(lengths, order, values)
        for start in starts:
            steps = _steps(source, start, lengths, seconds)
            for step in islice(product(*steps), MAX_PLACES):
                yield View(source.shape, start, lengths, step, order, copy.shape)


def _lengths(shape: Shape, count: int) -> Iterator[Shape]:
    """Yield the lengths of parts that have so many elements."""
    if not shape:
        if count == 1:
            yield ()
        return
    for length in range(1, min(shape[0], count) + 1):
        if count % length == 0 and count // length <= math.prod(shape[1:]):
            for rest in _lengths(shape[1:], count // length):
                yield (length, *rest)


def _second_elements(lengths: Shape, order: Rearrangement, values: np.ndarray) -> list[object]:
    """Return what a part's second element along each axis is; None along an axis of one."""
    strides = [math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
    return [
        values[order.places_in_copy(np.array(stride))] if length > 1 else None
        for length, stride in zip(lengths, strides, strict=True)
    ]


def _steps(
    source: np.ndarray, start: Shape, lengths: Shape, seconds: Sequence[object]
) -> list[Sequence[int]]:
    """Return the steps along each axis with which the second element is found."""
    steps: list[Sequence[int]] = []
    for axis, (length, second) in enumerate(zip(lengths, seconds, strict=True)):
        if length == 1:
            steps.append((1,))
            continue
        largest = (source.shape[axis] - 1 - start[axis]) // (length - 1)
        following = slice(start[axis] + 1, start[axis] + 1 + largest)
        place: tuple[int | slice, ...] = (*start[:axis], following, *start[axis + 1 :])
        line = source[place]
        steps.append([int(step) + 1 for step in np.flatnonzero(line == second)])
    return steps


def _are_same(one: View, other: View) -> bool:
    """Tell whether two views of equal shapes take the same elements to the same places."""
    size = math.prod(one.shape)
    chunks = (np.arange(begin, min(begin + CHUNK, size)) for begin in range(0, size, CHUNK))
    return all(np.array_equal(one.places(chunk), other.places(chunk)) for chunk in chunks)
