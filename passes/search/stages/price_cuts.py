"""Play a pipeline that a step is cut into, and choose among cuts, where several read a weight of others too.

A weight that several stages read is sent once a step, and its gradient back, while nothing else may be there
to do. Where the balanced cut parts readers of such weights, cuts that are less and less balanced are tried
too: each time the one that sends fewest bytes. The quickest is taken, as a pipeline is simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np

from partc.cost.cluster.profiles import SLOT_S
from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import Places
from partc.passes.search.operators.forward_nodes import find_variables_behind
from partc.passes.search.stages.line_work import LineTimes, LineWork, NodeSeconds

SentSeconds = Callable[[float, int, int], float]  # (bytes, of stage, to stage) -> seconds
SumSeconds = Callable[[float, int], float]  # (bytes, stage) -> seconds
Array = np.ndarray[Any, np.dtype[Any]]
UNDER_WAY = 2  # times as many micro-batches as 1F1B has
BALANCED = (0.05, 0.1, 0.2, 0.35)  # above the busiest stage: no more, for stages divide memory too
TOLERANCES = (*BALANCED, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, inf)  # where readers of a weight would be parted


@dataclass(frozen=True, slots=True)
class PipelineTraffic:
    """What is known of a pipeline's messages, and who divides its work.

    sent          seconds of bytes of every rank of a stage on their way to another's
    microbatches  into which a step is divided
    shares        of the samples, of which each rank sends one
    tensor        ranks of a stage that divide what a share is
    summed        seconds of the sum of a stage's gradients, of so many bytes of a rank, among its replicas
    """

    sent: SentSeconds
    microbatches: int = 1
    shares: int = 1
    tensor: int = 1
    summed: SumSeconds | None = None

    def times(self, work: LineWork, seconds: NodeSeconds) -> LineTimes:
        """Return what a rank takes of a micro-batch."""
        return work.times(seconds, self.shares, self.tensor, self.microbatches)


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """A weight, or a form of it, that nodes read at several places of the line."""

    readers: tuple[int, ...]
    there_bytes: int
    back_bytes: int


def find_shared_weights(analysis: Analysis, places: Places) -> list[SharedWeight]:
    """Return what is read at several places of the line. `places`: of all nodes, each of the line alone."""
    training, nbytes = analysis.training, analysis.facts.nbytes
    nodes = [node for node in training.graph.nodes if node.name in analysis.main]
    behind = find_variables_behind(nodes, training.variables, analysis.facts)
    readers: dict[str, set[int]] = {}
    for node in nodes:
        for tensor in node.inputs:
            if behind.get(tensor.name):
                readers.setdefault(tensor.name, set()).add(places.nodes[node.name])
    weights: list[SharedWeight] = []
    for name, at in readers.items():
        gradient = training.gradients.get(name)
        gradient_tensors = () if gradient is None else (gradient.dense, gradient.ids, gradient.rows)
        back = sum(nbytes(tensor) for tensor in gradient_tensors if tensor is not None)
        if len(at) > 1:
            weights.append(SharedWeight(tuple(sorted(at)), nbytes(name), back))
    return weights


class CutPricer:
    """Prices cuts of a line of nodes into stages, messages included."""

    def __init__(
        self,
        times: LineTimes,
        nbytes: Sequence[int],
        shared: Sequence[SharedWeight],
        stages: int,
        traffic: PipelineTraffic,
        gradient_bytes: Sequence[int] = (),
    ) -> None:
        self.until, self.forward, self.behind = (
            np.array([0.0, *accumulate(seconds)]) for seconds in (times.both, times.ahead, times.behind)
        )
        self.nbytes = nbytes
        self.shared = shared
        self.stages = stages
        self.traffic = traffic
        self.gradients = np.array([0, *accumulate(gradient_bytes or [0] * len(nbytes))])

    def quickest(self, cuts: list[list[int]]) -> list[int]:
        """Return the quickest of cuts, of which the first is balanced.

        Where that parts readers of weights, cuts that send fewest of these are tried too, however uneven.
        """
        balanced = cuts[0]
        if any(len(set(self._stages_of(weight, balanced))) > 1 for weight in self.shared):
            busiest = max(self._per_stage(self.until, balanced))
            cuts = [*cuts, *(self._cheapest(busiest * (1 + tolerance)) for tolerance in TOLERANCES)]
        return min(cuts, key=self.step_s)

    def _per_stage(self, until: Array, ends: Sequence[int]) -> list[float]:
        borders = pairwise([0, *ends, len(until) - 1])
        return [float(until[end] - until[begin]) for begin, end in borders]

    def _stages_of(self, weight: SharedWeight, ends: Sequence[int]) -> list[int]:
        """Return the stages that read a weight, its home first."""
        return list(dict.fromkeys(sum(end <= place for end in ends) for place in weight.readers))

    def step_s(self, ends: Sequence[int]) -> float:
        """Return what a step takes, with twice as many micro-batches under way as 1F1B has (take_turns.py).

        What others wait for is sent before the stage does what nobody waits for (cut_behind_messages.py).
        """
        count, last = self.traffic.microbatches, self.stages - 1
        ahead, both, behind = (
            self._per_stage(until, ends) for until in (self.forward, self.until, self.behind)
        )
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
                        made_s = play.clock[stage] - (behind[stage] if behind[stage] >= SLOT_S else 0.0)
                        play.send(stage, stage - 1, turn, links[stage - 1], made_s)
                    elif not is_back and stage < last:
                        play.send(stage, stage + 1, turn, links[stage])
                    elif not is_back:
                        play.there[stage][True, number] = play.clock[stage]
                    if turn == (False, min(self.stages - stage, count) - 1):
                        self._send_weights(play, stage, weights)
        for weight, (home, *others) in zip(self.shared, weights, strict=True):
            for stage in others if weight.back_bytes else ():
                play.send(stage, home, None, self.traffic.sent(weight.back_bytes, stage, home))
        sums_s = self._sums_s(ends)
        return max(*(now + sum_s for now, sum_s in zip(play.clock, sums_s, strict=True)), *play.busy)

    def _sums_s(self, ends: Sequence[int]) -> list[float]:
        """Return what sums of gradients take each stage once its last micro-batch is through."""
        sizes, summed = self._per_stage(self.gradients, ends), self.traffic.summed
        return [summed(size, stage) if summed and size else 0.0 for stage, size in enumerate(sizes)]

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
        if self.stages == 1:
            return []
        first = np.searchsorted(self.until, self.until - most * (1 + 1e-9))  # where the longest stage begins
        best = np.where(
            first > 0, inf, self._costs[:, 0]
        )  # of the first stage, which begins at the first node
        origins: list[Array] = []
        if self.stages > 2:
            costs = np.where(np.arange(count) < first[:, np.newaxis], inf, self._costs)
        for _ in range(self.stages - 2):
            totals = best[:count] + costs
            origins.append(np.argmin(totals, axis=1))
            best = np.take_along_axis(totals, origins[-1][:, np.newaxis], axis=1)[:, 0]
        begin = int(first[count])
        cuts = [begin + int(np.argmin(best[begin:count] + self._costs[count, begin:]))]  # of the last stage
        for origin in reversed(origins):
            cuts.append(int(origin[cuts[-1]]))
        return cuts[::-1]

    @cached_property
    def _costs(self) -> Array:
        """Return the bytes that a stage is sent and sends back, float64[end, begin]; infinite where it has
        no nodes."""
        count = len(self.until) - 1
        before: dict[int, list[tuple[int, int]]] = {}  # reader -> the reader before it, bytes
        for weight in self.shared:
            for last, place in pairwise(weight.readers):
                before.setdefault(place, []).append((last, weight.there_bytes + weight.back_bytes))
        activations = np.array([2.0 * size / self.traffic.shares for size in self.nbytes[:count]])
        activations[0] = 0.0
        read = np.zeros(count)
        costs = np.full((count + 1, count), inf)
        for place in range(count):
            for last, size in before.get(place, ()):  # of stages that begin between the two readers
                read[last + 1 : place + 1] += size
            costs[place + 1, : place + 1] = (activations + read)[: place + 1]
        return costs


class _Play:
    """How far a pipeline is. A turn: (is it on the way back, which micro-batch).

    clock   until when a stage computes        there   stage -> turn -> when it has what it needs for it
    busy    until when it sends or is sent     turns   what it has still to do, in order
    """

    def __init__(self, stages: int, count: int) -> None:
        self.clock = [0.0] * stages
        self.busy = [0.0] * stages
        self.turns = [_turns(UNDER_WAY * (stages - stage), count) for stage in range(stages)]
        self.there = [dict.fromkeys(turns, inf) for turns in self.turns]
        self.there[0].update({(False, number): 0.0 for number in range(count)})

    def send(
        self,
        source: int,
        target: int,
        turn: tuple[bool, int] | None,
        seconds: float,
        made_s: float | None = None,
    ) -> None:
        """Send what a stage has just made, or has had for a while, one message after the other."""
        made_s = self.clock[source] if made_s is None else made_s
        stop = max(made_s, self.busy[source], self.busy[target]) + seconds
        self.busy[source] = self.busy[target] = stop
        if turn is not None:
            self.there[target][turn] = stop


def _turns(ahead: int, count: int) -> list[tuple[bool, int]]:
    """Return the order of a stage's micro-batches, (is it on the way back, which): so many are ahead."""
    ahead = min(ahead, count)
    first = [(False, number) for number in range(ahead)]
    both = [turn for number in range(count) for turn in ((True, number), (False, number + ahead))]
    return first + [turn for turn in both if turn[1] < count]
