"""What goes with each place of a line of forward nodes: work of a micro-batch, and updates at its end.

    place 0   MatMul ──────── ahead      place 1   ...
              its gradients ─ back, or behind if no other place waits for them
              the update ──── once a step

Replicas divide samples, ranks along `tensor` all of it until layouts tell what of it they have whole; the
weights of a place are those of its replica.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import Places
from partc.passes.layouts.decisions import AxisDecision
from partc.passes.layouts.layouts import Partial, Replicate
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
class TensorParts:
    """What ranks along `tensor` divide by layouts: how nodes run that do, and variables that they share."""

    nodes: Mapping[str, AxisDecision]
    variables: Collection[str]


@dataclass(frozen=True, slots=True)
class PlaceBytes:
    """What the variables of a place have: of those that ranks along `tensor` share, and of all others."""

    divided: int = 0
    whole: int = 0

    def of_rank(self, tensor: int) -> int:
        """Return the bytes of a rank, where so many share them."""
        return self.divided // tensor + self.whole


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """What a node reads and writes: of weights and of samples, and of weights what a product packs.

    It packs them for every micro-batch anew.
    """

    weights: int = 0
    samples: int = 0
    packed: int = 0

    def of_rank(self, samples: int) -> int:
        """Return the bytes of a rank that has one of so many parts of the samples."""
        return self.samples // samples + self.weights


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A node: its place in the line, when it runs, what it computes, and what ranks along `tensor` divide.

    `is_divided`: what it computes is; of its bytes a rank has a part of those `divided`, all those `whole`.
    """

    place: int
    when: When
    flops: int
    divided: NodeBytes
    whole: NodeBytes
    is_divided: bool

    def seconds(self, node_s: NodeSeconds, samples: int, tensor: int) -> float:
        """Return what a rank takes for its part: of so many of samples, and along `tensor`."""
        flops = self.flops // samples // (tensor if self.is_divided else 1)
        nbytes = self.divided.of_rank(samples) // tensor + self.whole.of_rank(samples)
        return node_s(flops, nbytes, self.divided.packed // tensor + self.whole.packed)


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

    nodes      of the main computation
    gradients  of each place's variables
    updated    what each place's updates read and write: of tables the rows that were read
    when_of    nodes that run forward, and those that nobody waits for
    """

    nodes: Sequence[NodeWork]
    gradients: Sequence[PlaceBytes]
    updated: Sequence[PlaceBytes]
    when_of: Mapping[str, When]

    @property
    def places(self) -> int:
        """Return how many places there are."""
        return len(self.gradients)

    def gradient_bytes(self, tensor: int) -> list[int]:
        """Return what a rank has of each place's gradients."""
        return [place.of_rank(tensor) for place in self.gradients]

    def each(self, node_s: NodeSeconds, shares: int, tensor: int, microbatches: int) -> Iterator[TimedWork]:
        """Yield place, when, and seconds of a rank's micro-batch: nodes, and gradients that are added up."""
        for work in self.nodes:
            yield work.place, work.when, work.seconds(node_s, shares * microbatches, tensor)
        for place, nbytes in enumerate(self.gradient_bytes(tensor)):
            if microbatches > 1 and nbytes:
                yield place, "behind", node_s(0, ADDITION_TRAFFIC * nbytes)

    def updates(
        self, node_s: NodeSeconds, tensor: int, microbatches: int, sharers: int = 1
    ) -> Iterator[TimedWork]:
        """Yield what the updates of a rank's part of variables take, as if each micro-batch had its share.

        `sharers`: replicas that divide all variables.
        """
        for place, updated in enumerate(self.updated):
            nbytes = updated.of_rank(tensor) // sharers
            yield place, "behind", (node_s(0, nbytes) if nbytes else 0.0) / microbatches

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


def line_work(analysis: Analysis, places: Places, count: int, parts: TensorParts | None = None) -> LineWork:
    """Return what goes with each of so many places. `places`: of all nodes and variables.

    `parts`: None where ranks along `tensor` divide everything.
    """
    when_of: dict[str, When] = {node.name: "behind" for node in _unawaited(analysis, places)}
    when_of |= {node.name: "ahead" for node in forward_nodes(analysis.training, analysis.main)}
    gradients, updates = _gradient_bytes(analysis), _update_bytes(analysis)
    nodes = tuple(_count_work(analysis, places, when_of, None if parts is None else parts.nodes))
    shared = None if parts is None else parts.variables
    at_places = partial(_at_places, places=places, count=count, shared=shared)
    return LineWork(nodes, at_places(gradients), at_places(updates), when_of)


def _count_work(
    analysis: Analysis,
    places: Places,
    when_of: Mapping[str, When],
    along: Mapping[str, AxisDecision] | None,
) -> Iterator[NodeWork]:
    """Yield the nodes of the main computation whose values data decide."""
    facts, training = analysis.facts, analysis.training
    main = [node for node in training.graph.nodes if node.name in analysis.main]
    weights = {name for name, of in find_variables_behind(main, training.variables, facts).items() if of}
    weights |= {g.dense for g in training.gradients.values() if g.dense is not None}
    for node in main:
        if all(facts.fixed_value(tensor.name) is not None for tensor in node.outputs):
            continue
        rule = rule_of(node, facts)
        tables = weights if rule is not None and rule.indexed else frozenset()
        bytes_of = {True: Counter[str](), False: Counter[str]()}  # what ranks divide, and what each has whole
        for tensor, is_divided in _tensors(node, along):
            if not tensor.name or tensor.name in tables:
                continue
            kind = "weights" if tensor.name in weights else "samples"
            bytes_of[is_divided][kind] += facts.nbytes(tensor.name)
            if node.op in PACKING_OPS and tensor is node.inputs[1] and kind == "weights":
                bytes_of[is_divided]["packed"] += facts.nbytes(tensor.name)
        yield NodeWork(
            places.nodes[node.name],
            when_of.get(node.name, "back"),
            rule.flops if rule is not None else 0,
            NodeBytes(**bytes_of[True]),
            NodeBytes(**bytes_of[False]),
            along is None or (node.name in along and along[node.name].factor is not None),
        )


def _tensors(node: gs.Node, along: Mapping[str, AxisDecision] | None) -> Iterator[tuple[gs.Tensor, bool]]:
    """Yield what a node reads and writes, and whether ranks have parts of it."""
    tensors = (*node.inputs, *node.outputs)
    if along is None or node.name not in along:
        yield from ((tensor, along is None) for tensor in tensors)
        return
    placements = (*along[node.name].inputs, *along[node.name].outputs)
    for tensor, placement in zip(tensors, placements, strict=True):
        yield tensor, not isinstance(placement, Replicate | Partial)


def _at_places(
    nbytes_of: Mapping[str, int], places: Places, count: int, shared: Collection[str] | None
) -> list[PlaceBytes]:
    """Return the bytes of the variables at each of so many places. `shared`: None: ranks share them all."""
    divided, whole = [0] * count, [0] * count
    for name, nbytes in nbytes_of.items():
        is_shared = shared is None or name in shared
        (divided if is_shared else whole)[places.variables[name]] += nbytes
    return [PlaceBytes(*both) for both in zip(divided, whole, strict=True)]


def _gradient_bytes(analysis: Analysis) -> dict[str, int]:
    """Return the bytes of variables' gradients."""
    gradients = {name: each.dense or each.rows for name, each in analysis.training.gradients.items()}
    return {name: analysis.facts.nbytes(gradient) if gradient else 0 for name, gradient in gradients.items()}


def _update_bytes(analysis: Analysis) -> dict[str, int]:
    """Return the bytes that updates of variables read and write, gradients included."""
    nbytes_of = _gradient_bytes(analysis)
    for name in analysis.training.variables:
        gradient = analysis.training.gradients.get(analysis.followers.get(name) or name)
        rows = gradient.rows if gradient is not None and gradient.dense is None else None
        nbytes_of[name] = nbytes_of.get(name, 0) + 2 * analysis.facts.nbytes(rows or name)
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
