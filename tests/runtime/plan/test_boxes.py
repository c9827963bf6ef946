"""Boxes against plain NumPy indexing, at random."""

from math import prod

import numpy as np
import pytest

from partc.runtime.plan.boxes import (
    assemble,
    columns_of,
    contiguous_rows,
    cover_fault,
    fault_of,
    find_rows,
    first_index,
    is_empty,
    is_whole,
    local_shape,
    normalised,
    place,
    rows_box,
    take,
    view,
    with_rows,
)
from partc.runtime.plan.variables import Box
from tests.builders.plans.random_boxes import FACTORS, cut, held, indices, random_box, random_shape

QKV = ((4,), (3, 2))
SEEDS = range(100)


def whole_of(factored: tuple[tuple[int, ...], ...]) -> Box:
    return Box(factored, tuple(tuple((0, size) for size in sizes) for sizes in factored))


def test_a_strided_box_of_columns() -> None:
    w = np.arange(24).reshape(4, 6)
    box = Box(QKV, (((0, 4),), ((0, 3), (1, 2))))

    assert local_shape(w.shape, box) == (4, 3)
    np.testing.assert_array_equal(take(w, box), w[:, [1, 3, 5]])
    assert first_index(box) == (0, 1)
    assert contiguous_rows(box) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_box_is_what_numpy_indexes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    box = random_box(rng, factored)
    whole = rng.integers(0, 1000, shape)
    expected = whole[np.ix_(*indices(box))]

    assert local_shape(shape, box) == expected.shape
    np.testing.assert_array_equal(take(whole, box), expected)
    assert take(whole, box).flags.c_contiguous
    assert np.shares_memory(view(whole, box), whole) or not expected.size
    assert is_whole(box) == (expected.shape == shape)
    assert is_empty(box) == any(
        size and not len(axis) for size, axis in zip(shape, indices(box), strict=True)
    )
    if expected.size:
        assert first_index(box) == tuple(int(of_axis[0]) for of_axis in indices(box))
    written = np.zeros_like(whole)
    place(written, box, expected)
    np.testing.assert_array_equal(written, np.where(held(shape, box), whole, 0))
    assert fault_of(shape, box) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_parts_have_one_normal_form_whatever_their_factors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 12
    writings = [
        sizes for sizes in (*FACTORS, (12,), (4, 3), (3, 4), (2, 2, 3), (3, 2, 2)) if prod(sizes) == size
    ]
    forms: dict[bytes, Box | None] = {}
    for _ in range(60):
        box = random_box(rng, (writings[rng.integers(len(writings))],))
        mask = held((size,), box)
        if mask.any():
            assert forms.setdefault(mask.tobytes(), normalised(box)) == normalised(box)
    assert len(set(forms.values())) == len(forms) > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_contiguous_rows_are_found_and_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    box = random_box(rng, factored)
    if is_empty(box) or is_whole(box) or not prod(shape):
        return
    rows, *columns = indices(box)
    is_of_rows = [len(of_axis) for of_axis in columns] == list(shape[1:]) and rows[-1] - rows[0] + 1 == len(
        rows
    )

    assert contiguous_rows(box) == ((rows[0], rows[-1] + 1) if is_of_rows else None)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_found_in_a_box_and_its_columns_put_beside_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    boxes = cut(rng, whole_of(factored), 4)
    whole = rng.integers(1, 1000, shape)
    rows = np.flatnonzero(rng.random(shape[0]) < 0.5)

    found = np.zeros((len(rows), *shape[1:]), whole.dtype)
    for box in boxes:
        places, own_rows = find_rows(box, rows)
        assert rows[places].tolist() == [row for row in rows if row in indices(box)[0]]
        target = view(found, with_rows(len(rows), columns_of(box)))
        target[places] = take(whole, box)[own_rows].reshape(len(places), *target.shape[1:])
    np.testing.assert_array_equal(found, whole[rows])


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_cut_and_copied_covers_a_tensor_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    boxes = cut(rng, whole_of(factored), int(rng.integers(1, 9)))
    whole = rng.integers(0, 1000, shape)

    assert cover_fault(shape, {box: str(box) for box in boxes}) is None
    np.testing.assert_array_equal(assemble(shape, whole.dtype, [(b, take(whole, b)) for b in boxes]), whole)


@pytest.mark.parametrize("seed", SEEDS)
def test_boxes_at_random_cover_a_tensor_where_numpy_counts_one_everywhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    if not prod(shape):
        return
    boxes = cut(rng, whole_of(factored), 5)
    for _ in range(rng.integers(0, 3)):  # one is left out, moved, or written with plain axes where it can be
        number = rng.integers(len(boxes))
        change = rng.integers(3)
        if change == 0:
            boxes.pop(number)
        elif change == 1:
            boxes[number] = random_box(rng, factored)
        else:
            boxes[number] = normalised(boxes[number]) or boxes[number]
    parts = {held(shape, box).tobytes(): held(shape, box) for box in boxes if not is_empty(box)}
    count = sum((part.astype(int) for part in parts.values()), np.zeros(shape, int))

    fault = cover_fault(shape, {box: f"rank {n}" for n, box in enumerate(boxes)})

    assert (fault is None) == bool((count == 1).all()), (fault, boxes)


def test_holes_and_overlaps_say_where() -> None:
    left, right = (Box(QKV, (((0, 4),), ((0, 3), ends))) for ends in ((0, 1), (1, 2)))
    assert cover_fault((4, 6), {left: "rank 0", right: "rank 1"}) is None
    assert cover_fault((4, 6), {left: "rank 0"}) == "nobody holds axis 1: [1, 2) of factor 2"
    assert cover_fault((4, 6), {}) == "nobody holds it"
    assert cover_fault((4, 6), {rows_box((4, 6), 0, 3): "rank 0"}) == "nobody holds rows [3, 4)"
    overlap = cover_fault((4, 6), {left: "rank 0", right: "rank 1", rows_box((4, 6), 1, 2): "rank 2"})
    assert overlap is not None and "rank 0 and rank 2 hold" in overlap
    whole = cover_fault((4, 6), {None: "rank 3", right: "rank 1"})
    assert whole == "rank 3 holds it whole, rank 1 a part of it"


@pytest.mark.parametrize(
    ("box", "what"),
    [
        (Box(((4,),), (((0, 4),),)), "1 axes"),
        (Box(((4,), (3, 3)), (((0, 4),), ((0, 3), (0, 3)))), "factors [3, 3] of axis 1"),
        (Box(((4,), ()), (((0, 4),), ())), "factors [] of axis 1"),
        (Box(((-4,), (-6,)), (((0, 4),), ((0, 6),))), "factors [-4] of axis 0"),
        (Box(QKV, (((0, 4),), ((0, 6),))), "2 axes"),
        (Box(QKV, (((0, 4),), ((0, 3), (0, 3)))), "[0, 3) of 2 on axis 1"),
        (Box(QKV, (((0, 4),), ((2, 1), (0, 2)))), "[2, 1) of 3 on axis 1"),
    ],
)
def test_a_box_that_is_none_of_a_tensor_is_told(box: Box, what: str) -> None:
    fault = fault_of((4, 6), box)

    assert fault is not None and what in fault


def test_many_owners_of_rows_are_checked_in_time() -> None:
    """A sweep, not a comparison of each with each: 20,000 ranks are 2 x 10^8 pairs."""
    shape = (40_000, 8)
    boxes = {rows_box(shape, first, first + 2): f"rank {first // 2}" for first in range(0, 40_000, 2)}

    assert cover_fault(shape, boxes) is None
