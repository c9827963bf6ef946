"""Cut a step into stages of equal time: where a pipeline's later stages begin.

Every node is first placed as if each forward node were a stage (layouts/place_nodes.py), which tells what of
the backward pass and of the updates goes with it. Contiguous stages whose greatest time is least are then
found by bisection; of those within 5 % of it, the cut over which the fewest bytes go.

A weight that several stages read is sent once a step, and its gradient back, while nothing else may be there
to do. Where the balanced cut parts readers of such weights, cuts that are less and less balanced are tried
too: each time the one that sends fewest bytes. The quickest is taken, as a pipeline is simulated.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import Places
from partc.passes.layouts.place_nodes import find_mixed, place_nodes
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.search.forward_nodes import find_variables_behind, forward_nodes
from partc.runtime.errors import BadUsage
from partc.runtime.log import log

NodeSeconds = Callable[[int, int], float]  # (flops, bytes read and written) -> seconds
SentSeconds = Callable[[float, int, int], float]  # (bytes, of stage, to stage) -> seconds
Array = np.ndarray[Any, np.dtype[Any]]
TOLERANCE = 0.05
TOLERANCES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, inf)  # tried where stages share weights
UNEVEN = 1.5  # of the busiest stage's time by the mean: what is more is warned of


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is known of a pipeline's messages.

    sent          seconds of bytes of every rank of a stage on their way to another's
    microbatches  into which a step is divided
    ranks         of a stage, among which its work is divided
    shares        of the samples, of which each rank sends one
    """

    sent: SentSeconds
    microbatches: int = 1
    ranks: int = 1
    shares: int = 1


def cut_stages(
    analysis: Analysis, stages: int, seconds: NodeSeconds, traffic: Traffic | None = None
) -> dict[str, int]:
    """Return the forward nodes with which a stage begins -> the stage: all that they read is of earlier ones.

    `traffic`: None where messages cost nothing. Raises BadUsage where there are fewer such nodes than stages.
    """
    forward = forward_nodes(analysis.training, analysis.main)
    mixed = find_mixed(forward, analysis.training)
    line = [node for node in forward if node.name in mixed]
    if len(line) < stages:
        raise BadUsage(
            f"{stages} stages of {len(line)} ops that read variables and data",
            at=f"--strategy pipeline={stages}",
            fix=f"use at most {max(1, len(line))} stages",
        )
    alone = place_nodes(analysis, {node.name: place for place, node in enumerate(line)}, len(line))
    times = _sum_at(analysis, analysis.training.graph.nodes, alone, len(line), seconds)
    nbytes = _bytes_behind(analysis, line)
    ends = cut(times, nbytes, stages)
    if traffic is not None and (shared := _shared_weights(analysis, alone)):
        ahead = _sum_at(analysis, forward, alone, len(line), seconds)
        ends = _Pipeline(times, ahead, nbytes, shared, stages, traffic).quickest(ends)
    _tell_balance(times, ends)
    stage_of = {node.name: sum(end <= place for end in ends) for place, node in enumerate(line)}
    made = {tensor.name: stage_of[node.name] for node in line for tensor in node.outputs}
    return {
        node.name: stage_of[node.name]
        for node in line
        if stage_of[node.name] > max((made[t.name] for t in node.inputs if t.name in made), default=0)
    }


def _tell_balance(times: Sequence[float], ends: Sequence[int]) -> None:
    """Log how much more the busiest stage has to do than the mean of all: a fat op leaves others idle."""
    borders = [0, *ends, len(times)]
    busy = [sum(times[begin:end]) for begin, end in pairwise(borders)]
    balance = max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0
    report = log.warning if balance >= UNEVEN else log.info
    report("%d stages: the busiest takes %.2f times the mean of all", len(busy), balance)


