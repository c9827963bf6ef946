"""Cut a step into stages of equal time: where a pipeline's later stages begin.

Every node is first placed as if each forward node were a stage (layouts/place_nodes.py), which tells what of
the backward pass and of the updates goes with it. Contiguous stages whose greatest time is least are then
found by bisection; of those within 5 % of it, the cut over which the fewest bytes go.
Where that parts the readers of a weight, others are tried (shared_weights.py).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import Places
from partc.passes.layouts.place_nodes import find_mixed, place_nodes
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.passes.search.stages.shared_weights import (
    LineTimes,
    PipelineTraffic,
    SharedPipeline,
    SharedWeight,
    find_shared_weights,
)
from partc.runtime.errors import BadUsage
from partc.runtime.log import log

NodeSeconds = Callable[[int, int], float]  # (flops, bytes read and written) -> seconds
TOLERANCE = 0.05
ADDITION_TRAFFIC = 3  # memory bytes per byte added
ADDITIONS = frozenset({"Add", "Sum"})


@dataclass(frozen=True)
class StageLine:
    """The forward nodes of data and variables, in their order: a stage may begin with any but the first.

    seconds of each, with what goes with it on the way back and in updates
    added   of each, what one micro-batch's gradients take to be added to those of others
    nbytes  that go over a cut before each place
    shared  weights that several of them read
    places  of all nodes and variables, each with that of the line that it goes with
    """

    nodes: Sequence[gs.Node]
    seconds: LineTimes
    added: Sequence[float]
    nbytes: Sequence[int]
    shared: Sequence[SharedWeight]
    places: Places

    def cut(self, stages: int, traffic: PipelineTraffic | None = None) -> list[int]:
        """Return the places at which stages behind the first begin.

        `traffic`: None where messages cost nothing. Raises BadUsage where there are fewer places than stages.
        """
        if len(self.nodes) < stages:
            raise BadUsage(
                f"{stages} stages of {len(self.nodes)} ops that read variables and data",
                at=f"--strategy pipeline={stages}",
                fix=f"use at most {max(1, len(self.nodes))} stages",
            )
        times = self.of_microbatches(traffic.microbatches if traffic is not None else 1)
        starts = cut(times.both, self.nbytes, stages)
        if traffic is None or not self.shared:
            return starts
        priced = SharedPipeline(times, self.nbytes, self.shared, stages, traffic)
        return priced.quickest(starts)

    def of_microbatches(self, count: int) -> LineTimes:
        """Return the seconds of a step that is divided into so many micro-batches."""
        if count == 1:
            return self.seconds
        both, behind = (
            [second + count * added for second, added in zip(seconds, self.added, strict=True)]
            for seconds in (self.seconds.both, self.seconds.behind)
        )
        return LineTimes(both, self.seconds.ahead, behind)

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


def stage_line(analysis: Analysis, seconds: NodeSeconds) -> StageLine:
    """Return the line of a step's nodes. `seconds`: what a node takes on a worker."""
    forward = forward_nodes(analysis.training, analysis.main)
    mixed = find_mixed(forward, analysis.training)
    line = [node for node in forward if node.name in mixed]
    count = max(1, len(line))
    alone = place_nodes(analysis, {node.name: place for place, node in enumerate(line)}, count)
    return StageLine(
        line,
        LineTimes(
            *(
                _sum_at(analysis, nodes, alone, count, seconds)
                for nodes in (analysis.training.graph.nodes, forward, find_unawaited(analysis, alone))
            )
        ),
        [
            seconds(0, ADDITION_TRAFFIC * size) if size else 0.0
            for size in gradient_bytes(analysis, alone, count)
        ],
        _bytes_behind(analysis, line),
        find_shared_weights(analysis, alone),
        alone,
    )


def gradient_bytes(analysis: Analysis, places: Places, count: int) -> list[int]:
    """Return the bytes of the gradients of the variables at each of so many places."""
    nbytes_of = [0] * count
    for parameter, gradient in analysis.training.gradients.items():
        name = gradient.dense or gradient.rows
        nbytes_of[places.variables[parameter]] += analysis.facts.nbytes(name) if name else 0
    return nbytes_of


def find_unawaited(analysis: Analysis, places: Places) -> list[gs.Node]:
    """Return what leads to gradients of variables alone, which no other place waits for, and the updates."""
    main = [node for node in analysis.training.graph.nodes if node.name in analysis.main]
    updates = [node for node in analysis.training.graph.nodes if node.name not in analysis.main]
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
    return [*unawaited.values(), *updates]


def cut_stages(
    analysis: Analysis, stages: int, seconds: NodeSeconds, traffic: PipelineTraffic | None = None
) -> dict[str, int]:
    """Return the forward nodes with which a stage begins -> the stage: all that they read is of earlier ones.

    `traffic`: None where messages cost nothing. Raises BadUsage where there are fewer such nodes than stages.
    """
    line = stage_line(analysis, seconds)
    starts = line.cut(stages, traffic)
    _tell_balance(line.seconds.both, starts)
    return line.begins(starts)


def _tell_balance(times: Sequence[float], ends: Sequence[int]) -> None:
    """Log how much more the busiest stage has to do than the mean of all: a fat op leaves others idle."""
    borders = [0, *ends, len(times)]
    busy = [sum(times[begin:end]) for begin, end in pairwise(borders)]
    balance = max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0
    log.info("%d stages: the busiest takes %.2f times the mean of all", len(busy), balance)


def seconds_at(analysis: Analysis, line: Sequence[gs.Node], seconds: NodeSeconds) -> list[float]:
    """Return what every forward node takes, with what goes with it on the way back and in updates."""
    places = place_nodes(analysis, {node.name: place for place, node in enumerate(line)}, len(line))
    return _sum_at(analysis, analysis.training.graph.nodes, places, len(line), seconds)


def _sum_at(
    analysis: Analysis, nodes: Iterable[gs.Node], places: Places, count: int, seconds: NodeSeconds
) -> list[float]:
    result = [0.0 for _ in range(count)]
    for name, second in node_seconds(analysis, nodes, seconds):
        result[places.nodes[name]] += second
    return result


def node_seconds(
    analysis: Analysis, nodes: Iterable[gs.Node], seconds: NodeSeconds
) -> Iterator[tuple[str, float]]:
    """Yield the names of nodes whose value is not known when compiling, and what each takes on a worker."""
    facts = analysis.facts
    for node in nodes:
        if all(facts.fixed_value(tensor.name) is not None for tensor in node.outputs):
            continue
        rule = rule_of(node, facts)
        nbytes = sum(facts.nbytes(t.name) for t in (*node.inputs, *node.outputs) if t.name)
        yield node.name, seconds(rule.flops if rule is not None else 0, nbytes)


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
