"""Shuffled epochs are permutations, one unlike the other, whoever asks for which part of them."""

import numpy as np
import pytest

from partc.runtime.data.array_source import SampleOrder, permuted


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1000, 4097])
def test_every_epoch_has_every_sample_once(count: int) -> None:
    for key in ("0/0", "0/1", "7/0"):
        found = permuted(np.arange(count), count, key)
        np.testing.assert_array_equal(np.sort(found), np.arange(count))


def test_parts_of_an_order_are_parts_of_it() -> None:
    order = SampleOrder(10, seed=3)
    whole = order.indices(0, 40)
    rng = np.random.default_rng(0)
    for first in range(40):
        samples = int(rng.integers(0, 40 - first + 1))
        np.testing.assert_array_equal(order.indices(first, samples), whole[first : first + samples])
    epochs = whole.reshape(4, 10)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not np.array_equal(whole, SampleOrder(10, seed=4).indices(0, 40))


def test_without_a_seed_samples_are_used_as_they_lie() -> None:
    np.testing.assert_array_equal(SampleOrder(3).indices(2, 5), [2, 0, 1, 2, 0])


def test_places_are_as_good_as_random() -> None:
    """No place is left near where it was: mean distance and correlation are those of random permutations."""
    count = 20_000
    moved = permuted(np.arange(count), count, "1/0")

    assert abs(np.corrcoef(np.arange(count), moved)[0, 1]) < 0.03
    assert abs(np.abs(moved - np.arange(count)).mean() / (count / 3) - 1) < 0.03
    neighbours = np.abs(np.diff(moved)).mean()
    assert abs(neighbours / (count / 3) - 1) < 0.03
