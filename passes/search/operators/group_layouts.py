"""What an operator group does on each of its devices under a split: work, sums, what it wants and has.

A group is laid out as a step of its own, on one mesh, by the passes that lay out whole steps: what other
groups make is fed to it, with the samples divided as data parallelism divides them. Groups that are alike,
such as the steps of a recurrence, are laid out once.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import onnx_graphsurgeon as gs

from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out, lay_out_strategy
from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.passes.layouts.aggregate_partials import aggregate_partials
from partc.passes.layouts.configuration import Wish, data_parallel
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import (
    REPLICAS,
    Layout,
    Overlapping,
    Partial,
    Placement,
    Replicate,
    Split,
    Widened,
)
from partc.passes.layouts.meshes import Mesh
from partc.passes.lowering.local_sizes import LocalSizes
from partc.passes.scheduling.kernels import absorbed_transposes
from partc.passes.scheduling.segment_work import Work
from partc.passes.search.operators.count_work import count_work
from partc.passes.search.operators.group_collectives import (
    AxisCollective,
    SumForReaders,
    communicated,
    computed_reads,
    levels_of,
    terms_left,
)
from partc.passes.search.operators.grouped_step import GroupedStep, PassLevel, StepGroup
from partc.passes.search.operators.operator_space import SplitDegrees
from partc.runtime.errors import InputError
from partc.runtime.plan.variables import DrawnInput, Uniform

ANY = Uniform(0.0, 1.0, 0)  # what is fed to a group has no values
NOT_THERE = -1


Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class GroupLayout:
    """Alike groups under a split. Work and bytes are of one device, the one with the largest part.

    Tensors are numbered as `GroupLayouts.place` numbers them.

    kind    a number of the groups' likeness and the split together
    wants   (tensor, way) -> how the group reads what it did not make on that way, without neighbours' entries
    sums    of a way, of what others read
    has     tensor -> the layout in which others find it; partial are terms of gradients, and of `sums`
    homes   parameter -> where it is kept, if this group keeps it
    """

    kind: int
    mesh: Mesh
    work: Mapping[PassLevel, Work]
    collectives: Mapping[PassLevel, tuple[AxisCollective, ...]]
    sums: Mapping[PassLevel, tuple[SumForReaders, ...]]
    wants: Mapping[tuple[int, PassLevel], tuple[Placements, ...]]
    has: Mapping[int, Layout]
    homes: Mapping[int, Layout]

    @cached_property
    def has_terms(self) -> frozenset[int]:
        """Return the tensors that others find terms of, which are summed for them."""
        return frozenset(own.tensor for sums in self.sums.values() for own in sums)


@dataclass
class GroupLayouts:
    """Lays groups out, alike ones and each split once."""

    step: GroupedStep
    _steps: dict[int, "_OwnStep"] = field(default_factory=dict)
    _signatures: dict[Hashable, int] = field(default_factory=dict)
    _found: dict[tuple[int, SplitDegrees], GroupLayout | None] = field(default_factory=dict)
    _samples: dict[str, Split] = field(init=False)
    _transposes: dict[str, gs.Node] = field(init=False)  # of the whole step, that vanish in products

    def __post_init__(self) -> None:
        alone = lay_out(self.step.analysis, {}, data_parallel(1))
        places = ((name, layout.along(REPLICAS)) for name, layout in alone.layouts.items())
        training = self.step.analysis.training
        terms = {term for own in self.step.terms.values() for term in own}
        self._transposes = absorbed_transposes(training.graph.nodes, terms.union(training.outputs))
        self._samples = {name: place for name, place in places if isinstance(place, Split)}

    def __call__(self, number: int, split: SplitDegrees) -> GroupLayout | None:
        """Return a group's layout under a split; None where it cannot be divided so."""
        own = self._own_step(number)
        key = own.likeness, split
        if key not in self._found:
            self._found[key] = own.lay_out(split, len(self._found))
        return self._found[key]

    def likeness(self, number: int) -> int:
        """Return a number that alike groups have, which have the same layouts."""
        return self._own_step(number).likeness

    def place(self, number: int, tensor: str) -> int:
        """Return a tensor's number among those of a group, the same in alike ones; or NOT_THERE."""
        return self._own_step(number).places.get(tensor, NOT_THERE)

    def _own_step(self, number: int) -> "_OwnStep":
        if number not in self._steps:
            self._steps[number] = _OwnStep(
                self.step, number, self._samples, self._signatures, self._transposes
            )
        return self._steps[number]


