"""Variables that were stored in some boxes, read in others: numpy says what belongs where."""

from pathlib import Path

import numpy as np
import pytest

from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.errors import BadCheckpoint
from partc.runtime.plan.boxes import is_empty, take
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.variables import Box
from tests.builders.checkpoints import stored_checkpoint
from tests.builders.plans.linear_plans import linear_all_reduce
from tests.builders.plans.random_boxes import cut, random_box, random_shape


def whole_box(factored: tuple[tuple[int, ...], ...]) -> Box:
    return Box(factored, tuple(tuple((0, size) for size in sizes) for sizes in factored))


@pytest.mark.parametrize("seed", range(60))
def test_any_box_is_read_from_any_boxes(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    whole = rng.normal(size=shape).astype(np.float32)
    parts = cut(rng, whole_box(factored), int(rng.integers(1, 6)))
    parts = list(dict.fromkeys(part for part in parts if not is_empty(part))) or [whole_box(factored)]

    stored = StoredValues(stored_checkpoint(tmp_path, 1, {"w": whole}, {"w": parts}))

    other = random_box(rng, factored)
    plain = random_box(rng, tuple((size,) for size in shape))
    for box in (None, other, plain, *parts):
        found = stored.part("w", box)
        np.testing.assert_array_equal(found, take(whole, box))
        assert found.dtype == whole.dtype
        assert found.flags.c_contiguous


def test_scalars_are_read(tmp_path: Path) -> None:
    stored = StoredValues(stored_checkpoint(tmp_path, 1, {"count": np.array(7, np.int64)}))

    assert stored.part("count") == 7


VARIABLES = {"W": np.zeros((3, 2))}


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({}, "it lacks variable 'W'"),
        ({"V": np.zeros(2), **VARIABLES}, "the plan lacks variable 'V'"),
        ({"W": np.zeros((3, 3))}, r"'W' is float64\[3, 3\] in it, float64\[3, 2\] in the plan"),
        ({"W": np.zeros((3, 2), np.float32)}, "'W' is float32"),
    ],
)
def test_another_models_variables_are_refused(
    tmp_path: Path, variables: dict[str, np.ndarray], what: str
) -> None:
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", 1)).plan
    StoredValues(stored_checkpoint(tmp_path / "same", 1, VARIABLES)).check(plan)

    folder = stored_checkpoint(tmp_path / "other", 1, {"extra": np.zeros(1), **variables})
    with pytest.raises(BadCheckpoint, match=what):
        StoredValues(folder).check(plan)
