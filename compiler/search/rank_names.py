"""Order named strategies by what their steps are estimated to take, before any of them is laid out.

The estimate is of pipelines (estimate_pipelines.py): `tensor=K`, `fsdp` and their products are those of one
stage, and `layerwise` is one of a host's devices. Of each family the name that promises most comes first,
then all others; what the estimate knows nothing of, `one-weird-trick` and `spatial=K`, comes in between.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest

from partc.compiler.compilation import Compilation
from partc.compiler.planning.name_strategy import MICROBATCHES_PER_STAGE
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.search.estimate_pipelines import PipelineEstimate
from partc.compiler.search.step_pipelines import StepPipelines
from partc.cost.named_strategy import NamedStrategy, parse_named
from partc.passes.search.pipeline_space import Pipeline

# A name whose estimate is so many times the quickest step so far is not priced. Of 176 names of five models
# on two clusters estimates were 0.2 to 1.6 times the plan's step, and once 2.6 times: none that is quicker
# was missed (docs/decisions/045-auto-tries-names.md).
FAR_SLOWER = 1.5


@dataclass(frozen=True, slots=True)
class Promise:
    """A name, and about what its step takes; None where that is not known before it is laid out."""

    name: str
    estimated_s: float | None

    def is_far_from(self, least_s: float) -> bool:
        """Tell whether it is estimated to be far slower than a step of so many seconds."""
        return self.estimated_s is not None and self.estimated_s > FAR_SLOWER * least_s


@paused_collection()
def rank_names(first: Compilation, names: Iterable[str]) -> list[Promise]:
    """Return names in the order in which they are worth a plan; without pipelines of more stages than nodes.

    `first`: data parallelism of the step, analysed; one batch for all.
    """
    pipelines = StepPipelines(first)
    hosts = first.worker_hosts
    on_host = hosts.count(hosts[0])
    laid_out = on_host if on_host > 1 and len(hosts) % on_host == 0 else len(hosts)
    estimate = PipelineEstimate(pipelines, laid_out)
    estimated: list[Promise] = []
    others: list[Promise] = []
    for name in names:
        named = parse_named(name)
        assert named is not None, "a name"
        if named.splits_dense or "spatial" in named.sizes:
            others.append(Promise(name, None))
        elif (pipeline := pipeline_of(pipelines, named)) is not None:
            estimated.append(Promise(name, estimate.step_s(pipeline)))
    estimated.sort(key=lambda promise: promise.estimated_s or 0.0)
    best_of_family = {family_of(promise.name): promise for promise in reversed(estimated)}.values()
    heads = sorted(best_of_family, key=estimated.index)
    heads[1:1] = others[:1]
    rest = [promise for promise in estimated if promise not in heads]
    turns = zip_longest(rest, others[1:])
    return heads + [promise for turn in turns for promise in turn if promise is not None]


def family_of(name: str) -> str:
    """Return what kind of strategy a name is: its first word."""
    return name.partition("=")[0].partition(",")[0]


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
    most = named.microbatches or (MICROBATCHES_PER_STAGE * named.stages if named.stages > 1 else 1)
    count = max(count for count in space.counts(data) if count <= most)
    pipeline = Pipeline(data, tensor, (), count, named.shards_variables and data > 1)
    return replace(pipeline, starts=space.cut(named.stages, pipeline))