class _OwnStep:
    """A group as a step of its own. `places`: its tensors' numbers, as in groups of equal `likeness`."""

    def __init__(
        self,
        step: GroupedStep,
        number: int,
        samples: Mapping[str, Split],
        signatures: dict[Hashable, int],
        transposes: Mapping[str, gs.Node],
    ) -> None:
        self._transposes = transposes
        self._whole = step.analysis
        self._group: StepGroup = step.groups[number]
        self._nodes = [node for nodes in self._group.nodes.values() for node in nodes]
        own_tensors = {tensor.name for node in self._nodes for tensor in node.outputs}
        own_terms = {
            parameter: [term for term in terms if term in own_tensors]
            for parameter, terms in step.terms.items()
        }
        self._terms = {parameter: terms for parameter, terms in own_terms.items() if terms}
        of_terms = {term for terms in self._terms.values() for term in terms}
        self._crossing = [name for name in step.readers if name in own_tensors and name not in of_terms]
        self._outputs = tuple(name for name in self._whole.training.outputs if name in own_tensors)
        self._results = tuple(dict.fromkeys((*self._crossing, *self._outputs)))
        self._awaited = {*self._crossing, *of_terms}  # what they come from, too; the loss, say, is not
        for node in reversed(self._nodes):
            if any(tensor.name in self._awaited for tensor in node.outputs):
                self._awaited.update(tensor.name for tensor in node.inputs)
        self._analysis = self._own_analysis(own_tensors, samples)
        self._wishes: dict[int, Mapping[str, Wish]] = {}
        self.places, signature = self._describe(samples)
        self.likeness = signatures.setdefault(signature, len(signatures))

    def _own_analysis(self, own_tensors: set[str], samples: Mapping[str, Split]) -> Analysis:
        whole = self._whole
        read = {
            t.name: t for node in self._nodes for t in node.inputs if t.name and t.name not in own_tensors
        }
        variables = {name: v for name, v in whole.training.variables.items() if name in read}
        fed = {
            name: _fed(name, tensor, samples.get(name))
            for name, tensor in read.items()
            if name not in variables and not isinstance(tensor, gs.Constant)
        }
        gradients = {
            name: Gradient(name, dense=self._terms[name][0] if name in self._terms else None)
            for name in variables
            if name in whole.training.gradients
        }
        training = TrainingGraph(
            gs.Graph(nodes=self._nodes, name="group", opset=whole.training.opset),
            variables,
            {},
            self._outputs,
            None,
            gradients,
            functions=whole.training.functions,
            opset=whole.training.opset,
            drawn_inputs=fed,
        )
        return replace(
            whole,
            training=training,
            main=frozenset(node.name for node in self._nodes),
            followers={name: name if name in gradients else None for name in variables},
            servable=frozenset(),
        )

    def _describe(self, samples: Mapping[str, Split]) -> tuple[dict[str, int], Hashable]:
        """Return the tensors' places, by first appearance, and what alike groups have in common."""
        places: dict[str, int] = {}
        described: list[Hashable] = []
        facts, variables = self._whole.facts, self._analysis.training.variables
        for way, nodes in self._group.nodes.items():
            for node in nodes:
                ends = []
                for tensor in (*node.inputs, *node.outputs):
                    place = places.setdefault(tensor.name, len(places))
                    ends.append(place)
                    if place == len(places) - 1 and tensor.name:
                        value = facts.fixed_value(tensor.name)
                        described.append(
                            (
                                facts.shape(tensor.name),
                                facts.dtypes[tensor.name].str,
                                tensor.name in facts.fixed_shapes,
                                tensor.name in variables,
                                tensor.name in self._whole.zeros,
                                tensor.name in self._results,
                                tensor.name in self._outputs,
                                tensor.name in self._transposes,
                                samples.get(tensor.name),
                                None if value is None else value.tobytes(),
                            )
                        )
                described.append((way, node.op, node.domain, repr(sorted(node.attrs.items())), tuple(ends)))
        head = [node.name for node in self._nodes].index(self._group.operator.node)
        terms = tuple((places[p], *(places[t] for t in own)) for p, own in self._terms.items() if p in places)
        return places, (head, terms, tuple(described))

    def lay_out(self, split: SplitDegrees, kind: int) -> GroupLayout | None:
        """Return the group under a split; None where it cannot be divided so."""
        devices = self._whole.workers[: _parts(split)]
        entry = OpConfig(self._group.operator.node, dict(split), devices=devices)
        strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=(entry,))
        try:
            graph = lay_out_strategy(self._analysis, strategy, self._wishes)
        except InputError:
            return None
        aggregate_partials(graph)
        return self._describe_layout(graph, kind)

    def _describe_layout(self, graph: LaidOutGraph, kind: int) -> GroupLayout:
        sizes, group, places = LocalSizes(graph), self._group, self.places
        of_terms = [term for own in self._terms.values() for term in own]
        results = {*self._results, *of_terms}
        wants = {
            (places[tensor], way): tuple(dict.fromkeys(map(plain, layouts)))
            for way in group.nodes
            for tensor, layouts in _wanted(graph, group, way).items()
        }
        read_by_others = {name: axes for name in self._crossing if (axes := terms_left(graph, name))}
        sums: dict[PassLevel, tuple[SumForReaders, ...]] = {}
        collectives: dict[PassLevel, tuple[AxisCollective, ...]] = {}
        for way, nodes in group.nodes.items():
            made = list(communicated(graph, sizes, nodes, self._awaited))
            level = levels_of(nodes, {tensor for tensor, *_ in made})
            collectives[way] = tuple(
                AxisCollective(kind, axes, nbytes, level[tensor]) for tensor, kind, axes, nbytes in made
            )
            sums[way] = tuple(
                SumForReaders(places[t], axes, sizes.local_nbytes(t, graph.layout(t)), level[t])
                for t, axes in read_by_others.items()
                if t in level
            )
        return GroupLayout(
            kind,
            graph.meshes.each[0],
            {
                way: count_work(graph, sizes, group.nodes[way], results, self._transposes)
                for way in group.nodes
            },
            collectives,
            sums,
            wants,
            {
                places[name]: _summed(graph.layout(name), read_by_others.get(name, ()))
                for name in self._results
            }
            | {places[term]: graph.layout(term) for term in of_terms},
            {places[name]: graph.layout(name) for name in graph.training.gradients},
        )