def seconds_at(analysis: Analysis, line: Sequence[gs.Node], seconds: NodeSeconds) -> list[float]:
    """Return what every forward node takes, with what goes with it on the way back and in updates."""
    places = place_nodes(analysis, {node.name: place for place, node in enumerate(line)}, len(line))
    return _sum_at(analysis, analysis.training.graph.nodes, places, len(line), seconds)


def _sum_at(
    analysis: Analysis, nodes: Iterable[gs.Node], places: Places, count: int, seconds: NodeSeconds
) -> list[float]:
    result = [0.0 for _ in range(count)]
    facts = analysis.facts
    for node in nodes:
        if all(facts.fixed_value(tensor.name) is not None for tensor in node.outputs):
            continue
        rule = rule_of(node, facts)
        nbytes = sum(facts.nbytes(t.name) for t in (*node.inputs, *node.outputs) if t.name)
        result[places.nodes[node.name]] += seconds(rule.flops if rule is not None else 0, nbytes)
    return result


def _bytes_behind(analysis: Analysis, line: Sequence[gs.Node]) -> list[int]:
    """Return for every place in the line the bytes that go over it: what is made before and read behind."""
    made = {tensor.name: place for place, node in enumerate(line) for tensor in node.outputs}
    last = {tensor.name: place for place, node in enumerate(line) for tensor in node.inputs}
    change = [0 for _ in range(len(line) + 1)]
    for name, place in made.items():
        if name in last:
            change[place + 1] += analysis.facts.nbytes(name)
            change[last[name] + 1] -= analysis.facts.nbytes(name)
    return list(accumulate(change))


# ---------------------------------------------------------------- weights that several stages read


@dataclass(frozen=True, slots=True)
class _SharedWeight:
    """A weight, or a form of it, that nodes read at several places of the line."""

    readers: tuple[int, ...]
    there_bytes: int
    back_bytes: int


def _shared_weights(analysis: Analysis, places: Places) -> list[_SharedWeight]:
    """Return what is read at several places of the line. `places`: of all nodes, each of the line alone."""
    training, nbytes = analysis.training, analysis.facts.nbytes
    nodes = [node for node in training.graph.nodes if node.name in analysis.main]
    behind = find_variables_behind(nodes, training.variables, analysis.facts)
    readers: dict[str, set[int]] = {}
    for node in nodes:
        for tensor in node.inputs:
            if behind.get(tensor.name):
                readers.setdefault(tensor.name, set()).add(places.nodes[node.name])
    found: list[_SharedWeight] = []
    for name, at in readers.items():
        gradient = training.gradients.get(name)
        made = () if gradient is None else (gradient.dense, gradient.ids, gradient.rows)
        back = sum(nbytes(tensor) for tensor in made if tensor is not None)
        if len(at) > 1:
            found.append(_SharedWeight(tuple(sorted(at)), nbytes(name), back))
    return found


