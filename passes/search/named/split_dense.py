"""Split dense layers by columns along the replicas' axis, everything else staying data-parallel.

Convolutions have few weights and large activations, dense layers the reverse: replicas divide the samples of
the first and the columns of the second, so that activations are gathered and no dense weight's gradient is
summed (Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks).

    x [samples] ── gather ── MatMul W [columns] ── y [columns]     dW = xT dy, by columns; dx = dy WT, partial
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.distribute import follow_readers, lay_out
from partc.passes.layouts.configuration import Configuration, Wish
from partc.passes.layouts.decide_layouts import decide_by_wish
from partc.passes.layouts.decisions import decide_axes, divides
from partc.passes.layouts.layouts import REPLICAS, Layout, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import node_facts, rule_of
from partc.passes.search.operators.forward_nodes import find_variables_behind, forward_nodes


@dataclass(frozen=True)
class DenseSplit:
    """Where variables are split along the replicas' axis, and the dimension that each node splits there."""

    variables: Mapping[str, Split]
    wishes: Mapping[str, Wish]


def split_dense(analysis: Analysis, mesh: Mesh) -> DenseSplit:
    """Return the split of every dense layer with a column for each worker; nothing where there is none."""
    search = _DenseSearch(analysis, mesh)
    search.split_layers()
    if not search.weights:
        return DenseSplit({}, {})
    search.follow_weights()
    weights = dict(search.weights)
    biases = search.find_biases()
    for name, split in (weights | biases).items():
        gradient = analysis.training.gradients[name].dense
        if gradient is not None:
            search.trace_back(gradient, split)
    return DenseSplit(weights | biases, search.wishes)


def find_dense(analysis: Analysis, mesh: Mesh) -> tuple[frozenset[str], frozenset[str]]:
    """Return the weights of dense layers with a column for each worker, and the activations they read."""
    search = _DenseSearch(analysis, mesh)
    search.split_layers()
    return frozenset(search.weights), frozenset(search.read)


