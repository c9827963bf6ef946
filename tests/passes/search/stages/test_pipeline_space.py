"""Pipelines: every change is one of the space, and leads in the end to all of it."""

from itertools import combinations

import numpy as np
import pytest

from partc.passes.search.stages.pipeline_space import Pipeline, PipelineSpace

PLACES = 5


def space_of(workers: int, is_fixed: bool = False) -> PipelineSpace:
    def counts(data: int) -> tuple[int, ...]:
        return tuple(n for n in (1, 2, 4, 8) if 8 // data % n == 0)

    def cut(stages: int, like: Pipeline) -> tuple[int, ...]:
        return tuple(PLACES * stage // stages for stage in range(1, stages))

    return PipelineSpace(workers, PLACES, counts, cut, is_fixed)


def all_pipelines(space: PipelineSpace) -> set[Pipeline]:
    """Return the space, counted out by itself."""
    return {
        Pipeline(data, tensor, starts, count, shares)
        for stages in range(1, PLACES + 1)
        for data in range(1, space.workers + 1)
        for tensor in range(1, space.workers + 1)
        if stages * data * tensor == space.workers
        for starts in combinations(range(1, PLACES), stages - 1)
        for count in space.counts(data)
        for shares in ((False, True) if data > 1 else (False,))
    }


@pytest.mark.parametrize("workers", [1, 2, 4, 6])
def test_changes_lead_from_anywhere_to_all_pipelines(workers: int) -> None:
    space = space_of(workers)
    expected = all_pipelines(space)

    for start in (Pipeline(workers), Pipeline(1, workers)):
        reached, latest = {start}, {start}
        while latest:
            latest = {move for here in latest for move in space.moves(here)} - reached
            reached |= latest
        assert reached == expected


def test_draws_are_of_all_pipelines() -> None:
    space, rng = space_of(4), np.random.default_rng(0)

    assert {space.draw(rng) for _ in range(5_000)} == all_pipelines(space)


def test_a_change_is_of_one_thing() -> None:
    here = Pipeline(2, 1, (2,), 2)

    found = set(space_of(4).moves(here))

    cuts = {Pipeline(2, 1, (start,), 2) for start in (1, 3, 4)}
    counts = {Pipeline(2, 1, (2,), count) for count in (1, 4)}
    shared = {Pipeline(2, 1, (2,), 2, shares=True)}
    grids = {Pipeline(4, 1, (), 1), Pipeline(4, 1, (), 2), Pipeline(2, 2, (), 1), Pipeline(2, 2, (), 2)}
    grids |= {Pipeline(1, 2, (2,), 2), Pipeline(1, 1, (1, 2, 3), 2), Pipeline(1, 1, (1, 2, 3), 4)}
    assert found == cuts | counts | shared | grids


def test_a_batch_of_each_replicas_own_keeps_the_replicas() -> None:
    space = space_of(4, is_fixed=True)

    assert set(space.moves(Pipeline(4))) == {Pipeline(4, microbatches=2), Pipeline(4, shares=True)}
