"""Compute of each part of a concatenation what its readers compute of the whole.

before   x = Concat (a, b)           after   m = Max (ReduceMax (a), ReduceMax (b))
         m = ReduceMax (x)                   y = Sub (a, m)
         c = Sub (x, m)                      z = Sub (b, m)
         y, z = Split (c)

An axis that joins parts of different sizes stays whole, and with it all that is computed along it: the scores
of a sampled softmax are that of the word itself beside those of thousands of others. Apart, each part may be
split.

What can be computed part by part is what the sharding rules say can be computed rank by rank: points, sums
and extremes. Slice and Split pick parts; the Pad that is a Slice's gradient is a part between zeros.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, pairwise

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.expand_normalised import can_expand
from partc.passes.graph.facts import Facts
from partc.passes.graph.node_writer import NodeWriter
from partc.passes.graph.reachability import drop_unread_nodes, readers_of, reads_of
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.rules.rules_parts import cuts_of
from partc.passes.rules.sharding_rules import rule_of

# Those whose primitives sum along the axis, or pick: others take means of it, or labels that count all of it.
NORMALISED = frozenset({"Softmax", "LogSoftmax", "ReduceLogSumExp", "ReduceLogSum", "ReduceL2"})
JOINED_BY = {"sum": "Sum", "max": "Max", "min": "Min"}


@dataclass(frozen=True, slots=True)
class Parted:
    """A tensor that is had in parts along an axis; `zeros` are those that are zero everywhere."""

    axis: int
    zeros: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Apart:
    """How a node does without the whole.

    picks  the parts that are its results; empty: it is computed part by part
    made   its result in parts; None: one result, joined by the op `join`
    zeros  the parts of which a joined result has nothing
    """

    picks: tuple[int, ...] = ()
    made: Parted | None = None
    join: str = ""
    zeros: frozenset[int] = frozenset()


@dataclass
class Separation:
    """What is computed of each part of one concatenation, and the nodes that need the whole of something.

    tensors  those that are had in parts
    apart    node -> how it does without the whole
    whole    the nodes that read the whole of a tensor that is had in parts
    """

    concat: gs.Node
    axis: int
    sizes: tuple[int, ...]
    tensors: dict[str, Parted] = field(default_factory=dict)
    apart: dict[str, Apart] = field(default_factory=dict)
    whole: list[gs.Node] = field(default_factory=list)

    @property
    def is_useful(self) -> bool:
        """Tell whether nothing reads the concatenation itself, and something picks or joins its parts."""
        joined = self.concat.outputs[0].name
        read = {tensor.name for node in self.whole for tensor in reads_of(node)} & self.tensors.keys()
        return (
            any(how.made is None for how in self.apart.values())
            and joined not in read
            and not any(self.tensors[name].zeros for name in read)
        )

    def part_between(self, start: int, stop: int) -> int | None:
        """Return the part that has the entries from `start` to `stop` of the joined axis."""
        ends = pairwise((0, *accumulate(self.sizes)))
        return next((part for part, range_ in enumerate(ends) if range_ == (start, stop)), None)


# ---------------------------------------------------------------- what can be had in parts


def can_separate(found: Separation, facts: Facts) -> bool:
    """Tell whether nothing need read the concatenation, once what `to_expand` names is said in primitives."""
    readers, names = found.concat.outputs[0].outputs, to_expand(found, facts)
    return bool(readers) and all(node.name in found.apart or node.name in names for node in readers)


def to_expand(found: Separation, facts: Facts) -> set[str]:
    """Return the nodes that need the whole, and whose primitives do not."""
    return {node.name for node in found.whole if node.op in NORMALISED and can_expand(node, facts)}


class ReadOrder:
    """The sorted nodes of a graph, who reads which tensor, and which are Pads, by their places."""

    def __init__(self, graph: gs.Graph) -> None:
        self.nodes = tuple(graph.nodes)
        self.readers = readers_of(self.nodes)
        self.pads = [place for place, node in enumerate(self.nodes) if node.op == "Pad"]


def follow_parts(order: ReadOrder, concat: gs.Node, facts: Facts) -> Separation:
    """Return what can be computed of a concatenation's parts, and what cannot."""
    joined = concat.outputs[0].name
    axis = concat.attrs["axis"] % len(facts.shape(joined))
    sizes = tuple(facts.shape(tensor.name)[axis] for tensor in concat.inputs)
    found = Separation(concat, axis, sizes, {joined: Parted(axis)})
    sliced: set[int] = set()
    waiting, last = list(order.readers.get(joined, ())), -1
    while waiting:
        place = heappop(waiting)
        if place == last:  # it reads two of them
            continue
        last, node = place, order.nodes[place]
        reached = _follow(found, node, sliced, facts)
        following = [reader for name in reached for reader in order.readers.get(name, ())]
        if node.op == "Slice" and node.name in found.apart:
            following += [pad for pad in order.pads if pad > place]
        for reader in following:
            heappush(waiting, reader)
    return found