@dataclass
class _DenseSearch:
    analysis: Analysis
    mesh: Mesh
    weights: dict[str, Split] = field(default_factory=dict)
    wishes: dict[str, Wish] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)  # activations that dense layers read

    def split_layers(self) -> None:
        """Choose the columns of every 2-D weight that an activation is multiplied by."""
        analysis = self.analysis
        nodes = forward_nodes(analysis.training, analysis.main)
        behind = find_variables_behind(nodes, analysis.training.variables, analysis.facts)
        for node in nodes:
            rule = rule_of(node, analysis.facts)
            if rule is None or not rule.is_contraction or len(rule.terms[0]) != 2:
                continue
            sources = [behind.get(tensor.name, frozenset()) for tensor in node.inputs]
            for operand, other in (rule.terms[0], rule.terms[0][::-1]):
                if len(sources[operand]) == 1 and not sources[other]:
                    (variable,) = sources[operand]
                    self._split_layer(node, rule, operand, other, variable)

    def _split_layer(
        self, node: gs.Node, rule: ShardingRule, operand: int, other: int, variable: str
    ) -> None:
        training = self.analysis.training
        dims = rule.inputs[operand]
        if variable not in training.gradients or len(training.variables[variable].shape) != 2 or dims is None:
            return
        if len(dims) != 2:
            return
        columns = [factor for axis in dims for factor in axis if rule.position_of(rule.outputs[0], factor)]
        if len(columns) != 1:
            return
        position, home_position = (
            rule.position_of(rule.outputs[0], columns[0]),
            rule.position_of(dims, columns[0]),
        )
        assert position is not None
        assert home_position is not None
        wish = Wish(Split(*position))
        home = self._home(node.inputs[operand], Split(*home_position))
        if home is not None and self._can(node, wish):
            self.weights.setdefault(variable, home)
            self.read.add(node.inputs[other].name)

    def _home(self, tensor: gs.Tensor, split: Split) -> Split | None:
        """Return where the variable behind a tensor has what the tensor has at `split`."""
        while tensor.name not in self.analysis.training.variables:
            if not tensor.inputs:
                return None
            node = tensor.inputs[0]
            rule = rule_of(node, self.analysis.facts)
            rule_and_factor = rule and rule.factor_at(rule.outputs[0], split.axis, split.outer)
            dims = rule_and_factor[0].inputs[0] if rule_and_factor else None
            position = (
                rule_and_factor[0].position_of(dims, rule_and_factor[1])
                if rule_and_factor and dims is not None
                else None
            )
            if position is None:
                return None
            tensor, split = node.inputs[0], Split(*position)
        shape = self._shape(tensor)
        home = self.mesh.nest_splits(Layout("worker", split), shape)
        (nested,) = home.placements
        return nested if isinstance(nested, Split) and self.mesh.divides(home, shape) else None

    def follow_weights(self) -> None:
        """Keep what is read of the weights in parts, up to and with the products that read them."""
        known = dict(self.weights)
        for node in self.analysis.training.graph.nodes:
            rule = rule_of(node, self.analysis.facts)
            at = next((i for i, tensor in enumerate(node.inputs) if tensor.name in known), None)
            if rule is None or at is None or node.name not in self.analysis.main:
                continue
            dims, split = rule.inputs[at], known[node.inputs[at].name]
            rule_and_factor = None if dims is None else rule.factor_at(dims, split.axis, split.outer)
            if rule_and_factor is None or not (rule.is_contraction or rule.moves or len(node.inputs) == 1):
                continue
            position = rule_and_factor[0].position_of(rule_and_factor[0].outputs[0], rule_and_factor[1])
            wish = Wish(split, at) if position is None else Wish(Split(*position))
            if self._can(node, wish):
                self.wishes[node.name] = wish
                if position is not None and not rule.is_contraction:
                    known[node.outputs[0].name] = Split(*position)

    def find_biases(self) -> dict[str, Split]:
        """Return the parameters that all their readers want in parts, now that products are split."""
        homes = {name: Layout("worker", split) for name, split in self.weights.items()}
        wishes = {name: {REPLICAS: wish} for name, wish in self.wishes.items()}
        graph = lay_out(self.analysis, {}, Configuration(Meshes((self.mesh,)), homes, wishes))
        return follow_readers(graph, REPLICAS, self.weights)

    def trace_back(self, tensor: str, split: Split) -> None:
        """Let the sums that a gradient comes from be made in parts, as the gradient is kept."""
        producers = {t.name: node for node in self.analysis.training.graph.nodes for t in node.outputs}
        pending = [(tensor, split)]
        while pending:
            name, place = pending.pop()
            node = producers.get(name)
            rule = None if node is None else rule_of(node, self.analysis.facts)
            if node is None or rule is None or node.outputs[0].name != name or node.name in self.wishes:
                continue
            rule_and_factor = rule.factor_at(rule.outputs[0], place.axis, place.outer)
            if rule_and_factor is None:
                continue
            if rule.combine:
                if node.name in self.analysis.main and self._can(node, Wish(place)):
                    self.wishes[node.name] = Wish(place)
                    self._share_gathered(node, rule_and_factor)
                continue
            for operand, dims in zip(node.inputs, rule.inputs, strict=True):
                position = None if dims is None else rule_and_factor[0].position_of(dims, rule_and_factor[1])
                if position is not None:
                    pending.append((operand.name, Split(*position)))

    def _share_gathered(self, node: gs.Node, rule_and_factor: tuple[ShardingRule, str]) -> None:
        """Move whole what a dense layer has gathered, where the way back reads it moved."""
        for tensor, dims in zip(node.inputs, rule_and_factor[0].inputs, strict=True):
            if dims is None or rule_and_factor[0].position_of(dims, rule_and_factor[1]) is not None:
                continue
            chain: list[str] = []
            while tensor.inputs and tensor.name not in self.read:
                mover = tensor.inputs[0]
                rule = rule_of(mover, self.analysis.facts)
                if rule is None or not rule.moves or mover.name in self.wishes:
                    break
                chain.append(mover.name)
                tensor = mover.inputs[0]
            if tensor.name in self.read:
                self.wishes.update(dict.fromkeys(chain, Wish(None)))

    def _can(self, node: gs.Node, wish: Wish) -> bool:
        known = node_facts(node, self.analysis.facts, self.analysis.zeros)
        decision = decide_by_wish(known, wish, self.mesh.size(REPLICAS))
        return decision is not None and divides(self.mesh, known, decide_axes(self.mesh, [decision]))

    def _shape(self, tensor: gs.Tensor) -> tuple[int, ...]:
        return self.analysis.facts.shape(tensor.name)
