from pathlib import Path

import pytest

from partc.runtime.check_program import check_program
from partc.runtime.errors import BadPlan
from partc.runtime.plan_folder import read_plan_folder
from partc.runtime.program import Instruction, Plan, Start, Wait
from tests.hand_made_plans import linear_servers, plan_of, rank, table_on_servers, with_changes


def exchange(tag: int, group: str) -> Start:
    return Start(tag, "all_reduce", group, "worker", "worker", ("x",), ("x",))


def plan_with(instructions: list[Instruction], groups: list[dict[str, tuple[int, ...]]]) -> Plan:
    return plan_of([rank(r, ("worker",), r, g) for r, g in enumerate(groups)], instructions)


@pytest.mark.parametrize("merged", [True, False])
def test_plans_that_end_pass(tmp_path: Path, merged: bool) -> None:
    check_program(read_plan_folder(table_on_servers(tmp_path / "table", merged=merged)).plan)
    check_program(read_plan_folder(linear_servers(tmp_path / "w", merged=merged, scattered=True)).plan)


def test_a_rank_that_never_arrives_is_named() -> None:
    plan = plan_with([exchange(0, "all"), Wait(0)], [{"all": (0, 1)}, {"all": (0, 1)}, {"all": (0, 1)}])

    with pytest.raises(BadPlan, match=r"\[0, 1\].* must hold rank 2"):
        check_program(plan)


def test_a_ring_of_waits_is_refused() -> None:
    # Rank 0 meets "a" then "b" in one list, but the groups' members see different lists by their sites.
    ring = [exchange(0, "a"), Wait(0), exchange(1, "b"), Wait(1)]
    plan = plan_with(ring, [{"a": (0, 1), "b": (0, 1)}, {"a": (0, 1), "b": (0, 1)}])
    check_program(plan)

    waits_first = [exchange(0, "a"), Wait(1), exchange(1, "b"), Wait(0)]
    with pytest.raises(BadPlan, match="communication 1 before its start"):
        check_program(with_changes(plan, instructions=tuple(waits_first)))


def test_members_that_disagree_about_a_group_are_refused() -> None:
    plan = plan_with([exchange(0, "all"), Wait(0)], [{"all": (0, 1)}, {"all": (1, 0)}])

    with pytest.raises(BadPlan, match="rank 1 does not"):
        check_program(plan)


def test_a_communication_nobody_waits_for_is_refused() -> None:
    plan = plan_with([exchange(0, "all")], [{"all": (0, 1)}, {"all": (0, 1)}])

    with pytest.raises(BadPlan, match="nobody waits for communication 0"):
        check_program(plan)


def test_a_communication_that_starts_twice_is_refused() -> None:
    plan = plan_with([exchange(0, "all"), exchange(0, "all"), Wait(0)], [{"all": (0,)}])

    with pytest.raises(BadPlan, match="communication 0 starts twice"):
        check_program(plan)
