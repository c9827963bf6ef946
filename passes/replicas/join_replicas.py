"""Follow what replicas compute through a training step: how does the whole batch's tensor come of theirs?

    data on samples: beside     variables: alike     then node by node, by the sharding rules and by sizes

Behind a gradient, where replicas meet, everybody has the same: updates read it as alike. What this finds is
true of every batch: nothing is run but what follows from sizes.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.reachability import reads_of
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.replicas.batch_relation import ALIKE, BatchRelation, coupled
from partc.passes.replicas.join_by_rule import Operands, join_by_rule
from partc.passes.replicas.join_sizes import (
    Sizes,
    compute_sizes,
    grown_axis,
    grown_shape,
    is_uniform_along,
    joined_value,
    sizes_of_shape,
    spell_out,
)
from partc.passes.roles.find_roles import gradient_tensors
from partc.passes.roles.find_zeros import find_zeros
from partc.passes.rules.rules_parts import equal_parts
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import rule_of
from partc.runtime.plan.variables import DrawnInput


def join_replicas(
    training: TrainingGraph, facts: Facts, main: Set[str], replicas: int = 2
) -> dict[str, BatchRelation]:
    """Return how every tensor of the step follows from so many replicas'.

    `main`: the names of the nodes before the gradients. The others read gradients as alike.
    """
    zeros = set(find_zeros(training.graph, facts))
    walk = _Walk(training, facts, frozenset(main), zeros, frozenset({1, 2, replicas}))
    return walk.run()


@dataclass
class _Walk:
    training: TrainingGraph
    facts: Facts
    main: frozenset[str]
    zeros: set[str]  # tensors that are zero everywhere
    batches: frozenset[int]  # for so many times the batch, what follows from sizes is computed
    joined: dict[str, BatchRelation] = field(default_factory=dict)
    sizes: dict[str, Sizes] = field(default_factory=dict)  # what follows from sizes
    uniform: dict[tuple[str, int, int, int], bool] = field(default_factory=dict)
    gradients: frozenset[str] = frozenset()  # gradients, where replicas meet
    fixed_batches: frozenset[int] = frozenset()  # sizes of batches that constants may stand for
    producers: Mapping[str, gs.Node] = field(default_factory=dict)
    tensors: Mapping[str, gs.Tensor] = field(default_factory=dict)

    def run(self) -> dict[str, BatchRelation]:
        graph = self.training.graph
        self.gradients = frozenset(t for g in self.training.gradients.values() for t in gradient_tensors(g))
        self.producers = {tensor.name: node for node in graph.nodes for tensor in node.outputs}
        self.tensors = graph.tensors()
        self.fixed_batches = self._find_fixed_batches()
        self._place_inputs()
        for node in graph.nodes:
            for tensor, joined in zip(node.outputs, self._join(node), strict=True):
                self.joined[tensor.name] = joined
        return self.joined

    def _place_inputs(self) -> None:
        for name, entry in (self.training.data_inputs | self.training.drawn_inputs).items():
            if entry.sample_axis is not None:
                outer = entry.outer if isinstance(entry, DrawnInput) else 1
                self.joined[name] = BatchRelation("beside", 0, entry.sample_axis, outer)
        for name in self.training.shard_inputs:
            self.joined[name] = coupled(f"input {name!r} tells replicas apart")

    def _find_fixed_batches(self) -> frozenset[int]:
        """Return the sizes of data inputs that the graph's constants were made for."""
        sizes = {
            data.shape[data.sample_axis]
            for name, data in self.training.data_inputs.items()
            if data.sample_axis is not None
            and data.shape[data.sample_axis] == self.facts.shape(name)[data.sample_axis]
        }
        return frozenset(size for size in sizes if isinstance(size, int))

    def _read(self, tensor: str, node: gs.Node) -> BatchRelation:
        if tensor in self.gradients and node.name not in self.main:
            return ALIKE
        return self.joined.get(tensor, ALIKE)

    def _join(self, node: gs.Node) -> list[BatchRelation]:
        read = [self._read(tensor.name, node) for tensor in reads_of(node)]
        if node.op in ("Shape", "Size"):
            return [self._join_shape(node)]
        spoiled = next((joined for joined in read if joined.kind == "coupled"), None)
        if spoiled is not None:
            return [spoiled for _ in node.outputs]
        if any(tensor.name in self.sizes for tensor in node.inputs):
            sizes = self._join_sizes(node)
            if sizes is not None:
                return sizes
        if all(joined == ALIKE for joined in read):
            return [ALIKE for _ in node.outputs]
        return self._join_tensors(node)

    # ------------------------------------------------------------ sizes

    def _join_shape(self, node: gs.Node) -> BatchRelation:
        source = self._read(node.inputs[0].name, node)
        shape = grown_shape(node.inputs[0].name, source, self.facts, self.batches)
        if shape is None:
            return (
                source if source.kind == "coupled" else coupled(f"node {node.name!r} reads a size from data")
            )
        return self._grown(node, node.outputs[0].name, sizes_of_shape(node, shape))

    def _join_sizes(self, node: gs.Node) -> list[BatchRelation] | None:
        """Return what becomes of numbers that follow from sizes alone."""
        sizes_of = compute_sizes(node, self.sizes, self.facts, self.training.opset)
        return (
            None if sizes_of is None else [self._grown(node, name, sizes) for name, sizes in sizes_of.items()]
        )

    def _grown(self, node: gs.Node, name: str, sizes: Sizes) -> BatchRelation:
        self.sizes[name] = sizes
        joined = ALIKE if sizes.is_same else joined_value(node, sizes)
        return replace(joined, is_counted=joined.power != 0)

    def _grows(self, tensor: str) -> bool:
        return tensor in self.sizes and not self.sizes[tensor].is_same

    # ------------------------------------------------------------ tensors

    def _join_tensors(self, node: gs.Node) -> list[BatchRelation]:
        parts = equal_parts(node, self.facts)
        rule = parts or rule_of(node, self.facts)
        if rule is None:
            why = f"node {node.name!r} ({node.op}) has no sharding rule: it may take samples together"
            return [coupled(why) for _ in node.outputs]
        joined = [self._read(tensor.name, node) if tensor.name else ALIKE for tensor in node.inputs]
        spelled_shapes = [index for index in rule.shape_inputs if self._grows(node.inputs[index].name)]
        ignored = set(rule.shape_inputs) | {
            index
            for index, tensor in enumerate(node.inputs)
            if parts is not None and tensor.name in self.sizes and self.sizes[tensor.name].is_proportional
        }
        joined = [ALIKE if index in ignored else entry for index, entry in enumerate(joined)]
        operands = Operands(
            node,
            rule,
            joined,
            self.zeros,
            self._is_uniform,
            self._grown_axis(node, rule),
            frozenset() if spelled_shapes else self.fixed_batches,
        )
        sized = [
            index
            for index, tensor in enumerate(node.inputs)
            if rule.inputs[index] is None and index not in ignored and self._grows(tensor.name)
        ]
        is_unclear = bool(spelled_shapes) and operands.grown is None
        if is_unclear or sized or any(entry.kind == "sizes" for entry in joined):
            return [operands.refuse("is told the size of the batch") for _ in node.outputs]
        if spelled_shapes and not any(entry.kind == "beside" for entry in joined):
            results = [self._stretch(operands)]
        else:
            if rule.terms and all(any(operands.is_zero(index) for index in term) for term in rule.terms):
                self.zeros.update(tensor.name for tensor in node.outputs)
            results = join_by_rule(operands)
        is_counted = any(entry.is_counted for entry in joined)
        return [replace(result, is_counted=is_counted) for result in results]

    def _grown_axis(self, node: gs.Node, rule: ShardingRule) -> int | None:
        """Return the output's one axis that a spelled shape makes longer for a larger batch."""
        source = node.inputs[0].name
        for index in rule.shape_inputs:
            shape = self._value(node.inputs[index].name)
            source_shape = grown_shape(source, self._read(source, node), self.facts, self.batches)
            if shape is not None and source_shape is not None:
                axis = grown_axis(spell_out(shape, source_shape))
                return None if axis is None else axis + len(rule.outputs[0]) - len(shape.once)
        return None

    def _value(self, tensor: str) -> Sizes | None:
        value = self.facts.value(tensor)
        fixed = None if value is None else Sizes(dict.fromkeys(self.batches, value))
        return self.sizes.get(tensor) or fixed

    def _stretch(self, operands: Operands) -> BatchRelation:
        """Return what Expand and ConstantOfShape make of a shape that has grown."""
        rule, axis = operands.rule, operands.grown
        joined = join_by_rule(operands)[0]
        if axis is None or joined.kind != "alike":
            return operands.refuse("is told the size of the batch")
        read = {factor for dims in rule.inputs for place in dims or () for factor in place}
        if read & set(rule.outputs[0][axis]):
            return operands.refuse("is told the size of the batch")
        return BatchRelation("beside", joined.power, axis, None)

    # ------------------------------------------------------------ equal entries

    def _is_uniform(self, tensor: str, axis: int, outer: int, size: int) -> bool:
        """Tell whether a tensor that holds no samples has equal entries for every place in the batch."""
        key = (tensor, axis, outer, size)
        if key not in self.uniform:
            self.uniform[key] = self._find_uniform(*key)
        return self.uniform[key]

    def _find_uniform(self, tensor: str, axis: int, outer: int, size: int) -> bool:
        value = self.facts.value(tensor)
        if value is None and isinstance(constant := self.tensors.get(tensor), gs.Constant):
            value = constant.values
        if value is not None:
            inner = value.shape[axis] // (outer * size)
            shape = (*value.shape[:axis], outer, size, inner, *value.shape[axis + 1 :])
            return is_uniform_along(value.reshape(shape), axis + 1)
        node = self.producers.get(tensor)
        rule = None if node is None else rule_of(node, self.facts)
        if node is None or rule is None:
            return False
        index = next(i for i, output in enumerate(node.outputs) if output.name == tensor)
        rule_and_factor = rule.factor_at(rule.outputs[index], axis, outer)
        if (
            rule_and_factor is None
            or rule_and_factor[1] in rule_and_factor[0].whole
            or rule_and_factor[0].sizes[rule_and_factor[1]] != size
        ):
            return False
        refined, factor = rule_and_factor
        places = [
            (operand.name, refined.position_of(dims, factor))
            for operand, dims in zip(node.inputs, refined.inputs, strict=True)
            if dims is not None
        ]
        return all(place is None or self._is_uniform(name, *place, size) for name, place in places)
