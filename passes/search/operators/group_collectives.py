"""What the ranks of an operator group do together on a way, and which sums they leave to readers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import onnx_graphsurgeon as gs

from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout, Partial, Placement, Replicate
from partc.passes.layouts.meshes import Meshes
from partc.passes.layouts.reshard import Transfer, reshard
from partc.passes.lowering.local_sizes import LocalSizes

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift"]


@dataclass(frozen=True, slots=True)
class AxisCollective:
    """What the ranks along a mesh axis, or several, do together.

    nbytes  of a rank's tensor, the larger of both ends
    level   how many collectives of its way have to end before it begins
    """

    kind: CollectiveKind
    axes: tuple[int, ...]
    nbytes: int
    level: int


@dataclass(frozen=True, slots=True)
class SumForReaders:
    """A tensor that ranks along mesh axes have terms of: how it is summed depends on who reads it.

    nbytes and level  as in AxisCollective, of the terms
    """

    tensor: int
    axes: tuple[int, ...]
    nbytes: int
    level: int


def terms_left(graph: LaidOutGraph, tensor: str) -> tuple[int, ...]:
    """Return the mesh axes along which ranks have terms of a tensor that the group itself does not sum."""
    layout, summed = graph.layout(tensor), graph.made_whole | graph.summed_anyway
    return tuple(
        axis
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Partial)
        and graph.meshes.size(layout.site, axis) > 1
        and (tensor, axis) not in summed
    )


def computed_reads(graph: LaidOutGraph, nodes: tuple[gs.Node, ...]) -> Iterator[tuple[gs.Tensor, Layout]]:
    """Yield what nodes read that has to be computed, and in which layout."""
    for node in nodes:
        for tensor, layout in zip(node.inputs, graph.decisions[node.name].inputs, strict=True):
            is_known = not tensor.name or graph.facts.fixed_value(tensor.name) is not None
            if not (is_known or isinstance(tensor, gs.Constant) or node.op in ("Shape", "Size")):
                yield tensor, layout


def levels_of(nodes: tuple[gs.Node, ...], joint: set[str]) -> dict[str, int]:
    """Return how many collectives of a way, of the `joint` tensors, have to end before each is there."""
    level: dict[str, int] = {}
    for node in nodes:
        behind = [level[t.name] + (t.name in joint) for t in node.inputs if t.name in level]
        level.update((tensor.name, max(behind, default=0)) for tensor in node.outputs)
    return level


def communicated(
    graph: LaidOutGraph, sizes: LocalSizes, nodes: tuple[gs.Node, ...], awaited: set[str]
) -> Iterator[tuple[str, CollectiveKind, tuple[int, ...], int]]:
    """Yield tensors that are summed or laid out otherwise within the group: how, along which axes, bytes.

    What nobody awaits goes along with gradients.
    """
    results = awaited.intersection(tensor.name for node in nodes for tensor in node.outputs)
    summed: dict[tuple[str, Placement], list[int]] = {}
    for tensor, axis in sorted(graph.made_whole):
        if tensor in results and graph.meshes.size(graph.layout(tensor).site, axis) > 1:
            summed.setdefault((tensor, graph.layout(tensor).along(axis)), []).append(axis)
    for (tensor, _), along in summed.items():
        yield tensor, "all_reduce", tuple(along), sizes.local_nbytes(tensor, graph.layout(tensor))
    seen: set[tuple[str, Transfer]] = set()
    for read, target in computed_reads(graph, nodes):
        for transfer in reshard(graph, read.name, target) if read.name in results else ():
            kind, axes = _collective_of(transfer), _changed_axes(graph.meshes, transfer)
            if kind is None or not axes or (read.name, transfer) in seen:
                continue
            seen.add((read.name, transfer))
            ends = [sizes.local_nbytes(read.name, end) for end in (transfer.source, transfer.target)]
            yield read.name, kind, axes, max(0, ends[1] - ends[0]) if kind == "shift" else max(ends)


def _collective_of(transfer: Transfer) -> CollectiveKind | None:
    """Return what ranks do together in a step of a tensor's way; None: nothing, or a sum of all."""
    match transfer.kind:
        case "ReduceScatter":
            return "reduce_scatter"
        case "AllGather":
            return "all_gather"
        case "Widen":
            is_local = isinstance(transfer.source.along(transfer.axis), Replicate)
            return None if is_local else "shift"
        case "Exchange":
            return "shift" if transfer.target.overlapping() else "all_to_all"
    return None


def _changed_axes(meshes: Meshes, transfer: Transfer) -> tuple[int, ...]:
    source, target = transfer.source, transfer.target
    return tuple(
        axis
        for axis in range(meshes.axes)
        if source.along(axis) != target.along(axis) and meshes.size(target.site, axis) > 1
    )
