"""Moves between random regions: everybody ends with what he wants, and is sent nothing that he has."""

from math import prod

import numpy as np
import pytest

from partc.runtime.plan.moves import find_moves, intersect, place_in, region_of, shape_of
from partc.runtime.plan.program import Region
from partc.runtime.plan.variables import Box
from tests.builders.plans.random_boxes import cut, indices, random_shape


def partition(
    rng: np.random.Generator, shape: tuple[int, ...], factored: tuple[tuple[int, ...], ...], ranks: int
) -> list[Region | None]:
    """Share a tensor out among ranks: parts that may be uneven and strided, some of them on several ranks."""
    whole = Box(factored, tuple(tuple((0, size) for size in sizes) for sizes in factored))
    parts = [box for box in cut(rng, whole, int(rng.integers(1, ranks + 1))) if all(map(len, indices(box)))]
    held: list[Region | None] = [region_of(parts[rank % len(parts)]) for rank in range(ranks)]
    return [held[place] for place in rng.permutation(ranks)]


def drawn(seed: int) -> tuple[tuple[int, ...], list[Region | None], list[Region | None], list[str]]:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    while not prod(shape):
        shape, factored = random_shape(rng)
    others = tuple((prod(sizes),) for sizes in factored)
    ranks = int(rng.integers(1, 7))
    has = [*partition(rng, shape, factored, ranks), None]
    wants = [None, *partition(rng, shape, others, ranks)]
    return shape, has, wants, [f"h{rank // 2}" for rank in range(ranks + 1)]


@pytest.mark.parametrize("seed", range(60))
def test_everybody_ends_with_what_he_wants_and_is_sent_what_he_lacks(seed: int) -> None:
    shape, has, wants, hosts = drawn(seed)
    whole = np.arange(1, prod(shape) + 1).reshape(shape)
    local = [None if region is None else whole[np.ix_(*_indices(region))] for region in has]
    results = [None if region is None else np.zeros(shape_of(region), int) for region in wants]

    for move in find_moves(has, wants, hosts):
        source, target = has[move.source], wants[move.target]
        assert source is not None and target is not None
        piece = local[move.source][place_in(source, move.region)]
        into = results[move.target][place_in(target, move.region)]
        assert not into.any(), "each part comes once"
        results[move.target][place_in(target, move.region)] = piece
        own = has[move.target]
        assert move.source == move.target or own is None or intersect(own, move.region) is None

    for region, result in zip(wants, results, strict=True):
        if region is not None:
            np.testing.assert_array_equal(result, whole[np.ix_(*_indices(region))])


def _indices(region: Region) -> list[np.ndarray]:
    return [np.concatenate([np.arange(*ends) for ends in ranges]) for ranges in region]


def test_who_is_on_the_same_host_sends() -> None:
    whole: Region = (((0, 4),),)

    moves = find_moves([whole, None, whole, None], [None, whole, None, whole], ["a", "a", "b", "b"])

    assert [(move.source, move.target) for move in moves] == [(0, 1), (2, 3)]


def test_of_several_that_have_it_the_one_sends_who_has_sent_least() -> None:
    whole: Region = (((0, 4),),)

    moves = find_moves([whole, whole, *[None] * 4], [None, None, *[whole] * 4], list("abcdef"))

    assert sorted(move.source for move in moves) == [0, 0, 1, 1]


def test_blocks_that_touch_are_one_range() -> None:
    box = Box(((3, 4),), (((0, 3), (0, 4)),))
    halves = Box(((3, 4),), (((0, 3), (2, 4)),))

    assert region_of(box) == (((0, 12),),)
    assert region_of(halves) == (((2, 4), (6, 8), (10, 12)),)
