"""What goes with each place of a line of forward nodes: work of a micro-batch, and updates at its end.

    place 0   MatMul ──────── ahead      place 1   ...
              its gradients ─ back, or behind if no other place waits for them
              the update ──── once a step

Replicas divide samples, ranks along `tensor` all of it; the weights of a place are those of its replica.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import Places
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.scheduling.segment_work import PACKING_OPS
from partc.passes.search.operators.forward_nodes import find_variables_behind, forward_nodes

ADDITIONS = frozenset({"Add", "Sum"})
ADDITION_TRAFFIC = 3  # memory bytes per byte added

When = Literal["ahead", "back", "behind"]  # forward, back, and back with nobody waiting for it
TimedWork = tuple[int, When, float]  # place in the line, when, seconds


class NodeSeconds(Protocol):
    """Tells what a node takes on a worker."""

    def __call__(self, flops: int, nbytes: int, packed_bytes: int = 0, /) -> float:
        """Return seconds. `nbytes`: that it reads and writes, `packed_bytes`: of these, that it packs."""
        ...


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A node: its place in the line, when it runs, what it computes, its bytes of weights or of samples.

    `packed_bytes`: of a weight that a product packs, of every micro-batch anew.
    """

    place: int
    when: When
    flops: int
    weight_bytes: int
    sample_bytes: int
    packed_bytes: int

    def seconds(self, node_s: NodeSeconds, samples: int, tensor: int) -> float:
        """Return what a rank takes for its part: of so many of samples, and along `tensor`."""
        nbytes = (self.sample_bytes // samples + self.weight_bytes) // tensor
        return node_s(self.flops // samples // tensor, nbytes, self.packed_bytes // tensor)


@dataclass(frozen=True, slots=True)
class LineTimes:
    """Seconds of a rank's micro-batch at each place of a line of nodes.

    both    of all that goes with the place
    ahead   of that, on the way forward
    behind  of that, what no other stage waits for: gradients of weights
    """

    both: Sequence[float]
    ahead: Sequence[float]
    behind: Sequence[float]


@dataclass(frozen=True)
class LineWork:
    """All work of a step by places of its line.

    nodes           of the main computation
    gradient_bytes  of each place's variables
    update_bytes    what each place's updates read and write: of tables the rows that were read
    when_of         nodes that run forward, and those that nobody waits for
    """

    nodes: Sequence[NodeWork]
    gradient_bytes: Sequence[int]
    update_bytes: Sequence[int]
    when_of: Mapping[str, When]

    @property
    def places(self) -> int:
        """Return how many places there are."""
        return len(self.gradient_bytes)

    def each(self, node_s: NodeSeconds, shares: int, tensor: int, microbatches: int) -> Iterator[TimedWork]:
        """Yield place, when, and seconds of a rank's micro-batch: nodes, and gradients that are added up."""
        for work in self.nodes:
            yield work.place, work.when, work.seconds(node_s, shares * microbatches, tensor)
        for place, nbytes in enumerate(self.gradient_bytes):
            if microbatches > 1 and nbytes:
                yield place, "behind", node_s(0, ADDITION_TRAFFIC * nbytes // tensor)

    def updates(self, node_s: NodeSeconds, parts: int, microbatches: int) -> Iterator[TimedWork]:
        """Yield what the updates of a rank's part of variables take, as if each micro-batch had its share."""
        for place, nbytes in enumerate(self.update_bytes):
            yield place, "behind", (node_s(0, nbytes // parts) if nbytes else 0.0) / microbatches

    def times(
        self, node_s: NodeSeconds, shares: int = 1, tensor: int = 1, microbatches: int = 1
    ) -> LineTimes:
        """Return the seconds of a micro-batch, each with its part of what updates take."""
        updates = self.updates(node_s, tensor, microbatches)
        return add_up([*self.each(node_s, shares, tensor, microbatches), *updates], self.places)


def add_up(parts: Sequence[TimedWork], places: int) -> LineTimes:
    """Return the seconds of each place."""
    both, ahead, behind = ([0.0] * places for _ in range(3))
    of_when: dict[When, list[float]] = {"ahead": ahead, "behind": behind}
    for place, when, seconds in parts:
        both[place] += seconds
        if when in of_when:
            of_when[when][place] += seconds
    return LineTimes(both, ahead, behind)


def line_work(analysis: Analysis, places: Places, count: int) -> LineWork:
    """Return what goes with each of so many places. `places`: of all nodes and variables."""
    when_of: dict[str, When] = {node.name: "behind" for node in _unawaited(analysis, places)}
    when_of |= {node.name: "ahead" for node in forward_nodes(analysis.training, analysis.main)}
    gradients = _gradient_bytes(analysis, places, count)
    updates = _update_bytes(analysis, places, gradients)
    return LineWork(tuple(_count_work(analysis, places, when_of)), gradients, updates, when_of)


def _count_work(analysis: Analysis, places: Places, when_of: Mapping[str, When]) -> Iterator[NodeWork]:
    """Yield the nodes of the main computation whose values data decide."""
    facts, training = analysis.facts, analysis.training
    main = [node for node in training.graph.nodes if node.name in analysis.main]
    weights = {name for name, of in find_variables_behind(main, training.variables, facts).items() if of}
    weights |= {g.dense for g in training.gradients.values() if g.dense is not None}
    for node in main:
        rule, weight_bytes, sample_bytes = rule_of(node, facts), 0, 0
        if all(facts.fixed_value(tensor.name) is not None for tensor in node.outputs):
            continue
        for tensor in (*node.inputs, *node.outputs):
            is_table = rule is not None and rule.indexed and tensor.name in weights
            nbytes = facts.nbytes(tensor.name) if tensor.name and not is_table else 0
            weight_bytes += nbytes if tensor.name in weights else 0
            sample_bytes += 0 if tensor.name in weights else nbytes
        packs = node.op in PACKING_OPS and node.inputs[1].name in weights
        yield NodeWork(
            places.nodes[node.name],
            when_of.get(node.name, "back"),
            rule.flops if rule is not None else 0,
            weight_bytes,
            sample_bytes,
            facts.nbytes(node.inputs[1].name) if packs else 0,
        )


def _gradient_bytes(analysis: Analysis, places: Places, count: int) -> list[int]:
    """Return the bytes of the gradients of the variables at each of so many places."""
    nbytes_of = [0] * count
    for parameter, gradient in analysis.training.gradients.items():
        name = gradient.dense or gradient.rows
        nbytes_of[places.variables[parameter]] += analysis.facts.nbytes(name) if name else 0
    return nbytes_of


def _update_bytes(analysis: Analysis, places: Places, gradients: Sequence[int]) -> list[int]:
    nbytes_of = list(gradients)
    for name in analysis.training.variables:
        gradient = analysis.training.gradients.get(analysis.followers.get(name) or name)
        rows = gradient.rows if gradient is not None and gradient.dense is None else None
        nbytes_of[places.variables[name]] += 2 * analysis.facts.nbytes(rows or name)
    return nbytes_of


def _unawaited(analysis: Analysis, places: Places) -> list[gs.Node]:
    """Return what leads to gradients of variables alone, which no other place waits for."""
    main = [node for node in analysis.training.graph.nodes if node.name in analysis.main]
    ahead = {node.name for node in forward_nodes(analysis.training, analysis.main)}
    readers: dict[str, list[gs.Node]] = {}
    unawaited: dict[str, gs.Node] = {}
    for node in reversed(main):
        behind = [reader for tensor in node.outputs for reader in readers.get(tensor.name, ())]
        is_awaited = any(
            reader.name not in unawaited
            or (reader.op not in ADDITIONS and places.nodes[reader.name] != places.nodes[node.name])
            for reader in behind
        )
        if node.name not in ahead and not is_awaited:
            unawaited[node.name] = node
        for tensor in node.inputs:
            readers.setdefault(tensor.name, []).append(node)
    return list(unawaited.values())
