"""Boxes of a drawing do not lie on each other, and follow what they read."""

import numpy as np
import pytest

from partc.compiler.report.operators.lay_out_boxes import BoxPlaces, place_boxes


def order_of(places: BoxPlaces) -> list[tuple[int, int]]:
    return list(zip(places.columns, places.rows, strict=True))


def test_a_chain_goes_down_and_then_into_the_next_column() -> None:
    places = place_boxes(30, [(n, n + 1) for n in range(29)])

    assert order_of(places) == sorted(order_of(places))
    assert len(set(order_of(places))) == 30
    assert 2 <= max(places.columns) + 1 <= 4
    assert places.width == 1


@pytest.mark.parametrize("count", [7, 17, 31, 47])
def test_columns_are_about_equally_long(count: int) -> None:
    places = place_boxes(count, [(n, n + 1) for n in range(count - 1)])

    lengths = [places.columns.count(column) for column in range(max(places.columns) + 1)]
    assert max(lengths) - min(lengths) <= len(lengths)


def test_branches_stand_side_by_side_without_crossing() -> None:
    # Two branches of one box: 0 -> 1 -> 3, 0 -> 2 -> 4, and both into 5.
    places = place_boxes(6, [(0, 1), (0, 2), (2, 4), (1, 3), (3, 5), (4, 5)])

    assert places.rows[1] == places.rows[2] and places.rows[3] == places.rows[4]
    assert (places.places[1] < places.places[2]) == (places.places[3] < places.places[4])


def test_what_reads_nothing_stands_above_its_first_reader_and_what_is_alone_at_the_end() -> None:
    places = place_boxes(6, [(0, 1), (1, 2), (2, 4), (3, 4)])

    assert places.rows[3] == places.rows[2]
    assert places.rows[5] == max(places.rows)


def test_a_loop_is_drawn_in_the_order_of_its_boxes() -> None:
    assert place_boxes(2, [(0, 1), (1, 0)]).rows == (0, 1)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_never_share_a_place_and_readers_come_behind(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    ends = rng.integers(0, count, (int(rng.integers(0, 120)), 2)).tolist()
    edges = [(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]]

    places = place_boxes(count, edges)

    where = list(zip(places.columns, places.rows, places.places, strict=True))
    for number, (column, row, place) in enumerate(where):
        assert all(
            abs(place - other) >= 2 for c, r, other in where[:number] if (c, r) == (column, row)
        )  # of halves of a box
        assert 0 <= place <= 2 * (places.width - 1)
    assert all(order_of(places)[a] < order_of(places)[b] for a, b in edges)
