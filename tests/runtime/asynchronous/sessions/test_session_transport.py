from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from partc.runtime.asynchronous.sessions.messages import Piece, decode_message
from partc.runtime.asynchronous.sessions.routes import routes_of
from partc.runtime.asynchronous.sessions.session_transport import SessionTransport
from partc.runtime.errors import BadPlan, RankFailed
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan, Start
from tests.builders.plans.session_plans import additive_step, compile_sessions


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder: PlanFolder = compile_sessions(additive_step(), tmp_path_factory.mktemp("sessions") / "out")
    return folder.plan


def start_of_kind(plan: Plan, kind: str) -> Start:
    return next(s for s in plan.instructions if isinstance(s, Start) and s.kind == kind)


def pushed_rows(plan: Plan) -> Start:
    pushed = [s for s in plan.instructions if isinstance(s, Start) and s.kind == "all_to_all_rows"]
    return next(start for start in pushed if len(start.rows) == 2)


def server(plan: Plan) -> SessionTransport:
    return SessionTransport(plan, plan.ranks[1], 0, lambda piece, arrays: None)


def frames(*arrays: np.ndarray) -> Sequence[memoryview]:
    return [memoryview(array.tobytes()) for array in arrays]


def test_the_plan_says_what_a_row_looks_like(plan: Plan) -> None:
    assert [(row.dtype, row.shape) for row in pushed_rows(plan).rows] == [("int64", ()), ("float64", (4,))]


def test_what_is_pulled_goes_to_the_worker_alone(plan: Plan) -> None:
    pull = start_of_kind(plan, "all_gather")

    route = routes_of(plan, plan.ranks[1])[pull.tag_id]

    assert route.senders == {0, 1, 2}
    assert route.receivers == {0}


def test_rows_that_fit_the_plan_are_taken_in(plan: Plan) -> None:
    transport, start = server(plan), pushed_rows(plan)

    transport.deliver(
        Piece(0, 1, start.tag_id, 0, 1, rows=2), frames(np.zeros(2, np.int64), np.zeros((2, 4)))
    )

    assert transport.has_all(start.tag_id, [0])


@pytest.mark.parametrize("rows", [3, 1, -1, 2**60])
def test_a_number_of_rows_that_the_bytes_do_not_bear_out_is_refused(plan: Plan, rows: int) -> None:
    transport, start = server(plan), pushed_rows(plan)
    piece = Piece(0, 1, start.tag_id, 0, 1, rows)

    with pytest.raises(RankFailed, match=rf"where {rows} rows take"):
        transport.deliver(piece, frames(np.zeros(2, np.int64), np.zeros((2, 4))))


def test_values_of_another_number_or_from_strangers_are_refused(plan: Plan) -> None:
    transport, start = server(plan), start_of_kind(plan, "reduce_scatter")

    with pytest.raises(RankFailed, match="2 values where 1 were planned"):
        transport.deliver(Piece(0, 1, start.tag_id, 0, 1), frames(np.zeros(4), np.zeros(4)))
    with pytest.raises(RankFailed, match="not between these ranks"):
        transport.deliver(Piece(0, 1, 999, 0, 1), [])
    with pytest.raises(RankFailed, match="not between these ranks"):
        transport.deliver(Piece(0, 1, start.tag_id, 7, 1), [])
    with pytest.raises(RankFailed, match="nothing was expected"):
        transport.deliver(Piece(0, 1, start_of_kind(plan, "all_gather").tag_id, 0, 1), [])


def test_nobody_runs_more_than_a_step_ahead(plan: Plan) -> None:
    transport, start = server(plan), pushed_rows(plan)
    nothing = frames(np.zeros(0, np.int64), np.zeros((0, 4)))
    for step in (1, 2):
        transport.deliver(Piece(0, step, start.tag_id, 0, 1), nothing)

    with pytest.raises(RankFailed, match="of 3 steps at once"):
        transport.deliver(Piece(0, 3, start.tag_id, 0, 1), nothing)
    with pytest.raises(RankFailed, match="of step 1 in step 0"):
        transport.take(start.tag_id, 0)


def test_rows_without_a_shape_are_refused(plan: Plan) -> None:
    shapeless = tuple(
        msgspec.structs.replace(i, rows=()) if isinstance(i, Start) else i for i in plan.instructions
    )

    with pytest.raises(BadPlan, match="what the rows look like"):
        server(msgspec.structs.replace(plan, instructions=shapeless))


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(RankFailed, match="not a message"):
        decode_message(b"\x80\x04\x95garbage")
