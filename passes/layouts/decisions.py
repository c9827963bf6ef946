"""How one node runs along each axis of its mesh, and whether its tensors can be cut so."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import TensorFacts
from partc.passes.layouts.layouts import Layout, Overlapping, Partial, Placement, Replicate, Split, Widened
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.rules.sharding_rules import NodeFacts
from partc.runtime.plan.program import Site


@dataclass(frozen=True, slots=True)
class AxisDecision:
    """How one node runs along one mesh axis: what its operands must be there, what its outputs are.

    `factor` is the split factor if one is, `entries` its size, where another axis may split it too; `is_mean`
    tells that outputs are means over a part and count for a part's share only; `cuts_table`, that ids of the
    whole index a part of a table's rows. `is_summed`: outputs are parts of sums of what the op makes.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str | None = None
    is_mean: bool = False
    cuts_table: bool = False
    entries: int = 0
    is_summed: bool = False

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing is divided."""
        if self.factor is not None or self.cuts_table:
            return False
        return all(isinstance(placement, Replicate) for placement in (*self.inputs, *self.outputs))

    @property
    def is_even(self) -> bool:
        """Tell whether nothing is divided but into equal parts, without neighbours' entries."""
        return not any(
            placement.uneven if isinstance(placement, Split) else isinstance(placement, Widened | Overlapping)
            for placement in (*self.inputs, *self.outputs)
        )


@dataclass(frozen=True)
class Decision:
    """How one node runs: on which mesh, and how along each of its axes."""

    site: Site
    axes: tuple[AxisDecision, ...]

    @cached_property
    def inputs(self) -> tuple[Layout, ...]:
        """What the operands must be."""
        return tuple(Layout(self.site, *along) for along in zip(*(a.inputs for a in self.axes), strict=True))

    @cached_property
    def outputs(self) -> tuple[Layout, ...]:
        """What the outputs are."""
        return tuple(Layout(self.site, *along) for along in zip(*(a.outputs for a in self.axes), strict=True))

    @cached_property
    def made(self) -> tuple[Layout, ...]:
        """What the op itself makes, before ranks take their parts of sums of it."""
        if not any(axis.is_summed for axis in self.axes):
            return self.outputs
        along = [[Partial("sum")] * len(a.outputs) if a.is_summed else a.outputs for a in self.axes]
        return tuple(Layout(self.site, *placements) for placements in zip(*along, strict=True))

    @cached_property
    def uneven(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The entries of factors whose parts have different sizes, and the axes that cut them."""
        layouts = (*self.inputs, *self.outputs)
        entries_of = {factor.mesh_axes: factor.entries for layout in layouts for factor in layout.uneven()}
        return tuple((entries, axes) for axes, entries in entries_of.items())


def decide_one_axis(site: Site, inputs: Sequence[Placement], outputs: Sequence[Placement]) -> Decision:
    """Return the decision of a node that only the first mesh axis divides."""
    return Decision(site, (AxisDecision(tuple(inputs), tuple(outputs)),))


def decide_axes(mesh: Mesh, axes: Sequence[AxisDecision]) -> Decision:
    """Return the decision that runs a node along every mesh axis as decided there."""
    divided = [number for number, axis in enumerate(axes) if not axis.is_whole]
    return Decision(mesh.name, _nested(mesh, axes[: max(divided, default=0) + 1]))


def _nested(mesh: Mesh, axes: Sequence[AxisDecision]) -> tuple[AxisDecision, ...]:
    """Let axes that split one factor each divide what those before them left."""
    factors = [axis.entries for axis in axes]
    parts = prod(mesh.size(number) for number, entries in enumerate(factors) if entries)
    if all(axis.is_even and axis.entries % parts == 0 for axis in axes if axis.entries):
        return tuple(axes)
    inputs = [mesh.nest([axis.inputs[n] for axis in axes], factors) for n in range(len(axes[0].inputs))]
    outputs = [mesh.nest([axis.outputs[n] for axis in axes], factors) for n in range(len(axes[0].outputs))]
    return tuple(
        replace(
            axis,
            inputs=tuple(placements[number] for placements in inputs),
            outputs=tuple(placements[number] for placements in outputs),
        )
        for number, axis in enumerate(axes)
    )


def whole_axis(node: gs.Node | NodeFacts) -> AxisDecision:
    """Run the node on tensors that are whole along an axis."""
    return _whole(len(node.inputs), len(node.outputs))


@lru_cache(maxsize=1 << 10)
def _whole(inputs: int, outputs: int) -> AxisDecision:
    return AxisDecision((Replicate(),) * inputs, (Replicate(),) * outputs)


def axes_up_to(axis: int, node: gs.Node, decision: Decision) -> list[AxisDecision]:
    """Return how a decided node runs along each axis up to one, and beyond where it is decided there."""
    return [*decision.axes, *(whole_axis(node) for _ in range(axis + 1 - len(decision.axes)))]


def run_whole(node: gs.Node | NodeFacts, site: Site) -> Decision:
    """Run the node on whole tensors."""
    return _run_whole(site, whole_axis(node))


@lru_cache(maxsize=1 << 10)
def _run_whole(site: Site, axis: AxisDecision) -> Decision:
    return Decision(site, (axis,))


def divides(mesh: Mesh | Meshes, node: NodeFacts, decision: Decision) -> bool:
    """Tell whether the axes of the mesh together can cut what a node reads and writes.

    Into parts of different sizes only where all sizes are known; of a table's rows, where theirs is.
    """
    if has_open_parts(node, decision):
        return False
    pairs = _with_layouts(node, decision)
    shared = [f.mesh_axes for _, layout in pairs for f in layout.uneven() if len(f.mesh_axes) > 1]
    if not all(decision.axes[axis].entries for axes in shared for axis in axes):
        return False  # what windows reach for is told of parts along one axis
    return all(mesh.divides(layout, tensor.shape) for tensor, layout in pairs)


def has_open_parts(node: NodeFacts, decision: Decision) -> bool:
    """Tell whether parts would be of different sizes, while a size of the node is not known."""
    varying = [tensor for tensor, layout in _with_layouts(node, decision) if layout.varying()]
    is_known = _has_known_sizes(node) or (
        any(axis.cuts_table for axis in decision.axes) and all(tensor.has_fixed_sizes for tensor in varying)
    )
    return bool(varying) and not is_known


def _with_layouts(node: NodeFacts, decision: Decision) -> list[tuple[TensorFacts, Layout]]:
    return list(zip((*node.inputs, *node.outputs), (*decision.inputs, *decision.outputs), strict=True))


def _has_known_sizes(node: NodeFacts) -> bool:
    spelled = () if node.rule is None else node.rule.shape_inputs
    return all(tensor.has_fixed_sizes for tensor in (*node.inputs, *node.outputs) if tensor.is_named) and all(
        node.inputs[index].fixed_value is not None for index in spelled
    )