class _Pipeline:
    """Prices cuts of a line of nodes into stages, messages included."""

    def __init__(
        self,
        seconds: Sequence[float],
        forward: Sequence[float],
        nbytes: Sequence[int],
        shared: Sequence[_SharedWeight],
        stages: int,
        traffic: Traffic,
    ) -> None:
        self.until = np.array([0.0, *accumulate(second / traffic.ranks for second in seconds)])
        self.forward = np.array([0.0, *accumulate(second / traffic.ranks for second in forward)])
        self.nbytes = nbytes
        self.shared = shared
        self.stages = stages
        self.traffic = traffic

    def quickest(self, balanced: list[int]) -> list[int]:
        """Return the quickest of cuts between the balanced one and that which sends least."""
        if not any(len(set(self._stages_of(weight, balanced))) > 1 for weight in self.shared):
            return balanced
        busiest = max(self._per_stage(self.until, balanced))
        cuts = [balanced, *(self._cheapest(busiest * (1 + tolerance)) for tolerance in TOLERANCES)]
        return min(cuts, key=self.step_s)

    def _per_stage(self, until: Array, ends: Sequence[int]) -> list[float]:
        borders = pairwise([0, *ends, len(until) - 1])
        return [float(until[end] - until[begin]) for begin, end in borders]

    def _stages_of(self, weight: _SharedWeight, ends: Sequence[int]) -> list[int]:
        """Return the stages that read a weight, its home first."""
        return list(dict.fromkeys(sum(end <= place for end in ends) for place in weight.readers))

    def step_s(self, ends: Sequence[int]) -> float:
        """Return what a step takes: each stage goes on with the micro-batch that is furthest (1F1B)."""
        count, last = self.traffic.microbatches, self.stages - 1
        ahead = [second / count for second in self._per_stage(self.forward, ends)]
        both = [second / count for second in self._per_stage(self.until, ends)]
        links = [self._link_s(stage, end) for stage, end in enumerate(ends)]
        play = _Play(self.stages, count)
        weights = [self._stages_of(weight, ends) for weight in self.shared]
        while any(play.turns):
            for stage, turns in enumerate(play.turns):
                while turns and (ready := play.there[stage][turns[0]]) < inf:
                    is_back, number = turn = turns.pop(0)
                    play.clock[stage] = max(play.clock[stage], ready)
                    play.clock[stage] += both[stage] - ahead[stage] if is_back else ahead[stage]
                    if is_back and stage:
                        play.send(stage, stage - 1, turn, links[stage - 1])
                    elif not is_back and stage < last:
                        play.send(stage, stage + 1, turn, links[stage])
                    elif not is_back:
                        play.there[stage][True, number] = play.clock[stage]
                    if turn == (False, min(self.stages - stage, count) - 1):
                        self._send_weights(play, stage, weights)
        for weight, (home, *others) in zip(self.shared, weights, strict=True):
            for stage in others if weight.back_bytes else ():
                play.send(stage, home, None, self.traffic.sent(weight.back_bytes, stage, home))
        return max(*play.clock, *play.busy)

    def _send_weights(self, play: "_Play", home: int, weights: Sequence[Sequence[int]]) -> None:
        """Send a stage's weights to the others that read them, behind what it does ahead."""
        for weight, (own, *others) in zip(self.shared, weights, strict=True):
            for stage in others if own == home else ():
                play.send(home, stage, None, self.traffic.sent(weight.there_bytes, home, stage))
                first = play.there[stage][False, 0]
                play.there[stage][False, 0] = max(first, play.busy[stage])

    def _link_s(self, stage: int, end: int) -> float:
        """Return what the activations of a micro-batch take over the end of a stage."""
        traffic = self.traffic
        return traffic.sent(self.nbytes[end] / traffic.shares / traffic.microbatches, stage, stage + 1)

    def _cheapest(self, most: float) -> list[int]:
        """Return the cut of fewest bytes into stages of at most so many seconds, by dynamic program.

        A stage costs the activations before it, there and back, and the weights that earlier ones read first.
        """
        count = len(self.until) - 1
        costs = self._stage_costs()
        first = np.searchsorted(self.until, self.until - most * (1 + 1e-9))  # where the longest stage begins
        best = np.full(count + 1, inf)
        best[0] = 0.0
        origins: list[Array] = []
        for _ in range(self.stages):
            following, origin = np.full(count + 1, inf), np.zeros(count + 1, np.int64)
            for end in range(1, count + 1):
                total = best[first[end] : end] + costs[end][first[end] :]
                if len(total):
                    origin[end] = first[end] + np.argmin(total)
                    following[end] = total.min()
            best = following
            origins.append(origin)
        cuts, end = [], count
        for origin in reversed(origins[1:]):
            end = int(origin[end])
            cuts.append(end)
        return cuts[::-1]

    def _stage_costs(self) -> list[Array]:
        """Return for every end of a stage the bytes that it is sent and sends back, by where it begins."""
        count = len(self.until) - 1
        before: dict[int, list[tuple[int, int]]] = {}  # reader -> the reader before it, bytes
        for weight in self.shared:
            for last, place in pairwise(weight.readers):
                before.setdefault(place, []).append((last, weight.there_bytes + weight.back_bytes))
        activations = np.array([2.0 * size / self.traffic.shares for size in self.nbytes[:count]])
        activations[0] = 0.0
        read = np.zeros(count)
        costs = [np.zeros(0)]
        for place in range(count):
            for last, size in before.get(place, ()):  # of stages that begin between the two readers
                read[last + 1 : place + 1] += size
            costs.append((activations + read)[: place + 1])
        return costs


