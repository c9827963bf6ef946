"""Cut a step into stages of equal time: where a pipeline's later stages begin.

Every node is first placed as if each forward node were a stage (layouts/place_nodes.py), which tells what of
the backward pass and of the updates goes with it. Contiguous stages whose greatest time is least are then
found by bisection; of those within 5, 10, 20 and 35 % of it, the cuts over which the fewest bytes go are
played with their messages and sums, and the quickest is taken (price_cuts.py).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import Places
from partc.passes.layouts.place_nodes import find_mixed, place_nodes
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.passes.search.stages.line_work import LineTimes, LineWork, NodeSeconds, line_work
from partc.passes.search.stages.price_cuts import (
    BALANCED,
    CutPricer,
    PipelineTraffic,
    SharedWeight,
    find_shared_weights,
)
from partc.runtime.errors import BadUsage
from partc.runtime.log import log

IDLE_STAGE = 0.1  # of the mean of all stages: who computes less has next to nothing to do


@dataclass(frozen=True)
class StageLine:
    """The forward nodes of data and variables, in their order: a stage may begin with any but the first.

    work    of each, with what goes with it on the way back and in updates
    nbytes  that go over a cut before each place
    shared  weights that several of them read
    places  of all nodes and variables, each with that of the line that it goes with
    """

    nodes: Sequence[gs.Node]
    work: LineWork
    nbytes: Sequence[int]
    shared: Sequence[SharedWeight]
    places: Places

    def cut(self, stages: int, times: LineTimes, traffic: PipelineTraffic | None = None) -> list[int]:
        """Return the places at which stages behind the first begin.

        `times`: what a rank takes of a micro-batch; `traffic`: None where messages cost nothing. Raises
        BadUsage where there are fewer places than stages.
        """
        if len(self.nodes) < stages:
            raise BadUsage(
                f"{stages} stages of {len(self.nodes)} ops that read variables and data",
                at=f"--strategy pipeline={stages}",
                fix=f"use at most {max(1, len(self.nodes))} stages",
            )
        cuts = cut_unevenly(times.both, self.nbytes, stages)
        if traffic is None:
            return cuts[0]
        gradients = self.work.gradient_bytes(traffic.tensor)
        return CutPricer(times, self.nbytes, self.shared, stages, traffic, gradients).quickest(cuts)

    def begins(self, starts: Sequence[int]) -> dict[str, int]:
        """Return the nodes with which a stage begins -> the stage: all that they read is of earlier ones."""
        stage_of = {
            node.name: sum(start <= place for start in starts) for place, node in enumerate(self.nodes)
        }
        stage_of_tensor = {tensor.name: stage_of[node.name] for node in self.nodes for tensor in node.outputs}
        return {
            node.name: stage_of[node.name]
            for node in self.nodes
            if stage_of[node.name]
            > max((stage_of_tensor[t.name] for t in node.inputs if t.name in stage_of_tensor), default=0)
        }

    def starts(self, stage_of: Mapping[str, int], stages: int) -> tuple[int, ...]:
        """Return the places of the first nodes of stages behind the first, as `begins` names them."""
        places = {node.name: place for place, node in enumerate(self.nodes)}
        first = dict.fromkeys(range(1, stages), len(self.nodes))
        for name, stage in stage_of.items():
            if stage and name in places:
                first[stage] = min(first[stage], places[name])
        return tuple(first.values())


def stage_line(analysis: Analysis) -> StageLine:
    """Return the line of a step's nodes."""
    forward = forward_nodes(analysis.training, analysis.main)
    mixed = find_mixed(forward, analysis.training)
    line = [node for node in forward if node.name in mixed]
    count = max(1, len(line))
    alone = place_nodes(analysis, {node.name: place for place, node in enumerate(line)}, count)
    work, shared = line_work(analysis, alone, count), find_shared_weights(analysis, alone)
    return StageLine(line, work, _bytes_behind(analysis, line), shared, alone)


def cut_stages(
    analysis: Analysis, stages: int, seconds: NodeSeconds, traffic: PipelineTraffic | None = None
) -> dict[str, int]:
    """Return the forward nodes with which a stage begins -> the stage: all that they read is of earlier ones.

    `seconds`: what a node takes on a worker; `traffic`: None where messages cost nothing. Raises BadUsage
    where there are fewer such nodes than stages.
    """
    line = stage_line(analysis)
    times = line.work.times(seconds) if traffic is None else traffic.times(line.work, seconds)
    starts = line.cut(stages, times, traffic)
    _tell_balance(times.both, starts)
    return line.begins(starts)


def _tell_balance(times: Sequence[float], ends: Sequence[int]) -> None:
    """Log how much more the busiest stage has to do than the mean of all: a fat op leaves others idle."""
    borders = [0, *ends, len(times)]
    busy = [sum(times[begin:end]) for begin, end in pairwise(borders)]
    balance = max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0
    log.info("%d stages: the busiest takes %.2f times the mean of all", len(busy), balance)


def _bytes_behind(analysis: Analysis, line: Sequence[gs.Node]) -> list[int]:
    """Return for every place in the line the bytes that go over it: what is made before and read behind."""
    maker_place = {tensor.name: place for place, node in enumerate(line) for tensor in node.outputs}
    last = {tensor.name: place for place, node in enumerate(line) for tensor in node.inputs}
    change = [0 for _ in range(len(line) + 1)]
    for name, place in maker_place.items():
        if name in last:
            change[place + 1] += analysis.facts.nbytes(name)
            change[last[name] + 1] -= analysis.facts.nbytes(name)
    return list(accumulate(change))


def cut(seconds: Sequence[float], nbytes: Sequence[int], stages: int) -> list[int]:
    """Return the places at which the later stages begin. `nbytes`: of a cut before each place."""
    return cut_unevenly(seconds, nbytes, stages, BALANCED[:1])[0]


def cut_unevenly(
    seconds: Sequence[float],
    nbytes: Sequence[int],
    stages: int,
    tolerances: Sequence[float] = BALANCED,
) -> list[list[int]]:
    """Return cuts that are less and less balanced, each of the fewest bytes."""
    until = [0.0, *accumulate(seconds)]
    low, high = max(max(seconds), until[-1] / stages), until[-1]
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _stages_within(seconds, middle) <= stages else (middle, high)
    cuts = [_cheapest(until, nbytes, stages, high * (1 + tolerance)) for tolerance in tolerances]
    return [cuts[0], *(each for each in cuts[1:] if not _is_idle(until, each))]


def _is_idle(until: Sequence[float], ends: Sequence[int]) -> bool:
    """Tell whether a stage has next to nothing to do."""
    busy = [until[end] - until[begin] for begin, end in pairwise([0, *ends, len(until) - 1])]
    return min(busy) < IDLE_STAGE * until[-1] / len(busy)


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
