"""Batches of different sizes that were handed over are read back, one behind the other."""

from pathlib import Path

import numpy as np

from partc.runtime.data.feeds import is_stream, open_source, shards_of
from partc.runtime.data.staged_batches import write_batches
from partc.runtime.plan.variables import DataInput
from tests.builders.plans.hand_made_plans import plan_of, rank, with_changes

INPUTS = (
    DataInput("x", "float16", ("b", 3), 0),
    DataInput("is/known", "bool", (7, "b"), 1),
    DataInput("rate", "float64", (), None),
)


def test_batches_have_the_sizes_and_types_that_they_had(tmp_path: Path) -> None:
    ranks = [rank(0, ("worker",), 0, {}), rank(1, ("worker",), 1, {})]
    plan = with_changes(plan_of(ranks, [], data_inputs=INPUTS), batch="global", sizes={"b": 4})
    rng = np.random.default_rng(0)
    batches = [
        {
            "x": rng.normal(size=(size, 3)).astype(np.float16),
            "is/known": rng.random((7, size)) < 0.5,
            "rate": np.float64(size),
        }
        for size in (2, 6, 4)
    ]
    folder = tmp_path / "with:colon"
    folder.mkdir()

    data = write_batches(plan, batches, folder)

    assert is_stream(data)
    assert shards_of(data, 2) == 0
    source = open_source(data, plan)
    for step in (0, 2):  # a job that goes on begins behind some
        shares = [source.share(one, step) for one in plan.ranks]
        np.testing.assert_array_equal(np.concatenate([s["x"] for s in shares]), batches[step]["x"])
        joined = np.concatenate([s["is/known"] for s in shares], axis=1)
        np.testing.assert_array_equal(joined, batches[step]["is/known"])
        assert shares[1]["rate"] == batches[step]["rate"]
