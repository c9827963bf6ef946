"""Estimate what a pipeline's step takes from what its nodes and messages take alone: no plan is made.

step = M micro-batches at all stages, in turns, each with the end of a stage (price_cuts.py)

each micro-batch   of a node, its flops and activations / (M x data x tensor), its weights / tensor, unless
                   layouts have them whole along `tensor`; gradients are added to those before; over a cut go
                   activations, along `tensor` what layouts ask for, among replicas what is made of a whole
                   batch, such as a batch normalisation's means: once, but micro-batches wait there for all
the end            sums of a stage's gradients among its replicas; updates, a pass over memory at each place

Of replicas alone what is summed may go on beside the way back, and what takes longer counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import onnx_graphsurgeon as gs

from partc.compiler.search.pipelines.step_pipelines import StepPipelines
from partc.passes.analysis import Analysis
from partc.passes.configure import configure
from partc.passes.distribute import lay_out
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Split
from partc.passes.search.named.weight_layouts import sent_along
from partc.passes.search.stages.batch_wide import is_batch_wide
from partc.passes.search.stages.cut_stages import StageLine
from partc.passes.search.stages.line_work import (
    LineTimes,
    LineWork,
    TensorParts,
    TimedWork,
    When,
    add_up,
    line_work,
)
from partc.passes.search.stages.pipeline_space import Pipeline
from partc.passes.search.stages.price_cuts import CutPricer

SEGMENTS = 2  # of a micro-batch at a stage: forward and back

SentBytes = tuple[int, When, float]  # place in the line, when, bytes of an AllReduce as long
AwaitedBytes = tuple[int, When, int]  # place in the line, when, bytes that all replicas sum


@dataclass(frozen=True)
class WorkAlong:
    """What ranks along `tensor` do and what they send each other."""

    work: LineWork
    sent: tuple[SentBytes, ...]


@dataclass(frozen=True)
class PipelineEstimate:
    """Estimates pipelines of one step. What was asked before is remembered.

    laid_out  the number of parts of weights whose layouts stand for those of all numbers; 0: each has its own
    """

    pipelines: StepPipelines
    laid_out: int = 0
    _ways: dict[tuple[int, int, int], LineTimes] = field(default_factory=dict)
    _along: dict[tuple[int, int], WorkAlong] = field(default_factory=dict)

    @property
    def _workers(self) -> int:
        return self.pipelines.space.workers

    def step_s(self, pipeline: Pipeline) -> float:
        """Return about how long a step takes."""
        line, prices, count = self.pipelines.line, self.pipelines.prices, pipeline.microbatches
        of_one = self._times(pipeline)
        both, ahead, behind = map(list, (of_one.both, of_one.ahead, of_one.behind))
        for begin in (0, *pipeline.starts):
            both[begin] += SEGMENTS * prices.start_s
            ahead[begin] += prices.start_s
        work = self.along(pipeline.data, pipeline.tensor).work
        sharers = pipeline.data if pipeline.shares else 1
        for place, _, update_s in work.updates(prices.node_s, pipeline.tensor, count, sharers):
            both[place] += update_s
            behind[place] += update_s
        times = LineTimes(both, ahead, behind)
        traffic = replace(self.pipelines.traffic(pipeline), summed=partial(self._summed_s, pipeline))
        stages, gradients = pipeline.stages, work.gradient_bytes(pipeline.tensor)
        turns = CutPricer(times, line.nbytes, line.shared, stages, traffic, gradients)
        return turns.step_s(pipeline.starts)

    def replicas_s(self, data: int, microbatches: int = 1) -> float:
        """Return about how long a step of whole replicas takes, whose sums go on beside the way back."""
        replicas, start_s = Pipeline(data, 1, (), microbatches), self.pipelines.prices.start_s
        times, work = self._times(replicas), self.pipelines.line.work
        both, ahead = (microbatches * (sum(seconds) + start_s) for seconds in (times.both, times.ahead))
        sums_s = self._summed_s(replicas, sum(work.gradient_bytes(1)), 0)
        update_s = sum(second for *_, second in work.updates(self.pipelines.prices.node_s, 1, 1))
        return ahead + max(both - ahead + start_s, sums_s) + update_s

    def _times(self, pipeline: Pipeline) -> LineTimes:
        """Return what each place takes of a micro-batch: of all, forward alone, and with nobody waiting."""
        key = pipeline.data, pipeline.tensor, pipeline.microbatches
        if key not in self._ways:
            self._ways[key] = add_up([*self._each(*key)], self.pipelines.line.work.places)
        return self._ways[key]

    def _each(self, data: int, tensor: int, count: int) -> Iterator[TimedWork]:
        """Yield what nodes, additions of gradients and messages along `tensor` take of a micro-batch."""
        prices, shares = self.pipelines.prices, self.pipelines.shares(data)
        along = self.along(data, tensor)
        yield from along.work.each(prices.node_s, shares, tensor, count)
        for place, when, sent in along.sent:
            yield place, when, prices.sum_s(sent / (shares * count), range(tensor))
        for place, when, nbytes in self.among_replicas:
            yield place, when, prices.summed(data, tensor)(nbytes, 0)

    def _summed_s(self, pipeline: Pipeline, nbytes: float, stage: int) -> float:
        """Return what a stage's replicas sum once its last micro-batch is through.

        Those that share variables scatter the gradients of every micro-batch, and gather once.
        """
        prices, data, tensor = self.pipelines.prices, pipeline.data, pipeline.tensor
        if not pipeline.shares or data == 1:
            return prices.summed(data, tensor)(nbytes, stage)
        members = prices.replicas(data, tensor, stage)
        nbytes *= prices.beside(members, tensor)
        scattered_s = pipeline.microbatches * prices.scatter_s(nbytes, members)
        return scattered_s + prices.gather_s(nbytes, members)

    @cached_property
    def among_replicas(self) -> tuple[AwaitedBytes, ...]:
        """Return what replicas sum in the middle of a step, those that are ready together as one."""
        analysis, line = self.pipelines.analysis, self.pipelines.line
        if not is_batch_wide(analysis):
            return ()
        graph = lay_out(
            analysis, {}, configure(analysis, self.pipelines.strategy(Pipeline(self._workers, 1)))
        )
        return tuple(_awaited(analysis, graph, line))

    def along(self, data: int, tensor: int) -> WorkAlong:
        """Return what ranks along `tensor` do and send."""
        line = self.pipelines.line
        if tensor == 1:
            return WorkAlong(line.work, ())
        if self.laid_out:
            data, tensor = self._workers // self.laid_out, self.laid_out
        key = data, tensor
        if key not in self._along:
            analysis = self.pipelines.analysis
            alone = Pipeline(self._workers // tensor, tensor)
            graph = lay_out(analysis, {}, configure(analysis, self.pipelines.strategy(alone)))
            divided = {name: each.axes[1] for name, each in graph.decisions.items() if len(each.axes) > 1}
            homes = graph.configuration.homes.items()
            shared = {name for name, home in homes if isinstance(home.along(1), Split)}
            parts = TensorParts(divided, shared)
            work = line_work(analysis, line.places, line.work.places, parts)
            self._along[key] = WorkAlong(work, tuple(_sent_along(analysis, graph, line)))
        return self._along[key]


def _sent_along(analysis: Analysis, graph: LaidOutGraph, line: StageLine) -> Iterator[SentBytes]:
    """Yield what is sent along `tensor`."""
    when_of = line.work.when_of
    maker = {t.name: node.name for node in analysis.training.graph.nodes for t in node.outputs}
    for name, times in sent_along(graph, analysis.order, axis=1).items():
        if (node := maker.get(name, "")) in analysis.main:
            yield line.places.nodes[node], when_of.get(node, "back"), times / 2 * analysis.facts.nbytes(name)


def _awaited(analysis: Analysis, graph: LaidOutGraph, line: StageLine) -> Iterator[AwaitedBytes]:
    """Yield what is sent among replicas and read by further nodes, at the place of what is ready first."""
    when_of = line.work.when_of
    nodes = [node for node in analysis.training.graph.nodes if node.name in analysis.main]
    read = {tensor.name for node in nodes for tensor in node.inputs}
    sent = sent_along(graph, analysis.order, axis=0).keys() & read
    behind: dict[str, int] = {}  # tensor -> how many messages it waits for, one behind the other
    together: dict[int, list[tuple[gs.Node, str]]] = {}
    for node in nodes:
        waited = max((behind.get(tensor.name, 0) for tensor in node.inputs), default=0)
        for tensor in node.outputs:
            behind[tensor.name] = waited + (tensor.name in sent)
            if tensor.name in sent:
                together.setdefault(waited, []).append((node, tensor.name))
    for messages in together.values():
        first = messages[0][0].name
        nbytes = sum(analysis.facts.nbytes(name) for _, name in messages)
        yield line.places.nodes[first], when_of.get(first, "back"), nbytes
