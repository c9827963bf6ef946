"""Where tables are cut so that their pieces carry given shares of the traffic."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partc.cost.assignment.row_spread import cut, share_of_traffic, spread_of


def test_a_cut_shares_the_touches_that_were_counted() -> None:
    touches = np.sort(np.random.default_rng(0).integers(0, 1000, 500) ** 3)[::-1]
    spread = spread_of(touches)

    ends = [0, *np.cumsum(cut(spread, 500, [0.5, 0.25, 0.25]))]

    carried = [touches[start:stop].sum() / touches.sum() for start, stop in itertools.pairwise(ends)]
    assert carried == pytest.approx([0.5, 0.25, 0.25], abs=1 / 64)


def test_rows_without_a_measured_spread_carry_alike() -> None:
    assert cut((), 10, [0.5, 0.5]) == [5, 5]
    assert share_of_traffic((), 10, 2, 4) == pytest.approx(0.2)


def test_what_was_never_touched_has_no_spread() -> None:
    assert spread_of(np.zeros(5, np.int64)) == ()


def test_one_row_may_carry_nearly_everything() -> None:
    touches = np.ones(1000, np.int64)
    touches[0] = 10**6

    pieces = cut(spread_of(touches), 1000, [0.5, 0.0, 0.5])

    assert pieces == [1, 0, 999]


@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=90),
    st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
)
def test_pieces_cover_all_rows_and_those_with_a_share_are_not_empty(
    touches: list[int], weights: list[int]
) -> None:
    spread = spread_of(np.array(touches))

    pieces = cut(spread, len(touches), [weight / sum(weights) for weight in weights])

    assert sum(pieces) == len(touches)
    assert [piece > 0 for piece in pieces] == [weight > 0 for weight in weights]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=90), st.integers(0, 90), st.integers(0, 90))
def test_shares_of_neighbouring_pieces_add_up(touches: list[int], first: int, second: int) -> None:
    rows = len(touches)
    low, high = sorted((min(first, rows), min(second, rows)))
    spread = spread_of(np.array(touches))

    parts = [share_of_traffic(spread, rows, *ends) for ends in ((0, low), (low, high), (high, rows))]

    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= -1e-12
