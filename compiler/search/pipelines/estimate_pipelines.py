"""Estimate what a pipeline's step takes from what its nodes and messages take alone: no plan is made.

step = M micro-batches at all stages, in turns (shared_weights.py) + the longest end of a stage

each micro-batch   of a node, its flops and activations / (M x data x tensor), its weights / tensor;
                   gradients are added to those before; over a cut go activations, along `tensor` what
                   layouts ask for
the end            sums of a stage's gradients among its replicas, and its updates, as one pass over memory

Of replicas alone what is summed may go on beside the way back, and what takes longer counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from partc.compiler.search.pipelines.step_pipelines import StepPipelines
from partc.passes.configure import configure
from partc.passes.distribute import lay_out
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.scheduling.segment_work import PACKING_OPS
from partc.passes.search.named.weight_layouts import sent_along
from partc.passes.search.operators.forward_nodes import find_variables_behind
from partc.passes.search.stages.cut_stages import ADDITION_TRAFFIC, find_unawaited, gradient_bytes
from partc.passes.search.stages.pipeline_space import Pipeline
from partc.passes.search.stages.shared_weights import LineTimes, PipelineTraffic, SharedPipeline

SEGMENTS = 2  # of a micro-batch at a stage: forward and back

When = Literal["ahead", "back", "behind"]  # forward, back, and back with nobody waiting for it
TimedWork = tuple[int, When, float]  # place in the line, when, seconds


@dataclass(frozen=True, slots=True)
class _Work:
    """A node: its place in the line, when it runs, what it computes, its bytes of weights or of samples.

    `packed_bytes`: of a weight that a product packs, of every micro-batch anew.
    """

    place: int
    when: When
    flops: int
    weight_bytes: int
    sample_bytes: int
    packed_bytes: int


@dataclass(frozen=True)
class PipelineEstimate:
    """Estimates pipelines of one step. What was asked before is remembered.

    laid_out  the number of parts of weights whose layouts stand for those of all numbers; 0: each has its own
    """

    pipelines: StepPipelines
    laid_out: int = 0
    _ways: dict[tuple[int, int, int], LineTimes] = field(default_factory=dict)
    _sent: dict[tuple[int, int], tuple[TimedWork, ...]] = field(default_factory=dict)

    def step_s(self, pipeline: Pipeline) -> float:
        """Return about how long a step takes."""
        line, prices, count = self.pipelines.line, self.pipelines.prices, pipeline.microbatches
        of_one = self._times(pipeline)
        both, ahead, behind = map(list, (of_one.both, of_one.ahead, of_one.behind))
        borders = list(pairwise((0, *pipeline.starts, len(both))))
        for begin, _ in borders:
            both[begin] += SEGMENTS * prices.start_s
            ahead[begin] += prices.start_s
        sent, shares = prices.sent(pipeline.data * pipeline.tensor), self.pipelines.shares(pipeline.data)
        times = LineTimes(*([count * second for second in seconds] for seconds in (both, ahead, behind)))
        traffic = PipelineTraffic(sent, count, shares=shares)
        turns = SharedPipeline(times, line.nbytes, line.shared, pipeline.stages, traffic)
        ends = (self._end_s(pipeline, stage, *border) for stage, border in enumerate(borders))
        return turns.step_s(pipeline.starts) + max(ends)

    def replicas_s(self, data: int, microbatches: int = 1) -> float:
        """Return about how long a step of whole replicas takes, whose sums go on beside the way back."""
        replicas, start_s = Pipeline(data, 1, (), microbatches), self.pipelines.prices.start_s
        times = self._times(replicas)
        both, ahead = (microbatches * (sum(seconds) + start_s) for seconds in (times.both, times.ahead))
        sums_s, update_s = self._apart_s(replicas, 0, 0, len(self.pipelines.line.seconds.both))
        return ahead + max(both - ahead + start_s, sums_s) + update_s

    def _times(self, pipeline: Pipeline) -> LineTimes:
        """Return what each place takes of a micro-batch: of all, forward alone, and with nobody waiting."""
        key = pipeline.data, pipeline.tensor, pipeline.microbatches
        if key not in self._ways:
            both, ahead, behind = ([0.0] * len(self.pipelines.line.seconds.both) for _ in range(3))
            of_when: dict[When, list[float]] = {"ahead": ahead, "behind": behind}
            for place, when, seconds in self._each(*key):
                both[place] += seconds
                if when in of_when:
                    of_when[when][place] += seconds
            self._ways[key] = LineTimes(both, ahead, behind)
        return self._ways[key]

    def _each(self, data: int, tensor: int, count: int) -> Iterator[TimedWork]:
        """Yield what nodes, additions of gradients and messages along `tensor` take of a micro-batch."""
        prices, parts = self.pipelines.prices, count * self.pipelines.shares(data)
        for work in self._works:
            nbytes = (work.sample_bytes // parts + work.weight_bytes) // tensor
            flops, packed_bytes = work.flops // parts // tensor, work.packed_bytes // tensor
            yield work.place, work.when, prices.node_s(flops, nbytes, packed_bytes)
        for place, nbytes in enumerate(self._gradient_bytes):
            if count > 1 and nbytes:
                yield place, "behind", prices.node_s(0, ADDITION_TRAFFIC * nbytes // tensor)
        for place, when, sent in self._sent_along(data, tensor) if tensor > 1 else ():
            yield place, when, prices.sum_s(sent / parts, range(tensor))

    def _end_s(self, pipeline: Pipeline, stage: int, begin: int, end: int) -> float:
        return sum(self._apart_s(pipeline, stage, begin, end))

    def _apart_s(self, pipeline: Pipeline, stage: int, begin: int, end: int) -> tuple[float, float]:
        """Return what a stage does once its last micro-batch is through: sums among replicas, and updates."""
        prices, tensor = self.pipelines.prices, pipeline.tensor
        updated = sum(self._update_bytes[begin:end]) // tensor
        update_s = prices.node_s(0, updated // pipeline.data if pipeline.shares else updated)
        if pipeline.data == 1:
            return 0.0, update_s
        size = pipeline.data * tensor
        members = range(stage * size, (stage + 1) * size, tensor)
        # Groups along `tensor` sum at once, over the same links.
        sizes = self._gradient_bytes[begin:end]
        if not pipeline.shares:
            return prices.sum_s(sum(sizes), members), update_s
        # Replicas that share variables scatter the gradients of every micro-batch, and gather once: each when
        # it is read.
        scattered_s = pipeline.microbatches * sum(prices.scatter_s(size, members) for size in sizes if size)
        return scattered_s + sum(prices.gather_s(size, members) for size in sizes if size), update_s

    @cached_property
    def _works(self) -> Sequence[_Work]:
        return tuple(self._count_work())

    def _count_work(self) -> Iterator[_Work]:
        """Yield the nodes of the main computation; what only moves a tensor costs nothing."""
        analysis, line = self.pipelines.analysis, self.pipelines.line
        facts, training = analysis.facts, analysis.training
        main = [node for node in training.graph.nodes if node.name in analysis.main]
        weights = {name for name, of in find_variables_behind(main, training.variables, facts).items() if of}
        weights |= {g.dense for g in training.gradients.values() if g.dense is not None}
        for node in main:
            rule, sizes = rule_of(node, facts), [0, 0]
            is_fixed = all(facts.fixed_value(tensor.name) is not None for tensor in node.outputs)
            if is_fixed or (rule is not None and rule.moves):
                continue
            for tensor in (*node.inputs, *node.outputs):
                is_table = rule is not None and rule.indexed and tensor.name in weights
                if tensor.name and not is_table:
                    sizes[tensor.name not in weights] += facts.nbytes(tensor.name)
            flops = rule.flops if rule is not None else 0
            packs = node.op in PACKING_OPS and node.inputs[1].name in weights
            packed_bytes = facts.nbytes(node.inputs[1].name) if packs else 0
            place, when = line.places.nodes[node.name], self._when(node.name)
            weight_bytes, sample_bytes = sizes
            yield _Work(place, when, flops, weight_bytes, sample_bytes, packed_bytes)

    def _when(self, node: str) -> When:
        return self._when_of.get(node, "back")

    @cached_property
    def _when_of(self) -> dict[str, When]:
        analysis, line = self.pipelines.analysis, self.pipelines.line
        behind: dict[str, When] = {node.name: "behind" for node in find_unawaited(analysis, line.places)}
        return behind | {node.name: "ahead" for node in line.nodes}

    def _sent_along(self, data: int, tensor: int) -> tuple[TimedWork, ...]:
        """Return what is sent along `tensor`, as the bytes in place of seconds of an AllReduce as long."""
        workers = self.pipelines.space.workers
        if self.laid_out:
            data, tensor = workers // self.laid_out, self.laid_out
        key = data, tensor
        if key not in self._sent:
            analysis, line = self.pipelines.analysis, self.pipelines.line
            alone = Pipeline(workers // tensor, tensor)
            graph = lay_out(analysis, {}, configure(analysis, self.pipelines.strategy(alone)))
            maker = {t.name: node.name for node in analysis.training.graph.nodes for t in node.outputs}
            self._sent[key] = tuple(
                (line.places.nodes[node], self._when(node), times / 2 * analysis.facts.nbytes(name))
                for name, times in sent_along(graph, analysis.order, axis=1).items()
                if (node := maker.get(name, "")) in analysis.main
            )
        return self._sent[key]

    @cached_property
    def _gradient_bytes(self) -> Sequence[int]:
        line = self.pipelines.line
        return gradient_bytes(self.pipelines.analysis, line.places, len(line.seconds.both))

    @cached_property
    def _update_bytes(self) -> Sequence[int]:
        """Return what every place's updates read and write: of tables the rows that were read."""
        analysis, line = self.pipelines.analysis, self.pipelines.line
        nbytes_of = list(self._gradient_bytes)
        for name in analysis.training.variables:
            gradient = analysis.training.gradients.get(analysis.followers.get(name) or name)
            rows = gradient.rows if gradient is not None and gradient.dense is None else None
            nbytes_of[line.places.variables[name]] += 2 * analysis.facts.nbytes(rows or name)
        return nbytes_of
