"""Split the weights of a model along a mesh axis, so that little is sent between its ranks.

Weights are taken in the order of the graph. For each, every dimension is tried: what its split makes of the
ops that follow, up to the next weight, is found by the sharding rules, and what they would send is counted.
Columns of one layer and rows of the next, heads of an attention and cells of a recurrence come out of this by
themselves, as in Megatron-LM (Shoeybi et al. 2019, section 3); biases follow the ops that read them.
"""

from collections import ChainMap, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.distribute import follow_readers
from partc.passes.layouts.aggregate_partials import MESSAGE_BYTES
from partc.passes.layouts.decide_layouts import decide_by_rule, decide_on_table
from partc.passes.layouts.decisions import AxisDecision
from partc.passes.layouts.layouts import Layout, Partial, Placement, Replicate, Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.rules.sharding_rules import node_facts, rule_of
from partc.passes.search.named.weight_layouts import WeightLayouts
from partc.passes.search.operators.forward_nodes import find_variables_behind, forward_nodes

LOOKAHEAD = 120  # ops behind a weight that are looked at
WHOLE_SHARE = 0.05  # of all weights' bytes: what may stay whole together
NODES_EVALUATED = 50_000  # in whole steps, for a weight's splits to be compared
MOST_UNEVEN = 1.25  # what the largest part has of the mean
MAX_BLOCKS = 8  # before a factor: gates of an LSTM, query, key and value

Placements = Mapping[str, Placement]


def split_weights(analysis: Analysis, mesh: Mesh, axis: int) -> dict[str, Split]:
    """Return where each variable is split along a mesh axis; those that stay whole are left out."""
    key = mesh.axes, axis
    if key not in analysis.weight_splits:
        analysis.weight_splits[key] = _split(analysis, mesh, axis)
    return dict(analysis.weight_splits[key])


def _split(analysis: Analysis, mesh: Mesh, axis: int) -> dict[str, Split]:
    searches = [_WeightSearch(analysis, mesh.size(axis), looks_ahead) for looks_ahead in (False, True)]
    for search in searches:
        search.run()
    if searches[0].chosen == searches[1].chosen:
        del searches[1]
    layouts = WeightLayouts(analysis, mesh, axis)
    weights = min([_improve(layouts, search) for search in searches], key=layouts.sent_bytes)
    followers = follow_readers(layouts.of(weights), axis, weights)
    return _split_heavy(layouts, weights | followers)


def _improve(layouts: WeightLayouts, search: "_WeightSearch") -> dict[str, Split]:
    """Try every other split of each kind of weight in the whole step, until none is better.

    The way back is included.
    """
    chosen = dict(search.chosen)
    least = layouts.sent_bytes(chosen)
    evaluations = NODES_EVALUATED // len(layouts.analysis.training.graph.nodes)
    kinds = deque(reversed(search.kinds()))  # what the last layers split comes back to all others
    since_better = 0
    while since_better < len(kinds):
        names = kinds[0]
        kinds.rotate(-1)
        since_better += 1
        for place in search.other_places(names, chosen):
            if evaluations == 0:
                return chosen
            evaluations -= 1
            others = {name: split for name, split in chosen.items() if name not in names}
            tried = others | ({} if place is None else dict.fromkeys(names, place))
            sent = layouts.sent_bytes(tried)
            if sent < least:
                least, chosen, since_better = sent, tried, 1
    return chosen


def _split_heavy(layouts: WeightLayouts, chosen: Mapping[str, Split]) -> dict[str, Split]:
    """Split what is whole yet, such as embeddings, where least is sent, until other matrices are light."""
    analysis, ranks = layouts.analysis, layouts.mesh.size(layouts.axis)
    variables = analysis.training.variables
    nbytes = {n: analysis.facts.nbytes(n) for n in analysis.training.gradients if len(variables[n].shape) > 1}
    whole = sorted(nbytes.keys() - chosen.keys(), key=lambda name: (-nbytes[name], name))  # largest first
    split = dict(chosen)
    for place, name in enumerate(whole):
        if sum(nbytes[other] for other in whole[place:]) <= WHOLE_SHARE * sum(nbytes.values()):
            break
        tried = [{**split, name: at} for at in _places_of(variables[name].shape, ranks)]
        split = min(tried, key=layouts.sent_bytes, default=split)
    return split


