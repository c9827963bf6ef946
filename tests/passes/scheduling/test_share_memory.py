"""What arrives for one micro-batch takes another's memory: how much is left, and what proves it right."""

import msgspec
import pytest

from partc.compiler.api import compile
from partc.passes.scheduling.share_memory import SPARE, share_memory
from partc.runtime.errors import BadPlan
from partc.runtime.plan.check_values import check_values
from partc.runtime.plan.program import Buffer, Plan, Run, Start, Wait
from tests.builders.plans.compiled_steps import cluster_of
from tests.builders.plans.deep_mlp import BY_1F1B, deep_mlp

SITES = ("stage0", "stage1")


def buffers(count: int) -> list[Buffer]:
    return [Buffer(f"b{n}", "float32", 4, SITES) for n in range(count)]


def message(number: int) -> tuple[Run, Start, Wait, Run, Wait]:
    """Make, send, receive and read; the sender's own wait is the last."""
    name = f"b{number}"
    make = Run("stage0", "make", (), (("v", name),))
    start = Start(number, "broadcast", "cut", "stage0", "stage1", (name,), (name,))
    read = Run("stage1", "read", (("v", name),), (("r", f"r{number}"),))
    return make, start, Wait(number, "stage1"), read, Wait(number, "stage0")


def test_memory_is_taken_again_behind_the_last_reader_and_the_senders_wait() -> None:
    """One more lies free, so that the sender waits for the message before the last."""
    zero, one, two = message(0), message(1), message(2)
    owed = [zero[4], one[4], two[4]]
    instructions = [*zero[:4], *one[:4], *two[:4], *owed]

    shared = share_memory(instructions, buffers(3), {}, [["b0", "b1", "b2"]], owed)

    assert [buffer.memory for buffer in shared.buffers] == [None, None, "b0"]
    assert shared.instructions == [*zero[:4], *one[:4], zero[4], *two[:4], one[4], two[4]]


def test_memory_that_is_still_read_is_left_alone() -> None:
    zero, one, two, three = (message(number) for number in range(4))
    owed = [zero[4], one[4], two[4], three[4]]
    instructions = [*zero[:3], *one[:4], *two[:4], *three[:4], zero[3], *owed]

    shared = share_memory(instructions, buffers(4), {}, [["b0", "b1", "b2", "b3"]], owed)

    assert [buffer.memory for buffer in shared.buffers] == [None, None, None, "b1"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan") / "out"
    strategy = "pipeline=4,microbatches=8"
    return compile(deep_mlp(), cluster_of("1x4"), folder, strategy=strategy, batch="global", **BY_1F1B).plan


def test_an_arrival_has_memory_for_as_many_micro_batches_as_are_under_way(plan: Plan) -> None:
    of_message: dict[str, list[Buffer]] = {}
    for buffer in plan.buffers:
        name, mark, _ = buffer.name.partition("#")
        if mark:
            of_message.setdefault(name, []).append(buffer)

    assert of_message
    for arrivals in of_message.values():
        assert len(arrivals) == plan.microbatches
        assert sum(buffer.memory is None for buffer in arrivals) <= 4 + SPARE


def test_too_little_memory_is_found(plan: Plan) -> None:
    first: dict[str, str] = {}
    squeezed = []
    for buffer in plan.buffers:
        owner = first.setdefault(buffer.name.partition("#")[0], buffer.name)
        memory = None if owner == buffer.name else owner
        squeezed.append(msgspec.structs.replace(buffer, memory=memory))

    with pytest.raises(BadPlan, match=r"has taken its memory|is under way"):
        check_values(msgspec.structs.replace(plan, buffers=tuple(squeezed)))


def test_a_sender_that_waits_too_late_is_found(plan: Plan) -> None:
    senders = {i.tag_id: i.senders for i in plan.instructions if isinstance(i, Start)}
    late = [i for i in plan.instructions if isinstance(i, Wait) and i.site == senders[i.tag_id]]
    kept = [i for i in plan.instructions if i not in late]

    with pytest.raises(BadPlan, match="is under way"):
        check_values(msgspec.structs.replace(plan, instructions=(*kept, *late)))
