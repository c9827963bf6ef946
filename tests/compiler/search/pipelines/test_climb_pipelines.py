"""Climbs among pipelines: the quickest of all where all may be priced, and an end wherever one is set."""

from math import inf

import numpy as np
import pytest

from partc.compiler.search.pipelines.climb_pipelines import PipelineClimb
from partc.passes.search.stages.pipeline_space import Pipeline
from tests.passes.search.stages.test_pipeline_space import all_pipelines, space_of


def climb_of(seed: int, most: float = inf) -> tuple[PipelineClimb, dict[Pipeline, float]]:
    """Return a climb over random prices, and all of these; a third of the pipelines cannot be."""
    space, rng = space_of(4), np.random.default_rng(seed)
    prices = {p: float(rng.random()) if rng.random() < 2 / 3 else inf for p in sorted(all_pipelines(space))}
    climb = PipelineClimb(space, prices.__getitem__, lambda pipeline: 0.0, lambda priced: priced < most)
    climb.run([Pipeline(4)], np.random.default_rng(seed))
    return climb, prices


@pytest.mark.parametrize("seed", range(3))
def test_without_an_end_the_quickest_of_all_is_found(seed: int) -> None:
    climb, prices = climb_of(seed)

    assert min(climb.prices.values()) == min(prices.values())
    best = min(prices, key=prices.__getitem__)
    assert best in climb.optimal


@pytest.mark.parametrize("seed", range(10))
def test_where_it_ends_no_change_is_quicker(seed: int) -> None:
    climb, prices = climb_of(seed, most=40)

    assert climb.priced <= 40
    for found in climb.optimal:
        assert all(prices[found] <= prices[move] for move in climb.space.moves(found))


def test_equal_seeds_price_alike() -> None:
    assert list(climb_of(3, most=30)[0].prices) == list(climb_of(3, most=30)[0].prices)
    assert list(climb_of(3, most=30)[0].prices) != list(climb_of(4, most=30)[0].prices)


def test_what_is_estimated_to_be_quickest_is_tried_first() -> None:
    space = space_of(4)
    tried: list[Pipeline] = []

    def price(pipeline: Pipeline) -> float:
        tried.append(pipeline)
        return 1.0

    climb = PipelineClimb(space, price, lambda p: float(p.microbatches), lambda priced: priced < 5)
    climb.run([Pipeline(1, 1, (1, 2, 3), 2)], np.random.default_rng(0))

    assert [p.microbatches for p in tried[1:]] == sorted(p.microbatches for p in tried[1:])