def _follow(found: Separation, node: gs.Node, sliced: set[int], facts: Facts) -> list[str]:
    """Note how a node does without the whole, or that it does not; return what is had in parts by it.

    `sliced`: the parts that Slices have picked, which a Pad may put between zeros.
    """
    joined = found.concat.outputs[0].name
    if node.op == "Pad" and facts.shape(node.outputs[0].name) == facts.shape(joined):
        if (part := _padded_part(found, node, facts)) not in sliced:
            return []
        made = Parted(found.axis, frozenset(range(len(found.sizes))) - {part})
    elif not any(tensor.name in found.tensors for tensor in reads_of(node)):
        return []
    elif (how := _apart(found, node, facts)) is None:
        found.whole.append(node)
        return []
    else:
        found.apart[node.name] = how
        if node.op == "Slice":
            sliced.update(how.picks)
        if how.made is None:
            return []
        made = how.made
    found.tensors[node.outputs[0].name] = made
    return [node.outputs[0].name]


def _apart(found: Separation, node: gs.Node, facts: Facts) -> Apart | None:
    parted = {n: found.tensors[t.name] for n, t in enumerate(node.inputs) if t.name in found.tensors}
    if picks := _picks(found, node, parted.get(0), facts):
        return Apart(picks)
    rule = rule_of(node, facts)
    if rule is None or rule.shape_inputs or rule.bounds or len(node.outputs) > 1:
        return None
    factors = {(rule.inputs[n] or ())[how.axis : how.axis + 1] for n, how in parted.items()}
    factor = _one_factor(factors)
    reading = {n for n, dims in enumerate(rule.inputs) if any(factor in axis for axis in dims or ())}
    if factor is None or factor in rule.whole | rule.indexed or reading != parted.keys():
        return None
    numbers = range(len(found.sizes))
    absent = {part: {n for n, how in parted.items() if part in how.zeros} for part in numbers}
    zeros = frozenset(part for part in numbers if _is_zero(rule.terms, absent[part] - rule.divides))
    made = facts.shape(node.outputs[0].name)
    alike = {n for n in parted if facts.shape(node.inputs[n].name) == made}
    if len(zeros) == len(numbers) or any(
        absent[part] and (rule.combine or not alike - absent[part]) for part in numbers if part not in zeros
    ):
        return None  # a zero of one entry cannot stand for the part
    place = rule.position_of(rule.outputs[0], factor)
    if place is not None:
        return Apart(made=Parted(place[0], zeros))
    how = rule.combine.get(factor)
    is_float = np.issubdtype(facts.dtypes[node.outputs[0].name], np.floating)
    if how not in JOINED_BY or (how != "sum" and zeros) or not is_float:
        return None
    return Apart(join=JOINED_BY[how], zeros=zeros)


def _one_factor(factors: Iterable[tuple[tuple[str, ...], ...]]) -> str | None:
    """Return the factor that is all of the joined axis, in every operand."""
    names = {axis for dims in factors for axis in dims or ((),)}
    (axis,) = names if len(names) == 1 else ((),)
    return axis[0] if len(axis) == 1 else None


def _is_zero(terms: Sequence[Sequence[int]], zeros: set[int]) -> bool:
    return bool(terms) and all(not zeros.isdisjoint(term) for term in terms)


def _picks(found: Separation, node: gs.Node, parted: Parted | None, facts: Facts) -> tuple[int, ...]:
    """Return the parts that are the results of a Slice or Split, or none."""
    if parted is None or parted.zeros:
        return ()
    if node.op == "Slice":
        part = _cut_part(found, node, parted.axis, facts)
        return () if part is None else (part,)
    is_along = node.op == "Split" and node.attrs.get("axis", 0) % _rank(node, facts) == parted.axis
    sizes = [facts.shape(tensor.name)[parted.axis] for tensor in node.outputs] if is_along else []
    return tuple(range(len(sizes))) if tuple(sizes) == found.sizes else ()


def _rank(node: gs.Node, facts: Facts) -> int:
    return len(facts.shape(node.inputs[0].name))


def _cut_part(found: Separation, node: gs.Node, axis: int, facts: Facts) -> int | None:
    cuts = cuts_of(node, facts)
    others = [cut for at, cut in cuts.items() if at != axis]
    if axis not in cuts or any((cut.start, cut.stop) != (0, cut.size) for cut in others):
        return None
    return found.part_between(cuts[axis].start, cuts[axis].stop)


def _padded_part(found: Separation, node: gs.Node, facts: Facts) -> int | None:
    """Return the part that a Pad puts between zeros."""
    value = facts.value(node.inputs[2].name) if len(node.inputs) > 2 and node.inputs[2].name else np.zeros(1)
    cut = cuts_of(node, facts).get(found.axis)
    if cut is None or value is None or np.any(value):
        return None
    return found.part_between(-cut.start, cut.size - cut.start)


# ---------------------------------------------------------------- writing it


