"""What is known of a training graph while it is laid out: every tensor's layout, every node's decision."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx_graphsurgeon as gs

from partc.cost.strategy import Synchronisation
from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.configuration import Configuration
from partc.passes.layouts.decisions import Decision, divides
from partc.passes.layouts.layouts import REPLICAS, Layout, Partial, Placement, Replicate, Split
from partc.passes.layouts.meshes import Meshes
from partc.passes.layouts.same_parts import same_parts
from partc.passes.rules.sharding_rules import node_facts
from partc.runtime.plan.program import Site

# What the two messages of a lookup are worth, by which all ids are gathered and the rows scattered: among 48
# ranks at 100 Gbit/s (docs/decisions/094-tables-are-read-where-they-are.md).
LOOKUP_BYTES = 4 << 20

WHOLE_ON_WORKERS = Layout("worker")
WHOLE_ON_SERVERS = Layout("server")


@dataclass(frozen=True)
class Synchronised:
    """How the parameters and their followers are kept, in the terms that layouts need.

    chosen  parameter -> how it is synchronised
    owner   variable (parameter or follower) on servers -> its parameter
    """

    chosen: Mapping[str, Synchronisation]
    owner: Mapping[str, str]

    def method(self, parameter: str) -> str | None:
        """Return all_reduce, all_gather or servers; None where nothing was chosen yet."""
        return self.chosen[parameter].method if parameter in self.chosen else None


@dataclass
class LaidOutGraph:
    """The training graph with a layout for every tensor and a decision for every node."""

    training: TrainingGraph
    facts: Facts
    zeros: frozenset[str]
    configuration: Configuration
    synchronised: Synchronised
    main: frozenset[str]  # names of the main computation's nodes
    stored: frozenset[str]  # tensors that come from variables and constants alone
    # what workers make of the rows of a parameter on servers, which take each theirs -> the parameter
    pushed: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    # partial tensors that are summed over the ranks along a mesh axis: (tensor, axis)
    made_whole: frozenset[tuple[str, int]] = frozenset()
    # partial tensors that are made of such alone which others want whole: of these a part is cut
    summed_anyway: frozenset[tuple[str, int]] = frozenset()

    @cached_property
    def homes(self) -> dict[str, tuple[tuple[int, Split], ...]]:
        """Return how dense gradients are split where their variables are kept: tensor -> mesh axes, each's
        split."""
        return {
            gradient.dense: tuple(self.configuration.homes[name].splits())
            for name, gradient in self.training.gradients.items()
            if gradient.dense is not None and name in self.configuration.homes
        }

    @cached_property
    def looked_up(self) -> frozenset[str]:
        """Return tables of which rows alone are read and trained, and fewer bytes than all, with messages."""
        by_index = {name for name, gradient in self.training.gradients.items() if gradient.dense is None}
        read_bytes: Counter[str] = Counter()
        for node in self.training.graph.nodes:
            if node.op == "Gather" and node.name in self.main and node.inputs[0].name in by_index:
                read_bytes[node.inputs[0].name] += self.facts.nbytes(node.outputs[0].name) + LOOKUP_BYTES
        return frozenset(name for name, nbytes in read_bytes.items() if nbytes < self.facts.nbytes(name))

    def sums_before(self, tensor: str, axis: int) -> bool:
        """Tell whether a tensor that is partial along a mesh axis is whole once its operands are summed."""
        is_partial = isinstance(self.layout(tensor).along(axis), Partial)
        return is_partial and (tensor, axis) not in self.made_whole and not self.is_pushed(tensor, axis)

    def is_pushed(self, tensor: str, axis: int) -> bool:
        """Tell whether servers make the sum of a tensor's terms along a mesh axis."""
        return axis == REPLICAS and tensor in self.pushed

    def is_made_so(self, tensor: str, native: Layout, layout: Layout) -> bool:
        """Tell whether what makes a tensor natively makes it so, of operands that are summed before."""
        return layout.site == native.site and all(
            layout.along(axis) == native.along(axis)
            or (isinstance(layout.along(axis), Replicate) and self.sums_before(tensor, axis))
            for axis in range(max(len(native.placements), len(layout.placements)))
        )

    def has_rows_of(self, tensor: str, parameter: str) -> bool:
        """Tell whether axis 0 of a tensor is axis 0 of a parameter, and not that of slices."""
        rows = self.training.variables[parameter].shape[0]
        return tensor in self.facts.fixed_shapes and self.facts.shape(tensor)[:1] == (rows,)

    def has_fixed_pieces(self, tensor: str, *layouts: Layout) -> bool:
        """Tell whether the sizes of a tensor's pieces are known, whatever the data, and in some layouts the
        same on all ranks."""
        is_known = tensor in self.facts.fixed_shapes and all(self.facts.shape(tensor))
        return is_known and not any(layout.varying() for layout in layouts)

    def same_parts(self, layout: Layout, site: Site) -> Layout | None:
        """Return the layout at another site that gives each worker the same part, None if there is none."""
        if layout.site == site:
            return layout
        if "server" in (layout.site, site):
            return None
        return same_parts(self.meshes.of(layout.site), layout, self.meshes.of(site))

    def cut_at(self, site: Site, tensor: str, axis: int, split: Split) -> Placement:
        """Return how a mesh divides what another splits so: evenly or not, or whole if entries are few."""
        if not self.has_fixed_pieces(tensor):
            return split
        mesh = self.meshes.of(site)
        entries = self._factor(tensor, split)
        if entries < mesh.size(axis):
            return Replicate()
        return mesh.cut(axis, split.axis, split.outer, entries)

    def divided_at(self, site: Site, tensor: str, layout: Layout) -> Layout:
        """Return how a mesh divides what another divides so, if it is another of other parts."""
        if layout.site == site or self.meshes.are_paired(layout.site, site):
            return layout
        if layout.rows_of:
            return Layout(site)
        mesh = self.meshes.of(site)
        placements = [
            self.cut_at(site, tensor, axis, place)
            if isinstance(place, Split) and mesh.size(axis) > 1
            else Replicate()
            for axis, place in enumerate(layout.placements)
        ]
        factors = [
            self._factor(tensor, p) if isinstance(p, Split) and self.has_fixed_pieces(tensor) else 0
            for p in layout.placements
        ]
        return Layout(site, *mesh.nest(placements, factors))

    def _factor(self, tensor: str, split: Split) -> int:
        return split.uneven or self.facts.shape(tensor)[split.axis] // split.outer

    @property
    def meshes(self) -> Meshes:
        """Return the workers' meshes."""
        return self.configuration.meshes

    @property
    def replicas(self) -> int:
        """Return how many replicas there are."""
        return self.meshes.replicas

    def divides(self, node: gs.Node, decision: Decision) -> bool:
        """Tell whether the axes of its mesh together cut what a node reads and writes into equal parts."""
        return divides(self.meshes, node_facts(node, self.facts), decision)

    def layout(self, tensor: str) -> Layout:
        """Return a tensor's native layout; constants are whole everywhere."""
        return self.layouts.get(tensor, WHOLE_ON_WORKERS)
