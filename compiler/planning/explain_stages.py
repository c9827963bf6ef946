"""Say why a pipeline's stages have unequal work: weights that several would read, or one large operator.

The cut is made anew, into equal stages and as the strategy has it, and both are priced as when it was chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from partc.compiler.compilation import Compilation
from partc.compiler.planning.stage_prices import StagePrices
from partc.compiler.report.units import join_words, percent, ranges, seconds, size
from partc.passes.search.operators.forward_nodes import find_variables_behind
from partc.passes.search.stages.cut_stages import IDLE_STAGE, StageLine, stage_line
from partc.passes.search.stages.line_work import LineTimes
from partc.passes.search.stages.price_cuts import CutPricer, PipelineTraffic

UNEVEN = 1.5  # of the busiest stage's time by the mean: what is more is warned of
NAMES_TOLD = 2


def explain_stages(compilation: Compilation) -> str:
    """Return why stages are uneven, as sentences; empty where they are not, or nothing tells."""
    strategy = compilation.strategy
    if strategy.stages < 2 or not strategy.mesh:
        return ""
    places = [compilation.worker_names.index(device) for device in strategy.devices]
    prices = StagePrices(compilation.cluster, tuple(places))
    line, traffic = stage_line(compilation.analysis), _traffic(compilation, prices)
    stage_of = {op.op: op.stage for op in strategy.ops if op.stage is not None}
    starts = line.starts(stage_of, strategy.stages)
    if list(starts) != sorted(set(starts)) or starts[-1] >= len(line.nodes):
        return ""  # a strategy.json that names its operators otherwise
    times = traffic.times(line.work, prices.node_s)
    busy = _busy(times.both, starts)
    mean = sum(busy) / len(busy)
    if not mean or max(busy) < UNEVEN * mean:
        return ""
    return f"{_unequal(busy, mean)} {_Reasons(compilation, line, starts, times, traffic).sentence()}".rstrip()


def _traffic(compilation: Compilation, prices: StagePrices) -> PipelineTraffic:
    strategy, per_replica = compilation.strategy, compilation.options.chosen_batch() != "global"
    return prices.traffic(strategy.mesh, strategy.microbatches, per_replica)


def _busy(times: Sequence[float], starts: Sequence[int]) -> list[float]:
    return [sum(times[begin:end]) for begin, end in pairwise([0, *starts, len(times)])]


def _unequal(busy: Sequence[float], mean: float) -> str:
    most = max(range(len(busy)), key=busy.__getitem__)
    sentence = f"Stage {most} computes {max(busy) / mean:.1f} times as long as the mean of all stages"
    idle = [stage for stage, second in enumerate(busy) if second < IDLE_STAGE * mean]
    if not idle:
        return f"{sentence}."
    stages = f"stage {idle[0]} has" if len(idle) == 1 else f"stages {ranges(idle)} have"
    return f"{sentence}, and {stages} next to nothing to do."


@dataclass(frozen=True)
class _Reasons:
    compilation: Compilation
    line: StageLine
    starts: Sequence[int]
    times: LineTimes
    traffic: PipelineTraffic

    def sentence(self) -> str:
        """Return the reason why equal stages are not what the strategy has."""
        stages = len(self.starts) + 1
        equal, line = self.line.cut(stages, self.times), self.line
        gradients = line.work.gradient_bytes(self.traffic.tensor)
        pipeline = CutPricer(self.times, line.nbytes, line.shared, stages, self.traffic, gradients)
        parted = self._parted(equal)
        if parted and pipeline.step_s(self.starts) < pipeline.step_s(equal):
            return self._of_weights(parted, pipeline.step_s(equal), pipeline.step_s(self.starts))
        both = self.times.both
        largest = max(range(len(both)), key=both.__getitem__)
        share = both[largest] / sum(both)
        if share * stages >= UNEVEN:
            name = line.nodes[largest].name
            return f"{name} alone takes {percent(share)} of the computing, and a stage runs whole operators."
        return ""

    def _parted(self, starts: Sequence[int]) -> dict[str, frozenset[str]]:
        """Return what several stages would read: weights, or what is made of them -> variables."""
        analysis, stage_places = self.compilation.analysis, self.line.places.nodes
        training, nbytes = analysis.training, analysis.facts.nbytes
        nodes = [node for node in training.graph.nodes if node.name in analysis.main]
        behind = find_variables_behind(nodes, training.variables, analysis.facts)
        stages: dict[str, set[int]] = {}
        for node in nodes:
            stage = sum(start <= stage_places[node.name] for start in starts)
            for tensor in node.inputs:
                if behind.get(tensor.name):
                    stages.setdefault(tensor.name, set()).add(stage)
        parted = sorted((name for name, of in stages.items() if len(of) > 1), key=lambda n: (-nbytes(n), n))
        return {name: behind[name] for name in parted}

    def _of_weights(self, parted: Mapping[str, frozenset[str]], equal_s: float, taken_s: float) -> str:
        names = list(dict.fromkeys(name for variables in parted.values() for name in sorted(variables)))
        some = names[:NAMES_TOLD]
        if more := len(names) - len(some):
            some.append(f"{more} more")
        verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
        amount = size(sum(map(self.compilation.analysis.facts.nbytes, parted)))
        return (
            f"{join_words(some)} ({amount}) {verb} read at several places of the model, and stages of equal "
            f"work would part the readers: every step would send {them} from stage to stage, and gradients "
            f"back. That is estimated at {seconds(equal_s)} a step, this cut at {seconds(taken_s)}. Fewer "
            "stages, or --strategy data or tensor, leave no device idle."
        )
