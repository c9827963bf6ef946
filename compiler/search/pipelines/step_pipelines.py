"""The pipelines of a step: which there are, what they mean as strategies, and about what they take."""

from dataclasses import dataclass, field
from functools import cached_property

from partc.compiler.compilation import Compilation
from partc.compiler.planning.name_strategy import microbatch_counts, share_variables
from partc.compiler.planning.stage_prices import StagePrices
from partc.cost.named_strategy import AXES
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.passes.analysis import Analysis
from partc.passes.search.stages.cut_stages import StageLine, stage_line
from partc.passes.search.stages.pipeline_space import Pipeline, PipelineSpace
from partc.passes.search.stages.price_cuts import PipelineTraffic

Homes = dict[str, dict[str, AxisSplit]]


@dataclass(frozen=True)
class StepPipelines:
    """Pipelines of a step that is analysed, as a mesh of one worker a replica would have it.

    order  in which workers are taken, by number; empty: the cluster's
    """

    first: Compilation
    order: tuple[int, ...] = ()
    _homes: dict[tuple[int, int, bool], Homes] = field(default_factory=dict)
    _cuts: dict[tuple[int, int, int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def analysis(self) -> Analysis:
        """Return what is known of the step."""
        return self.first.analysis

    @cached_property
    def prices(self) -> StagePrices:
        """Return what the cluster's workers and links take."""
        return StagePrices(self.first.cluster, self.order)

    @cached_property
    def line(self) -> StageLine:
        """Return the forward nodes that are divided among stages."""
        return stage_line(self.analysis)

    @cached_property
    def space(self) -> PipelineSpace:
        """Return which pipelines there are: a batch of each replica's own keeps the number of replicas."""
        workers = len(self.first.worker_names)
        return PipelineSpace(
            workers, len(self.line.nodes), self._counts, self._cut, self.analysis.per_replica
        )

    def shares(self, data: int) -> int:
        """Return into how many parts replicas divide the graph's own batch."""
        return 1 if self.analysis.per_replica else data

    def traffic(self, like: Pipeline) -> PipelineTraffic:
        """Return what messages of a pipeline take."""
        grid = {"data": like.data, "tensor": like.tensor}
        return self.prices.traffic(grid, like.microbatches, self.analysis.per_replica)

    def _counts(self, data: int) -> tuple[int, ...]:
        return microbatch_counts(self.analysis, self.shares(data))

    def _cut(self, stages: int, like: Pipeline) -> tuple[int, ...]:
        key = stages, like.data, like.tensor, like.microbatches
        if stages == 1:
            return ()
        if key not in self._cuts:
            traffic = self.traffic(like)
            times = traffic.times(self.line.work, self.prices.node_s)
            self._cuts[key] = tuple(self.line.cut(stages, times, traffic))
        return self._cuts[key]

    def strategy(self, pipeline: Pipeline) -> Strategy:
        """Return the strategy that a pipeline is, as a name would be written out."""
        data, tensor, shares = key = pipeline.data, pipeline.tensor, pipeline.shares
        sizes = {"data": data} | ({"tensor": tensor} if tensor > 1 else {})
        if key not in self._homes:
            self._homes[key] = share_variables(self.analysis, sizes, shares)
        begins = self.line.begins(pipeline.starts)
        return Strategy(
            MESH_STRATEGY_FORMAT,
            "per-replica" if self.analysis.per_replica else "global",
            {},
            mesh=sizes,
            variables=self._homes[key],
            ops=tuple(OpConfig(node, stage=stage) for node, stage in begins.items()),
            stages=pipeline.stages,
            microbatches=pipeline.microbatches,
        )

    def read(self, strategy: Strategy) -> Pipeline | None:
        """Return the pipeline whose strategy this is, None where it is none's."""
        sizes = {name: size for name, size in strategy.mesh.items() if size > 1}
        is_of_all = bool(strategy.mesh) and not strategy.devices
        if not is_of_all or sizes.keys() - {"data", "tensor"} or set(strategy.mesh) - set(AXES):
            return None
        stage_of = {config.op: config.stage or 0 for config in strategy.ops}
        starts = self.line.starts(stage_of, strategy.stages)
        data, tensor = sizes.get("data", 1), sizes.get("tensor", 1)
        shares = data > 1 and any("data" in home for home in strategy.variables.values())
        read = Pipeline(data, tensor, starts, strategy.microbatches, shares)
        again = self.strategy(read)
        is_same = again.variables == strategy.variables and again.ops == strategy.ops
        return read if is_same else None

    def describe(self, pipeline: Pipeline, before: Pipeline | None) -> str:
        """Return in words what a pipeline changes."""
        words = [
            f"{name}={now}"
            for name, now, was in (
                ("stages", pipeline.stages, before and before.stages),
                ("data", pipeline.data, before and before.data),
                ("tensor", pipeline.tensor, before and before.tensor),
                ("microbatches", pipeline.microbatches, before and before.microbatches),
            )
            if now != (was or 1)
        ]
        if pipeline.shares != (before is not None and before.shares):
            words.append("fsdp" if pipeline.shares else "no fsdp")
        was_starts = before.starts if before is not None and before.stages == pipeline.stages else ()
        for stage, start in enumerate(pipeline.starts, 1):
            if before is None or start not in was_starts:
                words.append(f"stage {stage} from {self.line.nodes[start].name}")
        return ", ".join(words) or "data alone"
