"""How large a rank's piece of a tensor is."""

from fractions import Fraction
from math import prod

import onnx_graphsurgeon as gs

from partc.passes.layouts.decide_layouts import Decision
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import REPLICAS, Layout, Overlapping, Owned
from partc.passes.lowering.lowered_graph import Number, PartNumber
from partc.passes.rules.sharding_rules import rule_of
from partc.runtime.plan.program import Site


class LocalSizes:
    """Sizes of pieces, and of the work on them, as a graph is laid out."""

    def __init__(self, graph: LaidOutGraph) -> None:
        self.graph = graph
        self.facts = graph.facts

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
        for _, overlapping in layout.overlapping():
            nbytes *= Fraction(_longest(overlapping), overlapping.size)
        return int(nbytes)

    def local_shape(self, tensor: str, layout: Layout) -> tuple[int | None, ...]:
        """Return the shape of one rank's piece; None where it follows the data or the rank."""
        if tensor not in self.facts.fixed_shapes:
            return tuple(None for _ in self.facts.shape(tensor))
        shape: list[int | None] = [size or None for size in self.local_sizes(tensor, layout)]
        if isinstance(layout.along(REPLICAS), Owned):
            shape[0] = None
        for axis in layout.varying():
            shape[axis] = None
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
        for _, overlapping in layout.overlapping():
            local[overlapping.axis] = _longest(overlapping)
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

    def local_flops(self, node: gs.Node, decision: Decision) -> int | None:
        """Return one rank's operations, those of the largest part; None where no rule tells them."""
        rule = rule_of(node, self.facts)
        if rule is None:
            return None
        mesh = self.graph.meshes.of(decision.site)
        divided = [number for number, axis in enumerate(decision.axes) if axis.factor is not None]
        flops = Fraction(rule.flops, prod(map(mesh.size, divided)))
        for axis, entries in uneven_factors(decision).items():
            flops *= Fraction(mesh.size(axis) * -(-entries // mesh.size(axis)), entries)
        return int(flops)


def _longest(overlapping: Overlapping) -> int:
    return max(stop - start for start, stop in overlapping.ranges)


def uneven_factors(decision: Decision) -> dict[int, int]:
    """Return the factors that are cut into parts of different sizes: mesh axis -> entries."""
    layouts = (*decision.inputs, *decision.outputs)
    return {axis: split.uneven for layout in layouts for axis, split in layout.uneven()}
