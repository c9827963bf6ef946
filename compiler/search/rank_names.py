"""Order named strategies by what their steps are estimated to take, before any of them is laid out.

The estimate is of pipelines (estimate_pipelines.py), of which `tensor=K`, `fsdp` and their products are those
of one stage. What it knows nothing of, experts and `spatial=K`, comes in between by turns.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest

from partc.compiler.compilation import Compilation
from partc.compiler.planning.name_strategy import MICROBATCHES_PER_STAGE
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.search.estimate_pipelines import PipelineEstimate
from partc.compiler.search.step_pipelines import StepPipelines
from partc.cost.named_strategy import NamedStrategy, parse_named
from partc.passes.search.pipeline_space import Pipeline


@paused_collection()
def rank_names(first: Compilation, names: Iterable[str]) -> list[str]:
    """Return names in the order in which they are worth a plan; without pipelines of more stages than nodes.

    `first`: data parallelism of the step, analysed; one batch for all.
    """
    pipelines = StepPipelines(first)
    hosts = first.worker_hosts
    on_host = hosts.count(hosts[0])
    laid_out = on_host if on_host > 1 and len(hosts) % on_host == 0 else len(hosts)
    estimate = PipelineEstimate(pipelines, laid_out)
    estimated: dict[str, float] = {}
    others = []
    for name in names:
        named = parse_named(name)
        assert named is not None, "a name"
        if named.divides_layers or named.splits_dense or "spatial" in named.sizes:
            others.append(name)
        elif (pipeline := pipeline_of(pipelines, named)) is not None:
            estimated[name] = estimate.step_s(pipeline)
    ranked = sorted(estimated, key=estimated.__getitem__)
    return [name for turn in zip_longest(ranked, others) for name in turn if name is not None]


def pipeline_of(pipelines: StepPipelines, named: NamedStrategy) -> Pipeline | None:
    """Return what a name of replicas, shared weights and stages means; None: there are too many stages."""
    space = pipelines.space
    if named.stages > max(1, space.places):
        return None
    sizes = named.mesh(space.workers)
    data, tensor = sizes["data"], sizes.get("tensor", 1)
    most = named.microbatches or (MICROBATCHES_PER_STAGE * named.stages if named.stages > 1 else 1)
    count = max(count for count in space.counts(data) if count <= most)
    pipeline = Pipeline(data, tensor, (), count, named.shards_variables and data > 1)
    return replace(pipeline, starts=space.cut(named.stages, pipeline))
