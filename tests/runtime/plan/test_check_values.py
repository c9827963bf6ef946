from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from partc.runtime.errors import BadPlan
from partc.runtime.plan.check_values import check_values
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Plan
from tests.builders.plans.hand_made_plans import with_changes
from tests.builders.plans.linear_plans import linear_all_reduce, linear_servers
from tests.builders.plans.row_plans import rows_there_and_back, table_on_servers

MAKERS: list[Callable[[Path], Path]] = [
    partial(linear_all_reduce, replicas=2),
    *(partial(linear_servers, merged=merged, scattered=s) for merged in (True, False) for s in (True, False)),
    *(
        partial(make, merged=merged)
        for merged in (True, False)
        for make in (table_on_servers, rows_there_and_back)
    ),
]


def all_reduced(folder: Path) -> Plan:
    """Instructions: gradient, start, wait, update."""
    return read_plan_folder(linear_all_reduce(folder / "out", 2)).plan


def reordered(plan: Plan, *order: int) -> Plan:
    return with_changes(plan, instructions=tuple(plan.instructions[index] for index in order))


@pytest.mark.parametrize("make", MAKERS)
def test_sound_plans_pass(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    check_values(read_plan_folder(make(tmp_path / "out")).plan)


def test_a_read_before_the_wait_is_found_through_the_buffer(tmp_path: Path) -> None:
    plan = reordered(all_reduced(tmp_path), 0, 1, 3, 2)

    with pytest.raises(BadPlan, match="'dW' is read while 'bucket' is under way"):
        check_values(plan)


def test_a_write_before_the_wait_is_found(tmp_path: Path) -> None:
    plan = reordered(all_reduced(tmp_path), 0, 1, 0, 2, 3)

    with pytest.raises(BadPlan, match="'dW' is written while 'bucket' is under way"):
        check_values(plan)


def test_a_buffer_that_is_sent_before_its_slices_are_written_is_found(tmp_path: Path) -> None:
    plan = reordered(all_reduced(tmp_path), 1, 0, 2, 3)

    with pytest.raises(BadPlan, match="'dW' is read before anything makes it"):
        check_values(plan)


def test_a_read_of_what_nobody_made_is_found(tmp_path: Path) -> None:
    plan = with_changes(all_reduced(tmp_path), data_inputs=())

    with pytest.raises(BadPlan, match=r"'x' is read before anything makes it\n  at:  the program of rank 0"):
        check_values(plan)
