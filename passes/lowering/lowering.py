"""What has been lowered so far, and what a rule may ask for: the record that all of lowering shares."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper

from partc.passes.indexed_rows.expected_rows import ExpectedRows
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import (
    MICROBATCHES,
    REPLICAS,
    Gathered,
    Layout,
    Owned,
    Partial,
    PerReplica,
    Placement,
    Replicate,
    RequestedRows,
    Split,
    Widened,
)
from partc.passes.lowering.lowered_graph import LoweredGraph, Number, PartNumber, constant
from partc.runtime.plan.program import Site

INT64 = np.dtype(np.int64)

TAGS = {
    Replicate: "whole",
    Split: "split",
    Partial: "partial",
    Widened: "wide",
    PerReplica: "replica",
    Owned: "owned",
    Gathered: "gathered",
    RequestedRows: "asked",
}


@dataclass(frozen=True)
class RowRequest:
    """One Gather's ids on their way, and how their rows find the way back."""

    ids: gs.Tensor  # as the worker has them, any shape
    inverse: gs.Variable  # worker: position of each id among those it sent
    host_inverse: gs.Variable  # server: position of each worker's id among the host's
    host_counts: gs.Variable  # server: ids of each worker
    wanted_counts: gs.Variable  # owner: ids of each server
    share: float  # of one worker's ids of the table that are this Gather's
    drawn: float  # ids of one worker