def separate(training: TrainingGraph, found: Separation, facts: Facts) -> dict[str, list[str]]:
    """Compute parts apart, in place; return node -> the names of those in its place.

    What is read whole keeps its name, type and shape. Facts must be inferred again.
    """
    writer = _PartWriter(training, found, facts)
    for node in list(training.graph.nodes):
        writer.write(node)
    writer.join(writer.named & found.tensors.keys())
    training.graph.nodes = writer.nodes
    drop_unread_nodes(training.graph, writer.named)
    return writer.written


class _PartWriter:
    """Writes the nodes of a graph again, in order, those of parts in place of those of the whole."""

    def __init__(self, training: TrainingGraph, found: Separation, facts: Facts) -> None:
        graph = training.graph
        self.named = training.named_tensors
        self.nodes: list[gs.Node] = []
        self.written: dict[str, list[str]] = {}
        self._found = found
        self._facts = facts
        self._taken = {*graph.tensors(), *(node.name for node in graph.nodes)}
        self._parts: dict[str, list[gs.Tensor | None]] = {}
        self._whole: dict[str, gs.Tensor] = {}

    def write(self, node: gs.Node) -> None:
        """Write a node, or what stands in its place."""
        how = self._found.apart.get(node.name)
        results = list(node.outputs)
        if how is None and node.name != self._found.concat.name:
            self.join(tensor.name for tensor in reads_of(node))
            self.nodes.append(node)
            if node.op == "Pad" and (padded := self._found.tensors.get(results[0].name)):
                self._parts[results[0].name] = [
                    None if part in padded.zeros else node.inputs[0] for part in self._numbers()
                ]
            return
        operands = list(node.inputs)
        node.inputs.clear()
        node.outputs.clear()
        if how is None:
            self._have(results[0], list(operands))
        elif how.picks:
            self._pick(node, self._parts[operands[0].name], zip(how.picks, results, strict=True))
        else:
            self._compute(node, how, operands, results[0])

    def join(self, names: Iterable[str]) -> None:
        """Write the concatenation of what is to be read whole, where it is not there yet."""
        for name in dict.fromkeys(names):
            if name in self._whole:
                axis = self._found.tensors[name].axis
                at = self._writer(self._found.concat)
                parts = [part for part in self._parts[name] if part is not None]
                at.op("Concat", *parts, out=self._whole.pop(name), axis=axis)
                self._keep(self._found.concat, at)

    def _have(self, result: gs.Tensor, parts: list[gs.Tensor | None]) -> None:
        self._parts[result.name] = parts
        self._whole[result.name] = result

    def _pick(
        self, node: gs.Node, parts: Sequence[gs.Tensor | None], picked: Iterable[tuple[int, gs.Tensor]]
    ) -> None:
        at = self._writer(node)
        for part, result in picked:
            tensor = parts[part]
            assert tensor is not None
            for reader in list(result.outputs):
                reader.inputs = [tensor if read is result else read for read in reader.inputs]
            if result.name in self.named:
                at.op("Identity", tensor, out=result)
        self._keep(node, at)

    def _compute(self, node: gs.Node, how: Apart, operands: Sequence[gs.Tensor], result: gs.Tensor) -> None:
        at = self._writer(node)
        dtype = self._facts.dtypes[result.name]
        zeros = how.zeros if how.made is None else how.made.zeros
        parts: list[gs.Tensor | None] = []
        for part in self._numbers():
            if part in zeros:
                parts.append(None)
                continue
            read = [self._operand(at, tensor, part) for tensor in operands]
            parts.append(at.op(node.op, *read, dtype=dtype, domain=node.domain, **node.attrs))
        if how.made is not None:
            self._have(result, parts)
            self._declare(result.name, how.made.axis, parts)
        else:
            at.op(how.join, *(part for part in parts if part is not None), out=result)
        self._keep(node, at)

    def _declare(self, whole: str, axis: int, parts: Sequence[gs.Tensor | None]) -> None:
        """Tell the shapes of parts, which inference does not find behind sizes that a step computes."""
        if whole in self._facts.fixed_shapes:
            shape = list(self._facts.shape(whole))
            for size, tensor in zip(self._found.sizes, parts, strict=True):
                if tensor is not None:
                    tensor.shape = [*shape[:axis], size, *shape[axis + 1 :]]

    def _operand(self, at: NodeWriter, tensor: gs.Tensor, part: int) -> gs.Tensor:
        """Return what a node reads of a part: a zero of one entry stands for zeros, and is broadcast."""
        if tensor.name not in self._found.tensors:
            return tensor
        mine = self._parts[tensor.name][part]
        return mine if mine is not None else at.scalar(0, self._facts.dtypes[tensor.name])

    def _numbers(self) -> range:
        return range(len(self._found.sizes))

    def _writer(self, node: gs.Node) -> NodeWriter:
        return NodeWriter(self._taken, node.name)

    def _keep(self, node: gs.Node, at: NodeWriter) -> None:
        self.nodes += at.nodes
        self.written.setdefault(node.name, []).extend(written.name for written in at.nodes)