def _places_of(shape: Sequence[int], ranks: int, blocks: Collection[int] = (1,)) -> Iterator[Split]:
    """Yield the dimensions of a weight that make equal parts, then those that make nearly equal ones."""
    uneven: list[Split] = []
    for axis, size in enumerate(shape):
        for outer in blocks:
            if size % (outer * ranks) == 0:
                yield Split(axis, outer)
            elif size % outer == 0 and _is_nearly_equal(size // outer, ranks):
                uneven.append(Split(axis, outer, size // outer))
    yield from uneven


def _is_nearly_equal(entries: int, parts: int) -> bool:
    """Tell whether the largest part is little larger than the mean."""
    return -(-entries // parts) * parts <= MOST_UNEVEN * entries and entries >= parts


@dataclass
class _Outcome:
    """What a split of one weight makes of the ops that follow."""

    sent: int = 0  # bytes
    placements: dict[str, Placement] = field(default_factory=dict)


class _WeightSearch:
    """Walks along the main computation, choosing weights as they are met.

    `looks_ahead`: a weight sees what others make of the ops behind it; tables are chosen where an op sums
    their products; light weights stay whole where any split of them is sent for, such as those of a few
    key-value heads, which more ranks share.
    """

    def __init__(self, analysis: Analysis, ranks: int, looks_ahead: bool) -> None:
        self._analysis = analysis
        self._ranks = ranks
        self._looks_ahead = looks_ahead
        self._nodes = forward_nodes(analysis.training, analysis.main)
        self._readers: dict[str, list[int]] = {}
        for place, node in enumerate(self._nodes):
            for tensor in node.inputs:
                self._readers.setdefault(tensor.name, []).append(place)
        variables = analysis.training.variables
        self._behind = find_variables_behind(self._nodes, variables, analysis.facts)
        contracted = self._contracted()
        self._weights = {
            name: variable
            for name, variable in analysis.training.variables.items()
            if name in contracted and name in analysis.training.gradients
        }
        self._nbytes = {name: analysis.facts.nbytes(name) for name in self._weights}
        self._placements: dict[str, Placement] = {}
        self._ahead: dict[str, Placement] = {}  # the same of what follows, as far as it is chosen
        self._untried = set(self._weights)
        self.chosen: dict[str, Split] = {}

    def _contracted(self) -> set[str]:
        """Return the variables along which an op sums products, perhaps transposed, cast or cut before."""
        rules = [(node, rule_of(node, self._analysis.facts)) for node in self._nodes]
        return {
            name
            for node, rule in rules
            if rule is not None and rule.is_contraction
            for tensor, dims in zip(node.inputs, rule.inputs, strict=True)
            if not rule.combine.keys().isdisjoint(chain.from_iterable(dims or ()))
            for name in self._variables_behind(tensor)
        }

    def _variables_behind(self, tensor: gs.Tensor) -> frozenset[str]:
        return self._behind.get(tensor.name, frozenset())

    def kinds(self) -> list[list[str]]:
        """Return the chosen weights, those together that are alike: in shape, split and surroundings."""
        kinds: dict[tuple[object, ...], list[str]] = {}
        for name, split in self.chosen.items():
            kinds.setdefault((self._weights[name].shape, split, self._surroundings(name)), []).append(name)
        return list(kinds.values())

    def other_places(self, names: Sequence[str], chosen: Mapping[str, Split]) -> list[Split | None]:
        """Return where weights of a kind may be split in place of where they are, or stay whole: None."""
        are_light = self._are_light({*names, *(self._weights.keys() - chosen.keys())})
        places = [*_places_of(self._weights[names[0]].shape, self._ranks), *([None] if are_light else [])]
        return [place for place in places if place != chosen.get(names[0])]

    def _are_light(self, names: Collection[str]) -> bool:
        """Tell whether weights may stay whole together."""
        return sum(self._nbytes[name] for name in names) <= WHOLE_SHARE * sum(self._nbytes.values())

    def _surroundings(self, weight: str) -> tuple[str, ...]:
        """Return the ops that read a weight, and those that read what these make."""
        readers = [self._nodes[place] for place in self._readers.get(weight, ())]
        behind = [other.op for node in readers for tensor in node.outputs for other in tensor.outputs]
        return (*(node.op for node in readers), *sorted(behind))

    def run(self) -> None:
        for place, node in enumerate(self._nodes):
            for tensor in node.inputs:
                if tensor.name not in self._untried:
                    continue
                if self._looks_ahead and node.op == "Gather" and self._readers[tensor.name][-1] > place:
                    continue  # its other readers decide
                self._choose(tensor.name)
                if self._looks_ahead:
                    self._look_ahead(place)
            for name, placement in self._step(place, self._placements)[1].items():
                self._placements[name] = placement

    def _look_ahead(self, place: int) -> None:
        """Follow what is chosen beyond the weights that are not, so that these see what they will meet."""
        self._ahead = {}
        known = ChainMap(self._ahead, self._placements)
        for following in range(place, min(place + LOOKAHEAD, len(self._nodes))):
            self._ahead |= self._step(following, known)[1]

    def _choose(self, weight: str) -> None:
        self._untried.discard(weight)
        outcomes = self._outcomes(weight, {1})
        is_table = self._looks_ahead and any(self._nodes[r].op == "Gather" for r in self._readers[weight])
        if not is_table and (not outcomes or min(sent for sent, _ in outcomes)):
            outcomes += self._outcomes(weight, range(2, MAX_BLOCKS + 1))
        if outcomes:
            sent, split = min(outcomes, key=lambda pair: pair[0])
            if sent and self._looks_ahead and self._is_of_light_ones(weight):
                return
            self.chosen[weight] = split
            self._placements[weight] = split

    def _is_of_light_ones(self, weight: str) -> bool:
        """Tell whether a weight may stay whole with all that are shaped like it, and those that are."""
        shape = self._weights[weight].shape
        alike = {name for name, other in self._weights.items() if other.shape == shape}
        return self._are_light(alike | (self._weights.keys() - self._untried - self.chosen.keys()))

    def _outcomes(self, weight: str, blocks: Collection[int]) -> list[tuple[int, Split]]:
        """Return what is sent under each split that divides an op."""
        tried = [
            (self._try(weight, split), split)
            for split in _places_of(self._weights[weight].shape, self._ranks, blocks)
        ]
        return [(outcome.sent, split) for outcome, split in tried if outcome is not None]

    def _try(self, weight: str, split: Split) -> _Outcome | None:
        """Return what follows from a split; None where no op is divided by it."""
        outcome = _Outcome(placements={weight: split})
        known = ChainMap(outcome.placements, self._ahead, self._placements)
        others = self._untried - {weight}
        pending = set(self._readers.get(weight, ()))
        is_divided = False
        for _ in range(LOOKAHEAD):
            if not pending:
                break
            place = min(pending)
            pending.discard(place)
            node = self._nodes[place]
            decision, results = self._step(place, known)
            outcome.sent += self._sent(node, decision, known)
            is_divided |= decision.factor is not None
            if not all(others.isdisjoint(self._variables_behind(tensor)) for tensor in node.inputs):
                # It reads another weight that is to be split yet, or what is made of one.
                outcome.sent += self._left_partial(node, known)
                continue
            changed = {n: p for n, p in results.items() if p != known.get(n, Replicate())}
            outcome.placements |= changed
            pending.update(reader for name in changed for reader in self._readers.get(name, ()))
        return outcome if is_divided else None

    def _left_partial(self, node: gs.Node, known: Placements) -> int:
        """Return the bytes of sums that the next weight's op finds unfinished."""
        partial = [t.name for t in node.inputs if isinstance(known.get(t.name), Partial)]
        return sum(2 * self._analysis.facts.nbytes(name) + MESSAGE_BYTES for name in partial)

    def _step(self, place: int, known: Placements) -> tuple[AxisDecision, dict[str, Placement]]:
        node = self._nodes[place]
        analysis = self._analysis
        placements = [known.get(tensor.name, Replicate()) for tensor in node.inputs]
        known_facts = node_facts(node, analysis.facts, analysis.zeros)
        layouts = [Layout("worker", placement) for placement in placements]
        is_lookup = self._looks_ahead and node.op == "Gather"
        looked_up = decide_on_table(known_facts, layouts, 0, None) if is_lookup else None
        decision = looked_up or decide_by_rule(known_facts, placements, self._ranks)
        names = [tensor.name for tensor in node.outputs]
        return decision, dict(zip(names, decision.outputs, strict=True))

    def _sent(self, node: gs.Node, decision: AxisDecision, known: Placements) -> int:
        """Return the bytes that a node's operands must be sent for."""
        sent = 0
        for tensor, target in zip(node.inputs, decision.inputs, strict=True):
            has = known.get(tensor.name, Replicate())
            if has != target and isinstance(has, Split | Partial):
                passes = 2 if isinstance(has, Partial) else 1  # an AllReduce is a scatter and a gather
                sent += passes * self._analysis.facts.nbytes(tensor.name) + MESSAGE_BYTES
        return sent
