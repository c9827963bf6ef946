"""The critical path of steps written by hand: what it goes through, and that nothing is left out."""

from collections.abc import Sequence

import pytest

from partc.cost.simulation.critical_path import PathPart, critical_path
from partc.runtime.execution.recorder import StepTimes
from partc.runtime.plan.program import PLAN_FORMAT, Plan, Rank, Run, Start, Wait

RUN = Run("worker", "segments/aa.onnx", (), ())
UPDATE = Run("worker", "segments/bb.onnx", (), ())
SUM = Start(0, "all_reduce", "workers", "worker", "worker", ("g",), ("g",), payload_bytes=8)


def rank(number: int) -> Rank:
    return Rank(number, "host", f"cpu{number}", "cpu", 0, 1, ("worker",), number, {"workers": 0}, {}, (), ())


PLAN = Plan(
    format=PLAN_FORMAT,
    model="model.onnx",
    batch="global",
    replicas=2,
    sizes={},
    loss=None,
    ranks=(rank(0), rank(1)),
    groups={"workers": ((0, 1),)},
    instructions=(RUN, SUM, Wait(0), UPDATE),
    buffers=(),
    slices=(),
    variables=(),
    data_inputs=(),
    outputs=(),
    predicted_step_s=0.0,
    cost_cache_sha256="",
    files={},
)


def step(
    number: int, *moments: float, cpu_s: Sequence[float] = (), clock_s: tuple[float, float] = (0, 0)
) -> StepTimes:
    """Return a step of which one instruction begins where another one ends."""
    return StepTimes(number, moments[:-1], moments[1:], (0,) * (len(moments) - 1), tuple(cpu_s), clock_s)


def told(parts: Sequence[PathPart]) -> list[tuple[str, int, float]]:
    return [(part.kind, part.rank, round(part.seconds, 9)) for part in parts if part.seconds > 0]


def test_who_waits_for_a_member_that_begins_late_waits_for_what_that_member_did() -> None:
    #                  run  start  wait  update
    quick = step(1, 0.0, 2.0, 2.1, 7.0, 8.0)
    slow = step(1, 0.0, 6.0, 6.1, 6.9, 7.5)

    parts = critical_path(PLAN, {0: (quick,), 1: (slow,)})

    assert told(parts) == [
        ("compute", 1, 6.0),
        ("start", 1, 0.1),
        ("transfer", 0, 0.9),
        ("compute", 0, 1.0),
    ]
    assert [part.begun_s for part in parts if part.kind == "transfer"] == [6.1]


def test_where_all_had_begun_the_whole_waiting_is_transfer() -> None:
    same = step(1, 0.0, 2.0, 2.1, 5.0, 6.0)

    parts = critical_path(PLAN, {0: (same,), 1: (same,)})

    assert told(parts) == [("compute", 0, 2.0), ("start", 0, 0.1), ("transfer", 0, 2.9), ("compute", 0, 1.0)]


def test_a_segment_without_a_core_waits_for_one() -> None:
    crowded = step(1, 0.0, 2.0, 2.1, 2.1, 3.0, cpu_s=(0.5, 0.1, 0.0, 0.9))

    parts = critical_path(PLAN, {0: (crowded,), 1: (crowded,)})

    assert ("core", 0, 1.5) in told(parts)
    assert ("compute", 0, 0.5) in told(parts)


def test_steps_in_sequence_are_covered_from_the_first_beginning_to_the_last() -> None:
    cpu_s = (2.0, 0.1, 0.0, 1.0)
    steps = [
        step(
            n,
            *(5 * n + moment for moment in (0.0, 2.0, 2.1, 3.0, 4.0)),
            cpu_s=cpu_s,
            clock_s=(n * 3.3, n * 3.3 + 3.1),
        )
        for n in range(4)
    ]

    parts = critical_path(PLAN, {0: steps, 1: steps})

    assert sum(part.seconds for part in parts) == pytest.approx(
        15.0
    )  # three steps, each a second after the last
    assert sum(part.seconds for part in parts if part.kind == "between") == pytest.approx(0.6)
    assert sum(part.seconds for part in parts if part.kind == "core") == pytest.approx(2.4)


def test_waiting_for_data_between_steps_is_no_waiting_for_a_core() -> None:
    first = step(1, 0.0, 2.0, 2.1, 3.0, 4.0, cpu_s=(2.0, 0.1, 0.0, 1.0), clock_s=(0.0, 3.1))
    second = StepTimes(2, (9.0,) * 4, (9.0,) * 4, (0,) * 4, (0.0,) * 4, (3.1, 3.1), (4.5, 4.5))

    parts = critical_path(PLAN, {0: (first, second), 1: (first, second)})

    assert ("data", 0, 4.5) in told(parts)
    assert ("core", 0, 0.5) in told(parts)
