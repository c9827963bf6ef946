"""What ranks along `tensor` are estimated to compute is what their plan computes."""

from itertools import product
from pathlib import Path

import pytest

from partc.compiler.planning.stage_prices import StagePrices
from partc.compiler.search.pipelines.estimate_pipelines import PipelineEstimate
from partc.compiler.search.pipelines.step_pipelines import StepPipelines
from partc.runtime.plan.program import Run, Start, Wait
from tests.builders.plans.compiled_steps import cluster_of
from tests.compiler.search.test_sent_bytes import MODELS, compiled
from tests.sampling import sampled

WITHIN = 0.15


def flops_alone(flops: int, nbytes: int, packed_bytes: int = 0) -> float:
    return float(flops)


@pytest.mark.parametrize(("name", "parts"), sampled(product(MODELS, (2, 4)), [1, 5, 9]))
def test_a_rank_computes_what_it_was_estimated_to(name: str, parts: int, tmp_path: Path) -> None:
    """Also of convolutions and light weights that stay whole along `tensor`."""
    alone = compiled(name, "workers=1", tmp_path)
    compilation = compiled(name, f"tensor={parts},workers={parts}", tmp_path)

    estimate = PipelineEstimate(StepPipelines(alone))
    work = estimate.along(1, parts).work
    estimated = sum(second for *_, second in work.each(flops_alone, 1, parts, 1))

    runs = [each for each in compilation.plan.instructions if isinstance(each, Run)]
    assert estimated == pytest.approx(sum(each.flops for each in runs), rel=WITHIN)


@pytest.mark.parametrize("name", ["resnet50", "mlp"])
def test_replicas_wait_for_the_messages_that_were_counted(name: str, tmp_path: Path) -> None:
    """Of batch normalisations; gradients' sums are counted apart, and nobody waits for them within a step."""
    compilation = compiled(name, "data=4", tmp_path)

    counted = PipelineEstimate(StepPipelines(compilation)).among_replicas

    starts = {i.tag_id: i for i in compilation.plan.instructions if isinstance(i, Start)}
    last_sum = max(place for place, i in enumerate(compilation.plan.instructions) if isinstance(i, Start))
    awaited = [
        starts[i.tag_id]
        for place, i in enumerate(compilation.plan.instructions)
        if isinstance(i, Wait) and place < last_sum
    ]
    assert len(counted) == pytest.approx(len(awaited), rel=WITHIN)
    assert sum(nbytes for *_, nbytes in counted) == pytest.approx(
        sum(start.payload_bytes for start in awaited), rel=WITHIN
    )


@pytest.mark.parametrize(
    ("shape", "data", "tensor", "groups"),
    [("2x2", 2, 2, 2), ("4x1", 2, 2, 1), ("1x4", 2, 2, 2), ("2x4", 4, 2, 2)],
)
def test_groups_of_replicas_share_a_hosts_links(shape: str, data: int, tensor: int, groups: int) -> None:
    """One of each rank along `tensor` on a host sums over its link; within a host all are on it."""
    prices = StagePrices(cluster_of(shape))
    assert prices.beside(prices.replicas(data, tensor, 0), tensor) == groups
