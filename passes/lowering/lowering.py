"""What has been lowered so far, and what a rule may ask for: the record that all of lowering shares."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.operation_builder import onnx_number
from partc.passes.indexed_rows.expected_rows import ExpectedRows
from partc.passes.indexed_rows.indexed_slices import functions_of
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import (
    MICROBATCHES,
    REPLICAS,
    Layout,
    Overlapping,
    OwnRows,
    Partial,
    PerReplica,
    Placement,
    Replicate,
    RequestedRows,
    Split,
    Widened,
)
from partc.passes.lowering.local_sizes import LocalSizes
from partc.passes.lowering.lowered_graph import LoweredGraph, Number, constant
from partc.runtime.plan.program import Site

INT64 = np.dtype(np.int64)

TAGS = {
    Replicate: "whole",
    Split: "split",
    Partial: "partial",
    Widened: "wide",
    Overlapping: "overlap",
    OwnRows: "own",
    PerReplica: "replica",
    RequestedRows: "asked",
}


@dataclass(frozen=True)
class RowRequest:
    """One Gather's ids on their way, maybe with those of others, and how their rows find the way back."""

    ids: gs.Tensor  # as the worker has them, any shape
    inverse: gs.Variable  # worker: position of each id among those it sent
    host_inverse: gs.Variable  # server: position of each worker's id among the host's
    host_counts: gs.Variable  # server: ids of each worker
    requested_counts: gs.Variable  # owner: ids of each server
    share: float  # of one worker's ids of the table that are asked for at once
    drawn: float  # of these, ids of one worker
    rows: gs.Variable  # owner: what was asked for at once


class Lowering(LocalSizes, ABC):
    """The distributed step as far as it is made; `need` makes more."""

    def __init__(self, graph: LaidOutGraph, expected: Mapping[str, ExpectedRows], sessions: bool) -> None:
        super().__init__(graph)
        self.sessions = sessions
        self.expected = expected
        self.out = LoweredGraph(graph.meshes, functions=functions_of(graph.training))
        self.exchanged: dict[str, tuple[gs.Variable, gs.Variable]] = {}
        self.reduced: dict[str, gs.Variable] = {}
        self.row_requests: dict[str, RowRequest] = {}  # Gather -> its ids on their way
        self.returned: dict[str, gs.Variable] = {}  # rows on their owners -> the same back on the workers
        self.gathered: dict[str, gs.Variable] = {}  # parameter -> how many slices each server owns
        self._tensors = graph.training.graph.tensors()

    @abstractmethod
    def need(self, tensor: str, layout: Layout) -> gs.Tensor:
        """Return the value that holds `tensor` in `layout`, making it if it was not made yet."""

    @abstractmethod
    def make_in_order(self, tensors: Iterable[str]) -> None:
        """Lower from first to last what tensors, as they are natively, come from: need() recurses little."""

    @abstractmethod
    def comes_of_data(self, tensor: str) -> bool:
        """Tell whether a tensor is made of data alone, and of no sum of parts."""

    @abstractmethod
    def split_locally(self, tensor: str, layout: Layout, axis: int) -> gs.Tensor | None:
        """Make a part along a mesh axis of a tensor that is whole there by making its operands' parts,
        if a rule allows."""

    @abstractmethod
    def join_locally(self, tensor: str, layout: Layout, axis: int) -> gs.Tensor | None:
        """Make a tensor that is in parts along a mesh axis whole there of what was gathered before,
        if it rearranges that."""

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

    def numbers(self, name: str, numbers: Sequence[Number], site: Site, dtype: np.dtype = INT64) -> gs.Tensor:
        """Return the tensor of one axis that holds numbers, on each rank those of its parts."""
        plain = [number for number in numbers if isinstance(number, int)]
        if len(plain) == len(numbers):
            return constant(name, plain, dtype)
        value = self.out.numbers(site, tuple(numbers))
        if dtype == INT64:
            return value
        return self.out.emit("Cast", [value], f"{name}@{site}", dtype, site, to=onnx_number(dtype))


def tag(layout: Layout) -> str:
    """Return what distinguishes the name of a value in a layout."""
    return "-".join(_tag_along(placement) for placement in layout.placements or (Replicate(),))


def _tag_along(placement: Placement) -> str:
    tag = TAGS[type(placement)]
    if isinstance(placement, Widened):
        kind = "" if placement.fill == "zero" else placement.fill
        return f"{tag}{placement.axis}.{placement.before}.{placement.after}{kind}"
    if isinstance(placement, Overlapping):
        kind = "" if placement.fill == "zero" else placement.fill
        ranges = "_".join(f"{start}:{stop}" for start, stop in placement.ranges)
        return f"{tag}{placement.axis}.{ranges}{kind}"
    if isinstance(placement, Split) and placement.rows_of:
        return "owned"
    if isinstance(placement, Split):
        uneven = f".{placement.uneven}" if placement.uneven else ""
        return f"{tag}{placement.axis}.{placement.outer}{uneven}"
    return tag
