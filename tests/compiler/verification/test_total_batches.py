"""What verify reads for itself is what the ranks read together."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.compiler.verification.total_batches import total_batches
from partc.runtime.data.feeds import open_source
from partc.runtime.errors import BadData
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput
from tests.builders.plans.linear_plans import linear_all_reduce

INPUTS = (
    DataInput("x", "float64", (4, 3), 0),
    DataInput("t", "int64", (2, "n"), 1, high=5),
    DataInput("lr", "float64", (), None),
    DataInput("table", "float64", (2, 2), None),
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", replicas=2)).plan
    return msgspec.structs.replace(plan, data_inputs=INPUTS, sizes={"n": 4})


def check_shares(plan: Plan, data: str) -> None:
    source = open_source(data, plan, 3)
    workers = [rank for rank in plan.ranks if rank.replica is not None]
    for step, batch in enumerate(total_batches(plan, data, 5, 3)):
        shares = [source.share(rank, step) for rank in workers]
        for entry in INPUTS:
            found = [share[entry.name] for share in shares]
            whole = found[0] if entry.sample_axis is None else np.concatenate(found, entry.sample_axis)
            np.testing.assert_array_equal(batch[entry.name], whole)


def test_synthetic_batches(plan: Plan) -> None:
    check_shares(plan, "synthetic")


def test_batches_of_a_file_begin_again_at_its_end(plan: Plan, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz",
        x=rng.normal(size=(21, 3)),
        t=rng.integers(0, 5, (2, 21)),
        lr=np.array(0.5),
        table=rng.normal(size=(3, 2, 2)),
    )

    check_shares(plan, str(tmp_path / "data.npz"))


@pytest.mark.parametrize(("dtype", "entries"), [("float32", [0.5, 0.25, 0.125]), ("bool", [True, False])])
def test_an_entry_a_step_without_axes_is_an_array(
    plan: Plan, tmp_path: Path, dtype: str, entries: list[float]
) -> None:
    """Of NumPy's scalars, ONNX Runtime takes none."""
    entry = DataInput("lr", dtype, (), None)
    np.savez(tmp_path / "data.npz", lr=np.array(entries, dtype))
    plan = msgspec.structs.replace(plan, data_inputs=(entry,))

    batches = list(total_batches(plan, str(tmp_path / "data.npz"), 4, 0))

    assert all(isinstance(batch["lr"], np.ndarray) for batch in batches)
    assert [batch["lr"].item() for batch in batches] == [entries[step % len(entries)] for step in range(4)]


def test_too_few_batches_are_refused(plan: Plan) -> None:
    with pytest.raises(BadData, match="fix: give one total batch per step"):
        total_batches(plan, [], 1, 0)
