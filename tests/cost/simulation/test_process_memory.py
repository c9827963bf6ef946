"""What a rank's process takes besides, told from the plan."""

from typing import Literal

import msgspec

from partc.cost.simulation.process_memory import PROCESS_BYTES, process_bytes
from partc.runtime.plan.program import Plan, Start
from partc.runtime.plan.variables import DataInput
from tests.builders.plans.hand_made_plans import plan_of, rank

SUM = Start(0, "all_reduce", "workers", "worker", "worker", ("g",), ("g",), payload_bytes=5000, label="")


def plan_with(kind: Literal["cpu", "gpu"], workers: int) -> Plan:
    group = tuple(range(workers))
    members = [rank(number, ("worker",), number, {"workers": group}) for number in group]
    data = (DataInput("x", "float32", (10, 4), 0),)
    plan = plan_of(members, [SUM], data_inputs=data)
    return msgspec.structs.replace(
        plan, ranks=tuple(msgspec.structs.replace(each, kind=kind) for each in plan.ranks)
    )


def test_a_process_has_the_next_batch_and_what_mpi_sums() -> None:
    plan = plan_with("cpu", 2)

    assert process_bytes(plan, plan.ranks[0]) == PROCESS_BYTES + 10 * 4 * 4 + 5000


def test_who_is_alone_sends_nothing() -> None:
    plan = plan_with("cpu", 1)

    assert process_bytes(plan, plan.ranks[0]) == PROCESS_BYTES + 10 * 4 * 4


def test_a_gpus_process_is_in_its_hosts_memory() -> None:
    plan = plan_with("gpu", 2)

    assert process_bytes(plan, plan.ranks[0]) == 0
