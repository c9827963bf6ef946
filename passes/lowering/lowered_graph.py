"""The distributed step as one graph: what each site computes, joined by communications.

Compute nodes are standard ONNX and belong to one site, whose ranks all run them on their own
pieces. Communication nodes have domain `partc.communication`:

    AllReduce        partial -> whole, along an axis of a mesh            (two levels: host, global)
    ReduceScatter    partial -> pieces of any axis, along an axis of a mesh; `cut` tells where
    AllGather        pieces -> whole, likewise
    Push             worker partials -> the rows that each server owns, summed
    Pull             the rows that each server owns -> whole on all workers
    ToServers        whole on workers -> whole on servers
    ToWorkers        whole on servers -> whole on workers
    ShiftAhead       a strip to the member behind, along an axis of the workers' mesh; ShiftBack: before
    AllGatherRows    pieces along axis 0 -> whole along an axis of the workers' mesh, and their sizes
    GatherRows       what a host's workers have -> one behind the other on the host's server, and sizes
    ScatterRows      the reverse, by sizes
    AllToAllRows     servers exchange rows by owner, and sizes
    ShareRows        pieces along axis 0 of the servers -> whole on all servers, and sizes
    SpreadRows       whole on servers -> whole on their hosts' workers, whatever its size
    FeedRows         whole on workers -> whole on servers, whatever its size
    ToStage          what each rank of a mesh has -> the rank at its place in another mesh
    RowsToStage      the same, whatever its size

Along micro-batches no message goes: AllReduce and AllGather there are what a rank does with all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.passes.layouts.decisions import Decision
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import Site
from partc.runtime.plan.record import Range

COMMUNICATION_DOMAIN = "partc.communication"
_COLLECTIVE = frozenset({"AllReduce", "ReduceScatter", "AllGather", "AllGatherRows"})

ConstantEntries = list[int] | list[float] | int | float


@dataclass(frozen=True, slots=True)
class State:
    """A variable held at a site: the value that holds it and the value that succeeds it."""

    variable: str
    site: Site
    value: str
    next: str


@dataclass(frozen=True, slots=True)
class FactorPart:
    """A rank's part of a factor's entries: each of the mesh axes divides what those before it left."""

    entries: int
    mesh_axes: tuple[int, ...]

    def range_at(self, place: Sequence[int], mesh: Mesh) -> Range:
        """Return the entries that a place has, counted from the first that the axes before the last left."""
        start, stop = 0, self.entries
        for axis in self.mesh_axes:
            start, stop = part_range(stop - start, mesh.size(axis), place[axis])
        return start, stop


@dataclass(frozen=True, slots=True)
class PartNumber:
    """A number that a rank's part of a tensor's axis tells: its size, its first entry or the one behind.

    The axis has the entries of all `parts` multiplied, `times`; of the first part start and end are told.
    """

    parts: tuple[FactorPart, ...]
    times: int
    tells: Literal["size", "start", "stop"] = "size"

    @property
    def mesh_axes(self) -> tuple[int, ...]:
        """Return the axes of the mesh along which it differs."""
        return tuple(axis for part in self.parts for axis in part.mesh_axes)

    def of(self, place: Sequence[int], mesh: Mesh) -> int:
        """Return the number of the rank at a place of the mesh."""
        (start, stop), *others = (part.range_at(place, mesh) for part in self.parts)
        own = {"size": stop - start, "start": start, "stop": stop}[self.tells]
        return self.times * own * prod(last - first for first, last in others)


@dataclass(frozen=True, slots=True)
class PlaceNumber:
    """A number for every place along a mesh axis."""

    axis: int
    by_place: tuple[int, ...]

    @property
    def mesh_axes(self) -> tuple[int, ...]:
        """Return the axis of the mesh along which it differs."""
        return (self.axis,)

    def of(self, place: Sequence[int], mesh: Mesh) -> int:
        """Return the number of the rank at a place of the mesh."""
        assert mesh.size(self.axis) == len(self.by_place), f"{self.by_place} on {mesh}"
        return self.by_place[place[self.axis]]


Number = int | PartNumber | PlaceNumber  # the same on all ranks, or not


@dataclass(frozen=True, slots=True)
class PieceCut:
    """Where a rank's tensor is cut into pieces along an axis of a mesh.

    The factor of `axis` behind `blocks` is divided: its length evenly, or its `entries` as `part_range` says.
    """

    axis: int
    blocks: int = 1
    entries: int = 0  # 0: as many as the factor is long


@dataclass(frozen=True, slots=True)
class RankConstant:
    """What a value int64[n] tells each rank of its place.

    coordinate   its position along an axis of a mesh, `site` None: of the only one that it is in
    numbers      `numbers`, those of its part along axes of the mesh `site` among them
    first_row    the first row of a parameter that it owns, and how many: `row_count`
    row_ends     of a parameter, the end of every server's rows: the same on all ranks
    """

    holds: Literal["coordinate", "numbers", "first_row", "row_count", "row_ends"]
    parameter: str | None = None
    axis: int = 0
    site: Site | None = None
    numbers: tuple[Number, ...] = ()

    @property
    def mesh_axes(self) -> frozenset[int]:
        """Return the axes of a mesh along which it differs."""
        if self.holds == "coordinate":
            return frozenset({self.axis})
        return frozenset(axis for n in self.numbers if not isinstance(n, int) for axis in n.mesh_axes)

    def numbers_at(self, place: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the numbers of the rank at a place of the mesh, which has an index for every axis."""
        return tuple(n if isinstance(n, int) else n.of(place, mesh) for n in self.numbers)


