"""Build the distributed step: ask for every result in the layout it is wanted in.

    need(tensor, layout)   the tensor in its native layout: lower the node that makes it, asking for
                           its operands as the node's decision says
                           in another layout: a copy made locally if that costs no message, else a
                           communication (passes/lowering/reshard.py)

Everything is made once per layout. What nobody needs is never communicated.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import onnx_graphsurgeon as gs

from partc.passes.indexed_rows.expected_rows import ExpectedRows
from partc.passes.layouts.decide_layouts import Decision, run_whole, split_on
from partc.passes.layouts.layouts import (
    Layout,
    Partial,
    PerReplica,
    Replicate,
    Split,
)
from partc.passes.layouts.propagate_layouts import LaidOutGraph
from partc.passes.lowering.lower_node import lower_node
from partc.passes.lowering.lowered_graph import LoweredGraph, State
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.reshard import reshard
from partc.passes.rules.sharding_rules import rule_of
from partc.runtime.plan.program import Site


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

    def run(self) -> None:
        """Lower the outputs and the variables' next values, and whatever these need."""
        training = self.graph.training
        homes = {name: self._home_of(name) for name in training.variables}
        native = [v.next for v in training.variables.values() if homes[v.name] == self.graph.layout(v.name)]
        self._lower_in_order([*training.outputs, *native])
        for name in training.outputs:
            placement = self.graph.layout(name).placement
            stays = isinstance(placement, PerReplica) or (
                isinstance(placement, Split) and placement.outer == 1
            )
            wanted = placement if stays else Replicate()
            value = self.need(name, Layout("worker", wanted))
            public = training.output_names.get(name, name)
            self.out.outputs.append((public, value.name, Layout("worker", wanted)))
        for name, home in homes.items():
            self.need(name, home)
        done = 0
        while done < len(self._held):  # the next value of one may need another at its site
            name, site = self._held[done]
            self._keep_state(name, site)
            done += 1
        self.out.prune()

    def _home_of(self, variable: str) -> Layout:
        """Return where a variable is kept even if nobody asks for it there."""
        native = self.graph.layout(variable)
        counts = self.sessions and self.graph.training.variables[variable].next in self._on_every_rank
        return Layout("server", Replicate()) if counts else native

    def _lower_in_order(self, tensors: Iterable[str]) -> None:
        """Lower from first to last what these tensors come from, so that need() recurses little."""
        wanted: dict[str, list[Layout]] = defaultdict(list)
        for tensor in tensors:
            wanted[tensor].append(self.graph.layout(tensor))
        needed: list[tuple[gs.Node, Decision]] = []
        for node in reversed(self.graph.training.graph.nodes):
            results = [(result, layout) for result in node.outputs for layout in wanted[result.name]]
            found = [self._decision_for(*result) for result in results]
            for decision in found if len(found) == 1 else dict.fromkeys(found):
                needed.append((node, decision))
                for operand, placement in zip(node.inputs, decision.inputs, strict=True):
                    if self.facts.fixed_value(operand.name) is None:
                        wanted[operand.name].append(Layout(decision.site, placement))
        for node, decision in reversed(needed):
            self.lower(node, decision)

    def _decision_for(self, tensor: gs.Tensor, layout: Layout) -> Decision:
        """Return how the node that makes a tensor runs for it to be had in a layout, moved or not."""
        (node,) = tensor.inputs
        makes_whole = layout != self.graph.layout(tensor.name) and isinstance(layout.placement, Replicate)
        if makes_whole and self._can_make_whole_at(tensor.name, layout.site):
            return run_whole(node, layout.site)
        return self.graph.decisions[node.name]

    def _keep_state(self, name: str, site: Site) -> None:
        variable = self.graph.training.variables[name]
        layout = Layout(site, self.graph.layout(name).placement)
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
        known = self.facts.fixed_value(tensor)
        if isinstance(layout.placement, Replicate):
            if isinstance(source, gs.Constant):
                return source.copy()  # so that the original does not list this step's nodes as readers
            if known is not None and source.inputs:
                return gs.Constant(f"{tensor}.value", known)
        native = self.graph.layout(tensor)
        is_whole = isinstance(layout.placement, Replicate) and self._can_make_whole_at(tensor, layout.site)
        if layout != native and not is_whole:
            return reshard(self, tensor, native, layout)
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

    def _can_make_whole_at(self, tensor: str, site: Site) -> bool:
        """Tell whether a site can compute a whole tensor without a message."""
        native = self.graph.layout(tensor)
        if isinstance(native.placement, Partial):
            return native.site == site and tensor not in self.graph.made_whole
        return isinstance(native.placement, Replicate) and tensor in self._on_every_rank

    def lower(self, node: gs.Node, decision: Decision) -> list[gs.Tensor]:
        """Lower a node as decided, once, and return its outputs."""
        outputs = [Layout(decision.site, placement) for placement in decision.outputs]
        keys = [(tensor.name, layout) for tensor, layout in zip(node.outputs, outputs, strict=True)]
        if decision not in self._lowered[node.name]:
            self._lowered[node.name].append(decision)
            self._values.update(zip(keys, lower_node(self, node, decision), strict=True))
        return [self._values[key] for key in keys]

    def split_locally(self, tensor: str, placement: Split) -> gs.Tensor | None:
        source = self.source(tensor)
        if not source.inputs or (tensor not in self._on_every_rank and tensor in self.graph.made_whole):
            return None
        node = source.inputs[0]
        rule = rule_of(node, self.facts)
        if rule is None or self.facts.fixed_value(tensor) is not None:
            return None
        index = _index(node, source)
        found = rule.factor_at(rule.outputs[index], placement.axis, placement.outer)
        if found is None or found[1] in rule.whole or found[1] in rule.combine:
            return None
        rule, factor = found
        decision = split_on(node, rule, factor, self.graph.zeros)
        if decision is None or rule.sizes[factor] % self.graph.replicas:
            return None
        return self.lower(node, replace(decision, site="worker"))[index]


def _tensors_on_every_rank(graph: LaidOutGraph) -> set[str]:
    """Return the tensors that depend on nothing but what every rank has anyway."""
    tensors = graph.training.graph.tensors()
    at_hand = {
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, gs.Constant) or graph.facts.fixed_value(name) is not None
    }

    def is_whole(tensor: gs.Tensor) -> bool:
        return isinstance(graph.layout(tensor.name).placement, Replicate)

    at_hand.update(name for name, tensor in tensors.items() if not tensor.inputs and is_whole(tensor))
    for node in graph.training.graph.nodes:
        reads = (operand.name for operand in node.inputs if operand.name)
        if node.op not in ("Shape", "Size") and at_hand.issuperset(reads):
            at_hand.update(result.name for result in node.outputs if is_whole(result))
    return at_hand


def _index(node: gs.Node, tensor: gs.Tensor) -> int:
    return next(index for index, output in enumerate(node.outputs) if output is tensor)