class _Play:
    """How far a pipeline is. A turn: (is it on the way back, which micro-batch).

    clock   until when a stage computes        there   stage -> turn -> when it has what it needs for it
    busy    until when it sends or is sent     turns   what it has still to do, in order
    """

    def __init__(self, stages: int, count: int) -> None:
        self.clock = [0.0] * stages
        self.busy = [0.0] * stages
        self.turns = [_turns(stages - stage, count) for stage in range(stages)]
        self.there = [dict.fromkeys(turns, inf) for turns in self.turns]
        self.there[0].update({(False, number): 0.0 for number in range(count)})

    def send(self, source: int, target: int, turn: tuple[bool, int] | None, seconds: float) -> None:
        """Send what a stage has just made, one message after the other."""
        stop = max(self.clock[source], self.busy[source], self.busy[target]) + seconds
        self.busy[source] = self.busy[target] = stop
        if turn is not None:
            self.there[target][turn] = stop


def _turns(ahead: int, count: int) -> list[tuple[bool, int]]:
    """Return the order of a stage's micro-batches, (is it on the way back, which): so many are ahead."""
    ahead = min(ahead, count)
    first = [(False, number) for number in range(ahead)]
    both = [turn for number in range(count) for turn in ((True, number), (False, number + ahead))]
    return first + [turn for turn in both if turn[1] < count]


def cut(seconds: Sequence[float], nbytes: Sequence[int], stages: int) -> list[int]:
    """Return the places at which the later stages begin. `nbytes`: of a cut before each place."""
    until = [0.0, *accumulate(seconds)]
    low, high = max(max(seconds), until[-1] / stages), until[-1]
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _stages_within(seconds, middle) <= stages else (middle, high)
    return _cheapest(until, nbytes, stages, high * (1 + TOLERANCE))


def _stages_within(seconds: Sequence[float], most: float) -> int:
    """Return how many contiguous stages there are if each is filled up to `most`."""
    count, filled = 1, 0.0
    for second in seconds:
        if filled + second > most:
            count, filled = count + 1, 0.0
        filled += second
    return count


def _cheapest(until: Sequence[float], nbytes: Sequence[int], stages: int, most: float) -> list[int]:
    """Return the cuts of fewest bytes into stages of at most so many seconds, by dynamic program."""
    count = len(until) - 1
    cost: list[float] = [0.0, *(inf for _ in range(count))]
    before: list[list[int]] = []
    for _ in range(stages):
        window: deque[int] = deque()
        following, origin = [inf for _ in range(count + 1)], [0 for _ in range(count + 1)]
        for end in range(1, count + 1):
            begin = end - 1
            own = cost[begin] + (nbytes[begin] if begin else 0)
            while window and cost[window[-1]] + (nbytes[window[-1]] if window[-1] else 0) >= own:
                window.pop()
            window.append(begin)
            while window and until[end] - until[window[0]] > most:
                window.popleft()
            if window:
                origin[end] = window[0]
                following[end] = cost[window[0]] + (nbytes[window[0]] if window[0] else 0)
        cost = following
        before.append(origin)
    cuts, end = [], count
    for origin in reversed(before[1:]):
        end = origin[end]
        cuts.append(end)
    return cuts[::-1]