# How values that hold a place are named; behind the parameter, where it is a parameter's.
_PLACE_NAMES = {"first_row": "first", "row_count": "rows", "row_ends": "ends"}


@dataclass
class LoweredGraph:
    """Compute and communication nodes in a topological order."""

    meshes: Meshes
    nodes: list[gs.Node] = field(default_factory=list)
    site_of: dict[str, Site] = field(default_factory=dict)  # compute node -> site
    native: dict[str, Layout] = field(default_factory=dict)  # original tensor -> layout
    decisions: dict[str, Decision] = field(default_factory=dict)  # original node -> how it runs
    meanings: dict[str, tuple[str, Layout]] = field(default_factory=dict)  # value -> original tensor
    states: list[State] = field(default_factory=list)
    outputs: list[tuple[str, str, Layout]] = field(default_factory=list)  # (name, value, layout)
    shapes: dict[str, tuple[int | None, ...]] = field(default_factory=dict)  # one rank's; None: varies
    nbytes: dict[str, int] = field(default_factory=dict)  # one rank's share, expected
    flops: dict[str, int] = field(default_factory=dict)  # compute node -> one rank's operations
    original: dict[str, str] = field(default_factory=dict)  # compute node -> the node it stands for
    asked_with: dict[str, tuple[str, ...]] = field(default_factory=dict)  # lookup -> others of its request
    functions: dict[str, onnx.FunctionProto] = field(default_factory=dict)  # by name, those of parts too
    constants: dict[str, RankConstant] = field(default_factory=dict)  # value -> what each rank is given
    _emitted: dict[str, gs.Variable] = field(default_factory=dict)

    def emit(
        self,
        op: str,
        inputs: list[gs.Tensor],
        output: str,
        dtype: np.dtype,
        site: Site,
        **attributes: object,
    ) -> gs.Variable:
        """Append a compute node with one output, unless it was emitted before; return the output."""
        if output not in self._emitted:
            self._emitted[output] = gs.Variable(output, dtype=dtype)
            node = gs.Node(op, f"{output}.node", attributes, inputs, [self._emitted[output]])
            self.append(node, site)
        assert self.site_of[f"{output}.node"] == site, f"{output} is made at two sites"
        return self._emitted[output]

    def coordinate(self, site: Site | None, axis: int, name: str) -> gs.Variable:
        """Return the value int64[1], named so, that holds a worker's position along an axis of a mesh."""
        return self._given(name, RankConstant("coordinate", axis=axis, site=site), (1,))

    def numbers(self, site: Site, numbers: tuple[Number, ...]) -> gs.Variable:
        """Return the value int64[n] that holds numbers of which some follow a worker's place in a mesh."""
        mesh = self.meshes.of(site)
        spelled = "_".join(str(n) if isinstance(n, int) else _spell(n, mesh) for n in numbers)
        constant = RankConstant("numbers", site=site, numbers=numbers)
        return self._given(f"{site}.parts.{spelled}", constant, (len(numbers),))

    @property
    def moment_constants(self) -> dict[str, RankConstant]:
        """Return the constants that each micro-batch has of its own."""
        axis = self.meshes.microbatch_axis
        return {name: constant for name, constant in self.constants.items() if axis in constant.mesh_axes}

    def first_row(self, parameter: str) -> gs.Variable:
        """Return the value int64[1] that holds the first row of a parameter that a server owns."""
        return self._given_rows(RankConstant("first_row", parameter), parameter, (1,))

    def row_count(self, parameter: str) -> gs.Variable:
        """Return the value int64[1] that holds how many rows of a parameter a server owns."""
        return self._given_rows(RankConstant("row_count", parameter), parameter, (1,))

    def row_ends(self, parameter: str) -> gs.Variable:
        """Return the value int64[servers] that holds where each server's rows of a parameter end."""
        return self._given_rows(RankConstant("row_ends", parameter), parameter, (None,))

    def _given_rows(
        self, constant: RankConstant, parameter: str, shape: tuple[int | None, ...]
    ) -> gs.Variable:
        return self._given(f"{parameter}.{_PLACE_NAMES[constant.holds]}", constant, shape)

    def _given(self, name: str, constant: RankConstant, shape: tuple[int | None, ...]) -> gs.Variable:
        self.constants[name] = constant
        self.shapes[name] = shape
        return gs.Variable(name, dtype=np.dtype(np.int64))

    def is_in_rows(self, value: str) -> bool:
        """Tell whether servers have a value by the rows of a parameter."""
        meaning = self.meanings.get(value)
        return meaning is not None and bool(meaning[1].rows_of)

    def append(self, node: gs.Node, site: Site) -> None:
        """Append a compute node."""
        self.nodes.append(node)
        self.site_of[node.name] = site

    def communicate(
        self,
        op: str,
        values: list[gs.Tensor],
        results: list[gs.Variable],
        *,
        counts: gs.Tensor | None = None,
        received_counts: gs.Variable | None = None,
        **attributes: Any,
    ) -> None:
        """Append a communication node: of `values`, and of how many rows go to and come from each member.

        A worker that is alone along the axes of a collective has the result.
        """
        if op in _COLLECTIVE and self._is_alone(attributes):
            self._keep(values, results, received_counts, attributes["site"])
            return
        inputs = values if counts is None else [*values, counts]
        outputs = results if received_counts is None else [*results, received_counts]
        attributes["values"] = len(values)
        name = f"{op}.{outputs[0].name}"
        self.nodes.append(gs.Node(op, name, attributes, inputs, outputs, domain=COMMUNICATION_DOMAIN))

    def _is_alone(self, attributes: Mapping[str, Any]) -> bool:
        site = attributes["site"]
        if site == "server" or attributes.get("to", site) != site:
            return False  # how many servers there are is not known yet
        return prod(self.meshes.size(site, axis) for axis in attributes["axes"]) == 1

    def _keep(
        self,
        values: list[gs.Tensor],
        results: list[gs.Variable],
        counts: gs.Variable | None,
        site: Site,
    ) -> None:
        """Let the only member of a group have what it gives; `counts`: the rows of it."""
        nodes: list[tuple[str, gs.Tensor, gs.Variable, dict[str, int]]]
        nodes = [("Identity", *pair, {}) for pair in zip(values, results, strict=True)]
        if counts is not None:
            nodes.append(("Shape", values[0], counts, {"start": 0, "end": 1}))
        for op, value, result, attributes in nodes:
            self.append(gs.Node(op, f"{result.name}.node", attributes, [value], [result]), site)

    def prune(self) -> None:
        """Delete nodes whose results nobody reads."""
        leading = {state.next for state in self.states} | {value for _, value, _ in self.outputs}
        needed: list[gs.Node] = []
        for node in reversed(self.nodes):
            if any(tensor.name in leading for tensor in node.outputs):
                leading.update(tensor.name for tensor in node.inputs)
                needed.append(node)
        self.nodes = needed[::-1]


def _spell(number: PartNumber | PlaceNumber, mesh: Mesh) -> str:
    if isinstance(number, PlaceNumber):
        return f"{mesh.axes[number.axis][0]}.at." + ".".join(map(str, number.by_place))
    axes = ("*".join(mesh.axes[axis][0] for axis in part.mesh_axes) for part in number.parts)
    sizes = "x".join(str(part.entries) for part in number.parts)
    return f"{'.'.join(axes)}.{number.tells}.{sizes}x{number.times}"


def is_communication(node: gs.Node) -> bool:
    """Tell whether a node moves data between ranks."""
    return bool(node.domain == COMMUNICATION_DOMAIN)


def constant(
    name: str, values: "list[int] | list[float] | int | float", dtype: "type | np.dtype"
) -> gs.Constant:
    """Return a small constant tensor."""
    return gs.Constant(name, np.array(values, dtype=dtype))
