import numpy as np
import pytest

from partc.runtime.execution.row_hashes import row_hashes
from partc.runtime.plan.boxes import columns_of, find_rows, take
from partc.runtime.plan.variables import Box
from tests.builders.plans.random_boxes import cut, random_shape


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "bool"])
def test_rows_that_differ_in_one_element_have_other_numbers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, 2, (50, 3, 5)).astype(dtype)
    changed = table.copy()
    changed[7, 2, 4] = not changed[7, 2, 4]

    assert np.flatnonzero(row_hashes(table) != row_hashes(changed)).tolist() == [7]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8"])
@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_of_boxes_add_up_to_the_rows(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    whole = (100 * rng.normal(size=shape)).astype(dtype)
    boxes = cut(rng, Box(factored, tuple(tuple((0, size) for size in sizes) for sizes in factored)), 5)

    numbers = np.zeros(shape[0], np.uint64)
    for box in boxes:
        places, own_rows = find_rows(box, np.arange(shape[0]))
        numbers[places] += row_hashes(take(whole, box), columns_of(box))[own_rows]

    np.testing.assert_array_equal(numbers, row_hashes(whole))
