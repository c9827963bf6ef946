from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.cost.cluster.cluster import read_cluster
from partc.cost.simulation.memory import check_memory
from partc.runtime.errors import NoPlacement
from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.held_memory import piece_bytes
from partc.runtime.plan.variables import Box, Constant, PlanVariable, VariablePiece
from tests.builders.plans.hand_made_plans import Member, plan_of, rank

CLUSTER = read_cluster(Path(__file__).parents[3] / "examples" / "cluster-1x4.json")
TABLE = PlanVariable("E", "float32", (1000, 8), Constant(0.0), "parameter")
TABLE_BYTES = 1000 * 8 * np.dtype(np.float32).itemsize


def _plan(memory_bytes: int):  # type: ignore[no-untyped-def]
    host = CLUSTER.hosts[0]
    devices = tuple(msgspec.structs.replace(d, memory_bytes=memory_bytes) for d in host.devices)
    cluster = msgspec.structs.replace(CLUSTER, hosts=(msgspec.structs.replace(host, devices=devices),))
    own = rank(0, ("worker",), 0, {}, pieces=(VariablePiece("E", "E"),)).rank
    own = msgspec.structs.replace(own, host=host.name, device=devices[0].name)
    return plan_of([Member(own, {})], [], variables=(TABLE,)), cluster


def test_a_variable_that_exceeds_its_device_is_named_with_need_room_and_repair() -> None:
    plan, cluster = _plan(TABLE_BYTES - 100)

    with pytest.raises(NoPlacement) as refusal:
        check_memory(plan, cluster)

    assert str(TABLE_BYTES) in refusal.value.what
    assert "rank 0" in refusal.value.at
    assert refusal.value.fix.startswith("raise its memory_bytes by 100, or let servers keep 'E'")


def test_what_fits_exactly_is_accepted() -> None:
    plan, cluster = _plan(TABLE_BYTES)

    (memory,) = check_memory(plan, cluster)

    assert memory.variables_bytes == memory.limit_bytes == TABLE_BYTES


def test_a_shard_takes_its_rows_only() -> None:
    assert piece_bytes(VariablePiece("E", "E", rows_box(TABLE.shape, 10, 30)), TABLE) == 20 * 8 * 4


def test_a_box_takes_its_elements_only() -> None:
    box = Box(((1000,), (4, 2)), (((0, 1000),), ((1, 4), (0, 1))))

    assert piece_bytes(VariablePiece("E", "E", box), TABLE) == 1000 * 3 * 4
