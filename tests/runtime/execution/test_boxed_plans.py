"""Ranks that keep boxes of a variable, in one process, against one device."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.compiler.verification.ranks import launch_in_process
from partc.compiler.verification.verify import verify
from partc.runtime.errors import Diverged
from partc.runtime.execution.in_process import RanksInProcess, train_in_process
from partc.runtime.execution.row_hashes import row_hashes
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from tests.builders.plans.boxed_plans import (
    LAYOUTS,
    boxed_momentum,
    momentum_batches,
    momentum_losses,
    momentum_trained,
)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_are_trained_as_one_device_trains_the_whole(tmp_path: Path, layout: str, replicas: int) -> None:
    folder = boxed_momentum(tmp_path / "out", LAYOUTS[layout], replicas)
    batches = momentum_batches(replicas, steps=3)

    result = train_in_process(folder, batches, read_after=(2,))

    for variables, steps in ((result.variables, 3), (result.variables_after[2], 2)):
        for name, expected in momentum_trained(folder, batches[:steps]).items():
            np.testing.assert_allclose(variables[name], expected, rtol=1e-12, err_msg=name)
            assert variables[name].shape == expected.shape
    assert result.disagreeing == ()
    losses = np.array([outputs["loss"] for outputs in result.outputs])
    np.testing.assert_allclose(losses, momentum_losses(folder, batches, replicas), rtol=1e-12)
    assert result.outputs[0]["distances"].shape == (3 * replicas,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_goes_on_where_another_stopped(tmp_path: Path, layout: str) -> None:
    batches = momentum_batches(2, steps=4)
    first = train_in_process(boxed_momentum(tmp_path / "first", LAYOUTS["strided"], 2), batches[:2])
    folder = boxed_momentum(tmp_path / "out", LAYOUTS[layout], 2)

    result = train_in_process(folder, batches[2:], first.variables)

    for name, expected in momentum_trained(folder, batches).items():
        np.testing.assert_allclose(result.variables[name], expected, rtol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_puts_boxes_together(tmp_path: Path, layout: str) -> None:
    folder = boxed_momentum(tmp_path / "out", LAYOUTS[layout], 2)

    report = verify(folder, steps=3, launcher=launch_in_process)

    assert report.passed, report.summary()
    assert {check.name: check.max_change > 0 for check in report.variables} == dict.fromkeys(
        ("w", "v", "count"), True
    )


def test_verify_tells_a_box_that_is_another_ranks(tmp_path: Path) -> None:
    folder = boxed_momentum(tmp_path / "out", LAYOUTS["strided"], 2)
    plan = read_plan_folder(folder).plan
    boxes = [rank.pieces for rank in plan.ranks]
    ranks = tuple(
        msgspec.structs.replace(rank, pieces=boxes[rank.rank ^ 1]) for rank in plan.ranks
    )  # the constants say otherwise

    report = verify(
        PlanFolder(msgspec.structs.replace(plan, ranks=ranks), folder), steps=2, launcher=launch_in_process
    )

    assert {check.name for check in report.variables if check.verdict != "equal"} == {"w", "v"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_rows_and_hashes_of_rows_are_those_of_the_whole(tmp_path: Path, layout: str) -> None:
    folder = read_plan_folder(boxed_momentum(tmp_path / "out", LAYOUTS[layout], 2))
    with launch_in_process(folder, momentum_batches(2, steps=1), 1, 0) as ranks:
        ranks.step()
        whole = ranks.read("w")
        rows = np.array([0, 2, 3])

        np.testing.assert_array_equal(ranks.read("w", rows), whole[rows])
        np.testing.assert_array_equal(ranks.read("w", rows[:0]), whole[:0])
        np.testing.assert_array_equal(ranks.row_hashes("w"), row_hashes(whole))
        np.testing.assert_array_equal(ranks.row_hashes("count"), row_hashes(ranks.read("count")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_a_box_that_differ_are_told(tmp_path: Path, layout: str) -> None:
    folder = boxed_momentum(tmp_path / "out", LAYOUTS[layout], 2)
    ranks = RanksInProcess(folder)
    with launch_in_process(read_plan_folder(folder), momentum_batches(2, steps=1), 1, 0) as verified:
        assert ranks.disagreeing() == verified.disagreeing() == ()
        for made in (ranks, verified._ranks):  # type: ignore[attr-defined]
            made.array_of(made._owners["v"][-1])[-1, -1] += 1e-9

        assert ranks.disagreeing() == verified.disagreeing() == ("v",)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_box_is_watched_by_one_of_those_who_hold_it(tmp_path: Path, layout: str) -> None:
    folder = boxed_momentum(tmp_path / "out", LAYOUTS[layout], 2)
    for row, column in np.ndindex(4, 6):
        spoilt = np.zeros((4, 6))
        spoilt[row, column] = np.nan

        with pytest.raises(Diverged, match="parameter 'w' is not finite"):
            RanksInProcess(folder, {"w": spoilt}).check_variables(0)