class Lowering(ABC):
    """The distributed step as far as it is made; `need` makes more."""

    def __init__(self, graph: LaidOutGraph, expected: Mapping[str, ExpectedRows], sessions: bool) -> None:
        self.graph = graph
        self.sessions = sessions
        self.expected = expected
        self.facts = graph.facts
        self.out = LoweredGraph(graph.meshes)
        self.exchanged: dict[str, tuple[gs.Variable, gs.Variable]] = {}
        self.reduced: dict[str, gs.Variable] = {}
        self.row_requests: dict[str, RowRequest] = {}  # Gather -> its ids on their way
        self.gathered: dict[str, gs.Variable] = {}  # parameter -> how many slices each server owns
        self._tensors = graph.training.graph.tensors()

    @abstractmethod
    def need(self, tensor: str, layout: Layout) -> gs.Tensor:
        """Return the value that holds `tensor` in `layout`, making it if it was not made yet."""

    @abstractmethod
    def split_locally(self, tensor: str, layout: Layout, axis: int) -> gs.Tensor | None:
        """Make a part along a mesh axis of a tensor that is whole there by making its operands' parts,
        if a rule allows."""

    def source(self, tensor: str) -> gs.Tensor:
        """Return the original tensor."""
        return self._tensors[tensor]

    def native(self, tensor: str, site: Site) -> Layout:
        """Return how a tensor is there before it is asked for: constants and what is fed, on all workers.

        A replica's batch is fed at once, and divided into micro-batches as they are read. A mesh whose ranks
        are fed for other places than those that they have there is sent its batch.
        """
        native, source = self.graph.layout(tensor), self.source(tensor)
        is_made = source.inputs and self.facts.fixed_value(tensor) is None
        if is_made or tensor in self.graph.training.variables or site == "server":
            return native
        axis, meshes = self.graph.meshes.microbatch_axis, self.graph.meshes
        fed = native if axis is None else native.with_along(axis, Replicate())
        is_there = fed.is_whole or meshes.is_fed(site)
        return Layout(site if is_there else meshes.sites[0], *fed.placements)

    def coordinate(self, site: Site, axis: int) -> gs.Variable:
        """Return the value int64[1] that holds a worker's position along an axis of a mesh."""
        meshes = self.graph.meshes
        if axis == meshes.microbatch_axis:
            return self.out.coordinate(None, axis, MICROBATCHES)
        name = meshes.of(site).axes[axis][0]
        if not meshes.are_apart:  # one worker may have several places
            return self.out.coordinate(site, axis, f"{site}.{name}")
        return self.out.coordinate(None, axis, "replica" if axis == REPLICAS else f"worker.{name}")

    def value_name(self, tensor: str, layout: Layout) -> str:
        """Name the value that holds a tensor in a layout, and remember what it means."""
        native = self.native(tensor, layout.site)
        name = tensor if layout == native else f"{tensor}@{layout.site}.{tag(layout)}"
        self.describe(name, tensor, layout)
        return name

    def describe(self, value: str, tensor: str, layout: Layout) -> None:
        """Remember what a value means, and how large it is."""
        self.out.meanings[value] = (tensor, layout)
        self.out.shapes[value] = self.local_shape(tensor, layout)
        self.out.nbytes[value] = self.local_nbytes(tensor, layout)

    def local_nbytes(self, tensor: str, layout: Layout) -> int:
        """Return the bytes of one rank's piece, the largest, under the assumed sizes."""
        nbytes = Fraction(self.facts.nbytes(tensor))
        if self.local_shape(tensor, layout):
            nbytes /= self.graph.meshes.of(layout.site).share(layout)
        for axis, split in layout.uneven():
            parts = self.graph.meshes.size(layout.site, axis)
            nbytes *= Fraction(parts * -(-split.uneven // parts), split.uneven)
        for _, widened in layout.widened():
            local = self.local_sizes(tensor, layout)[widened.axis]
            nbytes *= Fraction(local, self.facts.shape(tensor)[widened.axis])
        return int(nbytes)

    def local_shape(self, tensor: str, layout: Layout) -> tuple[int | None, ...]:
        """Return the shape of one rank's piece; None where it follows the data or the rank."""
        if tensor not in self.facts.fixed_shapes:
            return tuple(None for _ in self.facts.shape(tensor))
        shape: list[int | None] = [size or None for size in self.local_sizes(tensor, layout)]
        if isinstance(layout.along(REPLICAS), Owned):
            shape[0] = None
        for _, split in layout.uneven():
            shape[split.axis] = None
        return tuple(shape)

    def local_sizes(self, tensor: str, layout: Layout) -> tuple[int, ...]:
        """Return the sizes of one rank's piece under the assumed sizes, UNKNOWN where only data tells.

        Where pieces differ, of the largest.
        """
        sizes, mesh = self.facts.shape(tensor), self.graph.meshes.of(layout.site)
        local = [size // mesh.parts(layout, axis) for axis, size in enumerate(sizes)]
        for _, split in layout.uneven():
            local[split.axis] = self.largest(
                layout.site, self.local_number(layout, split.axis, sizes[split.axis])
            )
        for mesh_axis, widened in layout.widened():
            part = sizes[widened.axis] // self.graph.meshes.size(layout.site, mesh_axis)
            local[widened.axis] = widened.before + part + widened.after
        return tuple(local)

    def local_number(self, layout: Layout, axis: int, number: int) -> Number:
        """Return what is left of a number of entries of an axis in a rank's piece."""
        mesh = self.graph.meshes.of(layout.site)
        uneven = [(a, split.uneven) for a, split in layout.uneven() if split.axis == axis]
        parts = mesh.parts(layout, axis) // prod(mesh.size(a) for a, _ in uneven)
        entries = uneven[0][1] if uneven else 1
        assert number % (entries * parts) == 0, f"{number} entries of an axis are cut by {layout}"
        each = number // (entries * parts)
        return PartNumber(uneven[0][0], entries, each) if uneven and number else each

    def largest(self, site: Site, number: Number) -> int:
        """Return the largest that a number is on any rank."""
        return number if isinstance(number, int) else number.of(0, self.graph.meshes.size(site, number.axis))

    def numbers(self, name: str, numbers: Sequence[Number], site: Site, dtype: np.dtype = INT64) -> gs.Tensor:
        """Return the tensor of one axis that holds numbers, on each rank those of its parts."""
        plain = [number for number in numbers if isinstance(number, int)]
        if len(plain) == len(numbers):
            return constant(name, plain, dtype)
        value = self.out.numbers(site, tuple(numbers))
        if dtype == INT64:
            return value
        to = int(helper.np_dtype_to_tensor_dtype(dtype))
        return self.out.emit("Cast", [value], f"{name}@{site}", dtype, site, to=to)


def tag(layout: Layout) -> str:
    """Return what distinguishes the name of a value in a layout."""
    return "-".join(_tag_along(placement) for placement in layout.placements or (Replicate(),))


def _tag_along(placement: Placement) -> str:
    tag = TAGS[type(placement)]
    if isinstance(placement, Widened):
        kind = "" if placement.fill == "zero" else placement.fill
        return f"{tag}{placement.axis}.{placement.before}.{placement.after}{kind}"
    if isinstance(placement, Split):
        uneven = f".{placement.uneven}" if placement.uneven else ""
        return f"{tag}{placement.axis}.{placement.outer}{uneven}"
    return tag
