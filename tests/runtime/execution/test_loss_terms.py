from pathlib import Path

import pytest

from partc.runtime.execution.executor import loss_terms
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Buffer, Output, Plan, Slice, Start, Wait
from tests.builders.plans.hand_made_plans import plan_of, rank, run, with_changes
from tests.builders.plans.linear_plans import linear_all_reduce, linear_servers


def test_a_loss_reduced_in_place_is_its_own_term(tmp_path: Path) -> None:
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", 2)).plan

    assert loss_terms(plan) == {"loss"}


@pytest.mark.parametrize("merged", [True, False])
def test_the_term_behind_a_communication_is_found(tmp_path: Path, merged: bool) -> None:
    plan = read_plan_folder(linear_servers(tmp_path / "out", merged=merged, scattered=False)).plan

    assert "loss" in loss_terms(plan)


def test_a_plan_without_a_loss_has_no_terms(tmp_path: Path) -> None:
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", 2)).plan

    assert loss_terms(with_changes(plan, loss=None)) == frozenset()


def divided_loss() -> Plan:
    """loss = total / count, both summed over two ranks in one bucket."""
    instructions = [
        run("worker", "terms", ("x",), ("own_total", "own_count")),
        Start(0, "all_reduce", "all", "worker", "worker", ("bucket",), ("bucket",)),
        Wait(0),
        run("worker", "loss", ("total", "count", "W"), ("loss",)),
    ]
    places = (("own_total", 0), ("total", 0), ("own_count", 1), ("count", 1))
    return plan_of(
        [rank(r, ("worker",), r, {"all": (0, 1)}) for r in range(2)],
        instructions,
        buffers=(Buffer("bucket", "float64", 2, ("worker",)),),
        slices=tuple(Slice(value, "bucket", offset, ()) for value, offset in places),
        outputs=(Output("loss", "loss", "whole"),),
    )


def test_a_loss_computed_of_sums_leads_back_to_every_ranks_terms() -> None:
    terms = loss_terms(with_changes(divided_loss(), loss="loss"))

    assert {"own_total", "own_count"} <= terms
    assert "loss" not in terms
