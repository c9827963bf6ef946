from pathlib import Path

import pytest

from partc.runtime.errors import BadPlan
from partc.runtime.plan.check_program import MessageOrder, check_program, check_rendezvous
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Instruction, Plan, Start, Wait
from tests.builders.plans.hand_made_plans import plan_of, rank
from tests.builders.plans.linear_plans import linear_servers
from tests.builders.plans.row_plans import table_on_servers


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

    with pytest.raises(BadPlan, match=r"rank 2 is in group 'all' 0, which does not hold it"):
        check_program(plan)


def test_a_wait_before_its_start_is_refused() -> None:
    waits_first = [Wait(0), exchange(0, "all")]

    with pytest.raises(BadPlan, match="communication 0 before its start"):
        check_program(plan_with(waits_first, [{"all": (0, 1)}, {"all": (0, 1)}]))


def test_a_ring_of_waits_is_refused_and_its_ranks_are_named() -> None:
    first: MessageOrder = [(exchange(0, "a"), (0, 1)), (Wait(0), (0, 1)), (exchange(1, "b"), (0, 1))]
    second: MessageOrder = [(exchange(1, "b"), (0, 1)), (Wait(1), (0, 1)), (exchange(0, "a"), (0, 1))]

    with pytest.raises(BadPlan, match=r"ranks \[0, 1\] never end.*rank 0 waits for \[1\] in communication 0"):
        check_rendezvous({0: first, 1: second})


def test_members_that_meet_in_different_orders_are_refused() -> None:
    both = [(Wait(0), (0, 1)), (Wait(1), (0, 1))]
    first: MessageOrder = [(exchange(0, "a"), (0, 1)), (exchange(1, "a"), (0, 1)), *both]
    second: MessageOrder = [(exchange(1, "a"), (0, 1)), (exchange(0, "a"), (0, 1)), *both]

    with pytest.raises(BadPlan, match=r"meet communications \[0, 1\] and \[1, 0\]"):
        check_rendezvous({0: first, 1: second})


def test_members_that_disagree_about_a_group_are_refused() -> None:
    plan = plan_with([exchange(0, "all"), Wait(0)], [{"all": (0, 1)}, {"all": (1, 0)}])

    with pytest.raises(BadPlan, match="rank 1 does not"):
        check_program(plan)


def test_a_communication_nobody_waits_for_is_refused() -> None:
    plan = plan_with([exchange(0, "all")], [{"all": (0, 1)}, {"all": (0, 1)}])

    with pytest.raises(BadPlan, match="nobody waits for communication 0"):
        check_program(plan)


def test_a_communication_that_is_waited_for_twice_is_refused() -> None:
    plan = plan_with([exchange(0, "all"), Wait(0), Wait(0)], [{"all": (0, 1)}, {"all": (0, 1)}])

    with pytest.raises(BadPlan, match="communication 0 is waited for twice"):
        check_program(plan)


def test_a_communication_that_starts_twice_is_refused() -> None:
    plan = plan_with([exchange(0, "all"), exchange(0, "all"), Wait(0)], [{"all": (0,)}])

    with pytest.raises(BadPlan, match="communication 0 starts twice"):
        check_program(plan)