def _parts(split: SplitDegrees) -> int:
    parts = 1
    for _, degree in split:
        parts *= degree
    return parts


def _fed(name: str, tensor: gs.Tensor, place: Split | None) -> DrawnInput:
    shape = tuple(0 for _ in tensor.shape or ())
    if place is None:
        return DrawnInput(name, "", shape, ANY, follows_run=False)
    return DrawnInput(name, "", shape, ANY, follows_run=False, sample_axis=place.axis, outer=place.outer)


# ---------------------------------------------------------------- what a laid-out group says


def plain(layout: Layout, has_terms: bool = False) -> Placements:
    """Return what a rank has of its own of a tensor: sums made, unless it has terms, and without its
    neighbours' entries."""
    return _plain(layout.placements, has_terms)


@lru_cache(maxsize=1 << 14)
def _plain(layout: Placements, has_terms: bool) -> Placements:
    placements: list[Placement] = []
    for placement in layout:
        if isinstance(placement, Widened):
            placements.append(Split(placement.axis))
        elif isinstance(placement, Overlapping):
            placements.append(placement.own)
        else:
            is_own = isinstance(placement, Split) or (has_terms and isinstance(placement, Partial))
            placements.append(placement if is_own else Replicate())
    return Layout("", *placements).placements


def _summed(layout: Layout, left: tuple[int, ...]) -> Layout:
    """Return a layout with its sums made, but along the mesh axes that are left."""
    placements = enumerate(layout.placements)
    whole = Replicate()
    made = [whole if isinstance(p, Partial) and axis not in left else p for axis, p in placements]
    return Layout(layout.site, *made)


def _wanted(graph: LaidOutGraph, group: StepGroup, way: PassLevel) -> dict[str, list[Layout]]:
    """Return the layouts in which one way reads what it does not make."""
    results = {tensor.name for node in group.nodes[way] for tensor in node.outputs}
    layouts_read: dict[str, list[Layout]] = {}
    for tensor, layout in computed_reads(graph, group.nodes[way]):
        if tensor.name not in results:
            layouts_read.setdefault(tensor.name, []).append(layout)
    return layouts_read
