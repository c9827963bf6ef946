"""Build the distributed step: ask for every result in the layout it is wanted in.

    need(tensor, layout)   the tensor in its native layout: lower the node that makes it, asking for
                           its operands as the node's decision says
                           in another layout: a copy made locally if that costs no message, else a
                           communication (passes/lowering/transfer_tensors.py)

Everything is made once per layout. What nobody needs is never communicated.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.expected_rows import ExpectedRows
from partc.passes.layouts.decide_layouts import follows, split_on
from partc.passes.layouts.decisions import Decision, axes_up_to, decide_axes, run_whole, whole_axis
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.last_change import last_change
from partc.passes.layouts.layouts import (
    REPLICAS,
    Layout,
    Partial,
    PerReplica,
    Replicate,
    RequestedRows,
    Split,
)
from partc.passes.lowering.lower_node import lower_node
from partc.passes.lowering.lowered_graph import LoweredGraph, State
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.transfer_tensors import transfer_tensor
from partc.passes.microbatches.find_repeated import REARRANGING
from partc.passes.rules.sharding_rules import node_facts, rule_of
from partc.runtime.plan.program import Site

MOVING = REARRANGING | {"Concat", "Identity"}  # what computes nothing


def lower(
    graph: LaidOutGraph,
    expected: Mapping[str, ExpectedRows] = MappingProxyType({}),
    sessions: bool = False,
) -> LoweredGraph:
    """Return the distributed step. Needs layouts, decisions and the places of aggregation.

    `expected`: rows on their way, by sparse parameter. `sessions`: what every rank could compute of
    itself, such as a counter, is kept on servers.
    """
    lowering = _Lowerer(graph, expected, sessions)
    lowering.run()
    return lowering.out


class _Lowerer(Lowering):
    """The rules for making what was not made yet."""

    def __init__(self, graph: LaidOutGraph, expected: Mapping[str, ExpectedRows], sessions: bool) -> None:
        super().__init__(graph, expected, sessions)
        self._values: dict[tuple[str, Layout], gs.Tensor] = {}
        self._lowered: dict[str, list[Decision]] = defaultdict(list)
        self._on_every_rank = _tensors_on_every_rank(graph)
        self._held: list[tuple[str, Site]] = []
        self._places = {node.name: place for place, node in enumerate(graph.training.graph.nodes)}

    def run(self) -> None:
        """Lower the outputs and the variables' next values, and whatever these need."""
        training = self.graph.training
        homes = {name: self._home_of(name) for name in training.variables}
        native = [v.next for v in training.variables.values() if homes[v.name] == self.graph.layout(v.name)]
        self.make_in_order([*training.outputs, *native])
        for name in training.outputs:
            target = _as_fetched(self.graph, name, self._output_site())
            value = self.need(name, target)
            if isinstance(value, gs.Constant):
                value = self.out.emit("Identity", [value], f"{name}.out", value.dtype, target.site)
            public = training.output_names.get(name, name)
            self.out.outputs.append((public, value.name, target))
        for name, home in homes.items():
            self.need(name, home)
        done = 0
        while done < len(self._held):  # the next value of one may need another at its site
            name, site = self._held[done]
            self._keep_state(name, site)
            done += 1
        self.out.prune()

    def _output_site(self) -> Site:
        """Return who hands out the outputs: the workers that make the loss, or the first output."""
        training = self.graph.training
        first = [training.loss, *training.outputs] if training.loss in training.outputs else training.outputs
        meshes = self.graph.meshes
        site = next((self.graph.layout(name).site for name in first), meshes.sites[0])
        return site if site in meshes.sites and meshes.is_fed(site) else meshes.sites[0]

    def _home_of(self, variable: str) -> Layout:
        """Return where a variable is kept even if nobody asks for it there."""
        native = self.graph.layout(variable)
        counts = self.sessions and self.graph.training.variables[variable].next in self._on_every_rank
        return Layout("server") if counts else native

    @cached_property
    def _of_data(self) -> set[str]:
        return _made_of_data(self.graph)

    def comes_of_data(self, tensor: str) -> bool:
        return tensor in self._of_data

    def _is_made_again(self, tensor: str) -> bool:
        """Tell whether each of several meshes makes a tensor: all are fed the data."""
        return not self.graph.configuration.is_one_mesh and self.comes_of_data(tensor)

    def make_in_order(self, tensors: Iterable[str]) -> None:
        targets: dict[str, list[Layout]] = defaultdict(list)
        for tensor in tensors:
            targets[tensor].append(self.graph.layout(tensor))
        needed: list[tuple[gs.Node, Decision]] = []
        for node in reversed(self.graph.training.graph.nodes):
            results = [(result, layout) for result in node.outputs for layout in targets[result.name]]
            decisions = [self._decision_for(*result) for result in results]
            for decision in decisions if len(decisions) == 1 else dict.fromkeys(decisions):
                needed.append((node, decision))
                for operand, layout in zip(node.inputs, decision.inputs, strict=True):
                    if self.facts.fixed_value(operand.name) is None:
                        targets[operand.name].append(layout)
        for node, decision in reversed(needed):
            self.lower(node, decision)

    def _decision_for(self, tensor: gs.Tensor, layout: Layout) -> Decision:
        """Return how the node that makes a tensor runs for it to be had in a layout, moved or not."""
        (node,) = tensor.inputs
        native, decision = self.graph.layout(tensor.name), self.graph.decisions[node.name]
        if layout == native or not self._can_make(tensor.name, layout):
            return decision
        if layout.site != native.site:
            is_again = self._is_made_again(tensor.name)
            return replace(decision, site=layout.site) if is_again else run_whole(node, layout.site)
        return decide_axes(
            self.graph.meshes.of(layout.site),
            [
                whole_axis(node) if layout.along(axis) != native.along(axis) else along
                for axis, along in enumerate(decision.axes)
            ],
        )

    def _keep_state(self, name: str, site: Site) -> None:
        variable = self.graph.training.variables[name]
        layout = Layout(site, *self.graph.layout(name).placements)
        following = self.need(variable.next, layout)
        if isinstance(following, gs.Constant) or not following.inputs:
            copy = f"{name}.next.{site}"
            following = self.out.emit("Identity", [following], copy, variable.dtype, site)
        value = self._values[(name, layout)].name
        self.out.states.append(State(name, site, value, following.name))

    def need(self, tensor: str, layout: Layout) -> gs.Tensor:
        key = (tensor, layout)
        if key not in self._values:
            self._values[key] = self._make(tensor, layout)
        return self._values[key]

    def _make(self, tensor: str, layout: Layout) -> gs.Tensor:
        source = self.source(tensor)
        constant = self.facts.fixed_value(tensor)
        if layout.is_whole:
            if isinstance(source, gs.Constant):
                return source.copy()  # so that the original does not list this step's nodes as readers
            if constant is not None and source.inputs:
                return gs.Constant(f"{tensor}.value", constant)
        native = self.native(tensor, layout.site)
        if layout != native and not self._can_make(tensor, layout):
            return transfer_tensor(self, tensor, native, layout)
        if not source.inputs:
            return self._leaf(source, layout)
        node = source.inputs[0]
        return self.lower(node, self._decision_for(source, layout))[_index(node, source)]

    def _leaf(self, source: gs.Tensor, layout: Layout) -> gs.Tensor:
        """A data input or a variable, as a site holds it."""
        name = source.name
        if name in self.graph.training.variables:
            name = self.value_name(name, layout)
            self._held.append((source.name, layout.site))
        self.describe(name, source.name, layout)
        return gs.Variable(name, dtype=source.dtype)

    def _can_make(self, tensor: str, layout: Layout) -> bool:
        """Tell whether a tensor, whole along axes where it natively is not, is made so without a message."""
        native = self.native(tensor, layout.site)
        if native.site != layout.site and self._is_made_again(tensor) and layout.site != "server":
            is_alike = self.graph.meshes.of(native.site).axes == self.graph.meshes.of(layout.site).axes
            is_fed = self.graph.meshes.is_fed(layout.site)
            return native.placements == layout.placements and is_alike and is_fed
        if native.site != layout.site:
            return native.is_whole and layout.is_whole and tensor in self._on_every_rank
        if native.is_whole:
            return layout.is_whole and tensor in self._on_every_rank
        return self.graph.is_made_so(tensor, native, layout)

    def lower(self, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
        """Lower a node as decided, once, and return its outputs."""
        names = [tensor.name for tensor in node.outputs]
        keys = list(zip(names, decision.outputs, strict=True))
        if decision not in self._lowered[node.name]:
            self._lowered[node.name].append(decision)
            made = list(zip(names, decision.made, strict=True))
            self._values.update(zip(made, lower_node(self, node, decision), strict=True))
            for (name, sums), key in zip(made, keys, strict=True):
                if sums != key[1]:
                    self._values[key] = transfer_tensor(self, name, sums, key[1])
        return [self._values[key] for key in keys]

    def split_locally(self, tensor: str, layout: Layout, axis: int) -> gs.Tensor | None:
        divided = self._divided(tensor, layout, axis)
        if divided is None:
            return None
        # Its operands may be made in parts, too, and theirs: in order, so that need() recurses little.
        chain, waiting = [divided], [divided]
        known = {(divided[0].name, divided[1])}
        while waiting:
            node, decision = waiting.pop()
            for operand, target in zip(node.inputs, decision.inputs, strict=True):
                before = self._divided_alone(operand.name, target)
                if before is not None and (before[0].name, before[1]) not in known:
                    known.add((before[0].name, before[1]))
                    chain.append(before)
                    waiting.append(before)
        for node, decision in sorted(chain, key=lambda pair: self._places[pair[0].name]):
            self.lower(node, decision)
        node, decision = divided
        return self.lower(node, decision)[_index(node, self.source(tensor))]

    def join_locally(self, tensor: str, layout: Layout, axis: int) -> gs.Tensor | None:
        chain = self._joined(tensor, layout, axis)
        if chain is None:
            return None
        for node, decision in sorted(chain, key=lambda made: self._places[made[0].name]):
            self.lower(node, decision)
        return self._values[(tensor, layout)]

    def _joined(self, tensor: str, layout: Layout, axis: int) -> list[tuple[gs.Node, Decision]] | None:
        """Return the nodes that rearrange what is there whole into a tensor, and how; None: they cannot."""
        source, native = self.source(tensor), self.graph.layout(tensor)
        parts = layout.with_along(axis, native.along(axis))
        if not source.inputs or source.inputs[0].op not in MOVING or parts != native:
            return None
        (node,) = source.inputs
        axes = list(self.graph.decisions[node.name].axes)
        axes[axis] = whole_axis(node)
        whole = decide_axes(self.graph.meshes.of(layout.site), axes)
        if whole.outputs[_index(node, source)] != layout:
            return None
        chain = [(node, whole)]
        for operand, target in zip(node.inputs, whole.inputs, strict=True):
            is_there = (operand.name, target) in self._values or self._is_constant(operand.name)
            before = [] if is_there else self._joined(operand.name, target, axis)
            if before is None:
                return None
            chain += before
        return chain

    def _is_constant(self, operand: str) -> bool:
        return not operand or self.facts.fixed_value(operand) is not None

    def _divided_alone(self, tensor: str, target: Layout) -> tuple[gs.Node, Decision] | None:
        """Return the node that makes a tensor, and how it makes a part, if nothing but a cut is wanted."""
        if not tensor or (tensor, target) in self._values or not target.splits():
            return None
        native, shape = self.native(tensor, target.site), self.facts.shape(tensor)
        axes = range(max(len(native.placements), len(target.placements)))
        changes = [(native.along(a), target.along(a)) for a in axes if native.along(a) != target.along(a)]
        if not changes or not all(isinstance(o, Replicate) and isinstance(w, Split) for o, w in changes):
            return None
        change = last_change(native, target, lambda layout: self.graph.meshes.divides(layout, shape))
        return self._divided(tensor, target, change.axis)

    def _divided(self, tensor: str, layout: Layout, axis: int) -> tuple[gs.Node, Decision] | None:
        """Return the node that makes a tensor, and how it makes just a part along a mesh axis, if it can."""
        source = self.source(tensor)
        before, placement = layout.with_along(axis, Replicate()), layout.along(axis)
        if not source.inputs or not isinstance(placement, Split):
            return None
        if before != self.graph.layout(tensor) and not self._can_make(tensor, before):
            return None
        node = source.inputs[0]
        rule = rule_of(node, self.facts)
        if rule is None or self.facts.fixed_value(tensor) is not None:
            return None
        index = _index(node, source)
        rule_and_factor = rule.factor_at(
            rule.outputs[index], placement.axis, placement.outer, placement.uneven
        )
        if rule_and_factor is None or rule_and_factor[1] in rule.whole or rule_and_factor[1] in rule.combine:
            return None
        rule, factor = rule_and_factor
        ranks = self.graph.meshes.size(layout.site, axis)
        along = split_on(node_facts(node, self.facts, self.graph.zeros), rule, factor, ranks)
        if along is None or not follows(rule, factor, placement, ranks, widens=False):
            return None
        decision = self._decision_for(source, before)
        if any(along_axis.is_summed for along_axis in decision.axes):
            return None
        axes = axes_up_to(axis, node, decision)
        axes[axis] = along
        divided = decide_axes(self.graph.meshes.of(layout.site), axes)
        if divided.outputs[index] != layout:
            return None
        if not self.graph.divides(node, divided) or self._cuts_more(node, divided, tensor):
            return None
        return None if self._cuts_scattered(node, divided) else (node, divided)

    def _cuts_scattered(self, node: gs.Node, divided: Decision) -> bool:
        """Tell whether a sum would be cut before it is scattered, into parts of which some are larger."""
        return any(
            self.graph.sums_before(operand.name, axis)
            and isinstance(target.along(axis), Split)
            and not self.graph.has_fixed_pieces(operand.name, target.with_along(axis, Replicate()))
            for operand, target in zip(node.inputs, divided.inputs, strict=True)
            if operand.name
            for axis in range(len(target.placements))
        )

    def _cuts_more(self, node: gs.Node, divided: Decision, tensor: str) -> bool:
        """Tell whether a variable would be cut that is larger than what is made, such as a table of rows."""
        return any(
            operand.name in self.graph.training.variables
            and target.placements != self.graph.layout(operand.name).placements
            and self.facts.nbytes(operand.name) > self.facts.nbytes(tensor)
            for operand, target in zip(node.inputs, divided.inputs, strict=True)
        )


def _as_fetched(graph: LaidOutGraph, output: str, site: Site) -> Layout:
    """Return how an output is handed out: as replicas have it, and whole along other axes."""
    placement = graph.layout(output).along(REPLICAS)
    if isinstance(placement, RequestedRows):
        placement = placement.returned
    if isinstance(placement, Split) and placement.outer == 1 and not placement.rows_of:
        return Layout(site, graph.cut_at(site, output, REPLICAS, placement))
    return Layout(site, placement if isinstance(placement, PerReplica) else Replicate())


def _tensors_on_every_rank(graph: LaidOutGraph) -> set[str]:
    """Return the tensors that depend on nothing but what every rank has anyway.

    Of several meshes, each has the variables that it can carry on by itself, such as counters of steps.
    """
    variables = graph.training.variables
    lacking: set[str] = set()
    while True:
        everywhere = _made_without(graph, lacking)
        strays = {name for name, v in variables.items() if name in everywhere and v.next not in everywhere}
        if graph.configuration.is_one_mesh or not strays:
            return everywhere
        lacking |= strays


def _made_of_data(graph: LaidOutGraph) -> set[str]:
    """Return what comes of data alone, such as masks, and is no sum of parts."""
    training = graph.training
    names = {*training.data_inputs, *training.drawn_inputs, *training.shard_inputs}
    for node in training.graph.nodes:
        reads = [t.name for t in node.inputs if t.name and not isinstance(t, gs.Constant)]
        if names.issuperset(reads) and not any(
            isinstance(layout.along(axis), Partial)
            for layout in graph.decisions[node.name].outputs
            for axis in range(len(layout.placements))
        ):
            names.update(tensor.name for tensor in node.outputs)
    return names


def _made_without(graph: LaidOutGraph, lacking: set[str]) -> set[str]:
    """Return the tensors that need no message where every rank has all that is whole but `lacking`.

    Of several meshes one makes a product, where it was placed, however whole its operands are.
    """
    tensors, is_one_mesh = graph.training.graph.tensors(), graph.configuration.is_one_mesh
    at_hand = {
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, gs.Constant) or graph.facts.fixed_value(name) is not None
    }

    def is_whole(tensor: gs.Tensor) -> bool:
        return graph.layout(tensor.name).is_whole and tensor.name not in lacking

    at_hand.update(name for name, tensor in tensors.items() if not tensor.inputs and is_whole(tensor))
    for node in graph.training.graph.nodes:
        reads = (operand.name for operand in node.inputs if operand.name)
        rule = None if is_one_mesh else rule_of(node, graph.facts)
        is_product = rule is not None and rule.is_contraction
        if node.op not in ("Shape", "Size") and not is_product and at_hand.issuperset(reads):
            at_hand.update(result.name for result in node.outputs if is_whole(result))
    return at_hand


def _index(node: gs.Node, tensor: gs.Tensor) -> int:
    return next(index for index, output in enumerate(node.outputs) if output is tensor)
