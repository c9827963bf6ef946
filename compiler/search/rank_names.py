"""Order named strategies by what their steps are estimated to take, before any of them is laid out.

    tensor=K, fsdp, pipeline=K   pipelines (estimate_pipelines.py), these of one stage; with workers=K on the
                                 quickest workers
    layerwise                    a pipeline of a host's devices
    workers=K                    a pipeline of one stage on the quickest workers, sums beside the way back
    one-weird-trick              data parallelism without sums of dense layers' gradients, whose activations
                                 all workers gather instead
    spatial=K                    data parallelism: as much is computed and summed, and borders are sent

Of each family the name that promises most comes first, then all others. Each has also what it takes at the
least, by which it may be left out: estimates are off by a factor, data parallelism is priced.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import log2

from partc.compiler.compilation import Compilation
from partc.compiler.planning.name_strategy import default_microbatches
from partc.compiler.planning.quickest_workers import quickest_first
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.search.pipelines.estimate_pipelines import PipelineEstimate
from partc.compiler.search.pipelines.step_pipelines import StepPipelines
from partc.cost.named_strategy import WORKERS, NamedStrategy, parse_named
from partc.passes.layouts.meshes import Mesh
from partc.passes.search.named.split_dense import find_dense
from partc.passes.search.stages.pipeline_space import Pipeline

# A name is not priced whose estimate is so many times the quickest step so far. Of 176 names of five models
# on two clusters estimates were 0.2 to 1.6 times the plan's step, and once 2.6 times: none that is quicker
# was missed (docs/decisions/045-auto-tries-names.md, 065-hopeless-names.md).
FAR_SLOWER = 1.5
# Of 30 numbers of workers of five models estimates were 0.2 to 1.1 times the plan's step, and of one weird
# trick of eleven 0.2 to 0.9 times.
DOUBT_OF_REPLICAS = 1.25
# Of names by which few workers share weights: what FAR_SLOWER let through besides took flexflow_nmt and moe 6
# to 15 s of processors, and was never the quickest (docs/decisions/084-a-mesh-of-some-workers.md).
DOUBT_OF_FEW = 1.1
# What twice as many workers must promise at least, for estimates know nothing of how many messages there are.
A_DOUBLING = 0.01
# The same where replicas of few workers share weights: of six models the estimate's share of the plan's step
# fell by 0 to 12 %, and mostly 8, with every doubling of the replicas (093-what-ranks-divide.md).
A_DOUBLING_OF_SHARED = 0.08
# What one-weird-trick saves, at most, of the seconds of the sums that it does without: these hold up others.
# Of AlexNet it was 2.003.
MOST_SAVED = 2.1
SPATIAL_GAIN = 1.1  # over data parallelism, at most


@dataclass(frozen=True, slots=True)
class Promise:
    """A name, about what its step takes, and what it takes at the least, seconds."""

    name: str
    estimated_s: float
    least_s: float


@dataclass(frozen=True, slots=True)
class NameEstimate:
    """A name, and what is known of its step before data parallelism is priced.

    alone_s  of a pipeline: its step
    doubt    by how much that may be too long
    gain     of what is told from data parallelism: by how much its estimate may be too long; 0: a pipeline
    saved_s, moved_s  of one weird trick: sums of dense gradients, and sums as long as the activations that
             are gathered
    saved    the share of data parallelism's estimate that these sums are
    """

    name: str
    alone_s: float = 0.0
    doubt: float = FAR_SLOWER
    gain: float = 0.0
    saved_s: float = 0.0
    moved_s: float = 0.0
    saved: float = 0.0

    def promise(self, data_parallel_s: float) -> Promise:
        """Return what the name promises where data parallelism takes so long; 0: it does not fit."""
        if not self.gain:
            return Promise(self.name, self.alone_s, self.alone_s / self.doubt)
        estimated_s = data_parallel_s * (1 - self.saved) + self.moved_s
        least_s = max(data_parallel_s - MOST_SAVED * self.saved_s, estimated_s / self.doubt) / self.gain
        return Promise(self.name, estimated_s, least_s if data_parallel_s else 0.0)


def rank_names(first: Compilation, names: Iterable[str], data_parallel_s: float | None) -> list[Promise]:
    """Return names in the order in which they are worth a plan; without pipelines of more stages than nodes.

    `first`: data parallelism of the step, analysed; one batch for all. `data_parallel_s`: its step, None
    where it does not fit: what is told from it promises most then.
    """
    return in_order(estimate_names(first, names), data_parallel_s)


def in_order(estimates: Iterable[NameEstimate], data_parallel_s: float | None) -> list[Promise]:
    """Return the names in the order in which they are worth a plan, by what is known of them."""
    promises = [estimate.promise(data_parallel_s or 0.0) for estimate in estimates]
    promises.sort(key=lambda each: each.estimated_s)
    best_of_family = {family_of(promise.name): promise for promise in reversed(promises)}.values()
    return sorted(promises, key=lambda each: each not in best_of_family)


@paused_collection()
def estimate_names(first: Compilation, names: Iterable[str]) -> tuple[NameEstimate, ...]:
    """Return what is known of names; without pipelines of more stages than nodes."""
    return tuple(_estimates(first, names))


def _estimates(first: Compilation, names: Iterable[str]) -> Iterator[NameEstimate]:
    pipelines = StepPipelines(first)
    hosts = first.worker_hosts
    on_host = hosts.count(hosts[0])
    laid_out = on_host if on_host > 1 and len(hosts) % on_host == 0 else len(hosts)
    estimate = PipelineEstimate(pipelines, laid_out)
    order = quickest_first(first.analysis, pipelines.prices)
    is_natural = list(order) == sorted(order)
    on_quickest = estimate if is_natural else PipelineEstimate(StepPipelines(first, order), laid_out)
    for name in names:
        named = parse_named(name)
        assert named is not None, "a name"
        if named.splits_dense:
            yield _one_weird_trick(name, pipelines, estimate.replicas_s(len(hosts)))
        elif "spatial" in named.sizes:
            yield NameEstimate(name, gain=SPATIAL_GAIN)
        elif named.has_replicas_alone and named.workers is not None:
            alone_s = on_quickest.replicas_s(named.workers, named.microbatches or 1)
            longer = 1 + A_DOUBLING * log2(named.workers)
            yield NameEstimate(name, alone_s=alone_s * longer, doubt=DOUBT_OF_REPLICAS)
        else:
            own, doubt = (estimate, FAR_SLOWER) if named.workers is None else (on_quickest, DOUBT_OF_FEW)
            if (pipeline := pipeline_of(own.pipelines, named)) is not None:
                doublings = 0.0 if named.workers is None else log2(pipeline.data)
                alone_s = own.step_s(pipeline) * (1 + A_DOUBLING_OF_SHARED * doublings)
                yield NameEstimate(name, alone_s=alone_s, doubt=doubt)


def _one_weird_trick(name: str, pipelines: StepPipelines, data_parallel_s: float) -> NameEstimate:
    """Estimate what data parallelism takes without sums of dense gradients, and with activations gathered.

    `data_parallel_s`: as it is estimated, of which the sums are as large a share as of the plan's step. An
    activation is gathered on the way forward, and its gradient scattered: together as long as a sum.
    """
    analysis, prices, workers = pipelines.analysis, pipelines.prices, pipelines.space.workers
    weights, activations = find_dense(analysis, Mesh("worker", (("data", workers),)))
    gradients = (analysis.training.gradients[weight].dense for weight in weights)
    nbytes = sum(analysis.facts.nbytes(gradient) for gradient in gradients if gradient is not None)
    summed_s = prices.sum_s(nbytes, range(workers)) if nbytes else 0.0
    moved_s = sum(prices.sum_s(analysis.facts.nbytes(each), range(workers)) for each in activations)
    saved = min(1.0, summed_s / data_parallel_s)
    return NameEstimate(
        name, gain=1.0, doubt=DOUBT_OF_REPLICAS, saved_s=summed_s, moved_s=moved_s, saved=saved
    )


def family_of(name: str) -> str:
    """Return what kind of strategy a name is: its first word, of some workers or of all."""
    first = name.partition("=")[0].partition(",")[0]
    return f"{first} of few" if f",{WORKERS}=" in name else first


def pipeline_of(pipelines: StepPipelines, named: NamedStrategy) -> Pipeline | None:
    """Return what a name of replicas, shared weights and stages means; None: there are too many stages."""
    space = pipelines.space
    if named.divides_layers:
        hosts = len(set(pipelines.first.worker_hosts))
        stages = space.workers // hosts
        if stages * hosts != space.workers or stages > max(1, space.places):
            return None
        pipeline = Pipeline(hosts, 1, (), 1, False)
        return replace(pipeline, starts=space.cut(stages, pipeline))
    if named.stages > max(1, space.places):
        return None
    sizes = named.mesh(space.workers)
    data, tensor = sizes["data"], sizes.get("tensor", 1)
    most = named.microbatches or default_microbatches(pipelines.analysis, named.stages, data)
    count = max(count for count in space.counts(data) if count <= most)
    pipeline = Pipeline(data, tensor, (), count, named.shards_variables and data > 1)
    return replace(pipeline, starts=space.cut(named.stages, pipeline))
