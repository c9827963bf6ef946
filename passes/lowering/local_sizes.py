"""How large a rank's piece of a tensor is."""

from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import NamedTuple

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import TensorFacts
from partc.passes.layouts.decisions import Decision
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import (
    WORKER,
    Layout,
    Overlapping,
    Placement,
    Replicate,
    Split,
)
from partc.passes.layouts.meshes import Mesh
from partc.passes.lowering.lowered_graph import FactorPart, Number, PartNumber
from partc.passes.rules.sharding_rules import rule_of
from partc.runtime.plan.program import Site


class LargestPiece(NamedTuple):
    """One rank's piece of a tensor, the largest: its shape, None where it follows the data or the rank."""

    shape: tuple[int | None, ...]
    nbytes: int


class LocalSizes:
    """Sizes of pieces, and of the work on them, as a graph is laid out."""

    def __init__(self, graph: LaidOutGraph) -> None:
        self.graph = graph
        self.facts = graph.facts

    def local_nbytes(self, tensor: str, layout: Layout) -> int:
        """Return the bytes of one rank's piece, the largest, under the assumed sizes."""
        return self.piece(tensor, layout).nbytes

    def local_shape(self, tensor: str, layout: Layout) -> tuple[int | None, ...]:
        """Return the shape of one rank's piece; None where it follows the data or the rank."""
        return self.piece(tensor, layout).shape

    def local_sizes(self, tensor: str, layout: Layout) -> tuple[int, ...]:
        """Return the sizes of one rank's piece under the assumed sizes, UNKNOWN where only data tells.

        Where pieces differ, of the largest.
        """
        return _local_sizes(self.facts.shape(tensor), self.graph.meshes.of(layout.site), layout)

    def piece(self, tensor: str, layout: Layout) -> LargestPiece:
        """Return one rank's piece of a tensor."""
        axes = self.graph.meshes.of(layout.site).axes
        return _piece(self.facts.of(tensor), axes, layout.placements)

    def local_number(self, layout: Layout, axis: int, number: int) -> int | PartNumber:
        """Return what is left of a number of entries of an axis in a rank's piece."""
        return _local_number(self.graph.meshes.of(layout.site), layout, axis, number)

    def part_number(self, tensor: str, layout: Layout, split: Split, mesh_axis: int) -> PartNumber:
        """Return how many entries of its axis an uneven split along one more mesh axis leaves of a piece.

        `layout`: the piece's, as it is before. Blocks before the factor are not counted.
        """
        here = [axis for axis, p in layout.splits() if (p.axis, p.outer) == (split.axis, split.outer)]
        within = (
            p if isinstance(p, Split) and p.outer > split.outer else Replicate() for p in layout.placements
        )
        size = self.facts.shape(tensor)[split.axis] // (split.outer * split.uneven)
        inner = self.local_number(Layout(layout.site, *within), split.axis, size)
        own = FactorPart(split.uneven, (*here, mesh_axis))
        if isinstance(inner, int):
            return PartNumber((own,), inner)
        return PartNumber((own, *inner.parts), inner.times)

    def largest(self, site: Site, number: Number) -> int:
        """Return the largest that a number of a part's entries is on any rank."""
        return _largest(self.graph.meshes.of(site), number)

    def local_flops(self, node: gs.Node, decision: Decision) -> int | None:
        """Return one rank's operations, those of the largest part; None where no rule tells them."""
        rule = rule_of(node, self.facts)
        if rule is None:
            return None
        mesh = self.graph.meshes.of(decision.site)
        divided = [number for number, axis in enumerate(decision.axes) if axis.factor is not None]
        flops = Fraction(rule.flops, prod(map(mesh.size, divided)))
        for part in uneven_parts(decision):
            flops *= _excess(mesh, part)
        return int(flops)


@lru_cache(maxsize=1 << 16)
def _piece(
    tensor: TensorFacts, axes: tuple[tuple[str, int], ...], placements: tuple[Placement, ...]
) -> LargestPiece:
    mesh, layout = Mesh(WORKER, axes), Layout(WORKER, *placements)
    shape = _local_shape(tensor, mesh, layout)
    nbytes = Fraction(tensor.nbytes)
    if shape:
        nbytes /= mesh.share(layout)
    for factor in layout.uneven():
        nbytes *= _excess(mesh, FactorPart(factor.entries, factor.mesh_axes))
    for _, widened in layout.widened():
        local = _local_sizes(tensor.shape, mesh, layout)[widened.axis]
        nbytes *= Fraction(local, tensor.shape[widened.axis])
    for _, overlapping in layout.overlapping():
        nbytes *= Fraction(_longest(overlapping), overlapping.size)
    return LargestPiece(shape, int(nbytes))


def _local_shape(tensor: TensorFacts, mesh: Mesh, layout: Layout) -> tuple[int | None, ...]:
    if not tensor.has_fixed_shape:
        return tuple(None for _ in tensor.shape)
    shape: list[int | None] = [size or None for size in _local_sizes(tensor.shape, mesh, layout)]
    for axis in layout.varying():
        shape[axis] = None
    return tuple(shape)


def _local_sizes(sizes: tuple[int, ...], mesh: Mesh, layout: Layout) -> tuple[int, ...]:
    local = [size // mesh.parts(layout, axis) for axis, size in enumerate(sizes)]
    for axis in {factor.axis for factor in layout.uneven()}:
        local[axis] = _largest(mesh, _local_number(mesh, layout, axis, sizes[axis]))
    for mesh_axis, widened in layout.widened():
        part = sizes[widened.axis] // mesh.size(mesh_axis)
        local[widened.axis] = widened.before + part + widened.after
    for _, overlapping in layout.overlapping():
        local[overlapping.axis] = _longest(overlapping)
    return tuple(local)


def _local_number(mesh: Mesh, layout: Layout, axis: int, number: int) -> int | PartNumber:
    uneven = tuple(FactorPart(f.entries, f.mesh_axes) for f in layout.uneven() if f.axis == axis)
    parts = mesh.parts(layout, axis) // prod(mesh.size(a) for part in uneven for a in part.mesh_axes)
    entries = prod(part.entries for part in uneven)
    assert number % (entries * parts) == 0, f"{number} entries of an axis are cut by {layout}"
    each = number // (entries * parts)
    return PartNumber(uneven, each) if uneven and number else each


def _largest(mesh: Mesh, number: Number) -> int:
    return number if isinstance(number, int) else number.of([0] * len(mesh.axes), mesh)


def _excess(mesh: Mesh, part: FactorPart) -> Fraction:
    """Return what the largest part has of the mean."""
    largest = _largest(mesh, PartNumber((part,), 1))
    return Fraction(largest * prod(map(mesh.size, part.mesh_axes)), part.entries)


def _longest(overlapping: Overlapping) -> int:
    return max(stop - start for start, stop in overlapping.ranges)


def uneven_parts(decision: Decision) -> tuple[FactorPart, ...]:
    """Return the parts of different sizes that a decision cuts factors into, by the axes that do."""
    return tuple(FactorPart(entries, axes) for entries, axes in decision.uneven)
