from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zmq

from partc.runtime.asynchronous.mesh import Mesh, limit_of_messages
from partc.runtime.asynchronous.messages import Begin, Grant, Message, Piece
from partc.runtime.errors import BadPlan
from tests.session_plans import additive_step, compile_sessions

LIMIT = 1000


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {"server-1": f"ipc://{tmp_path}/1"}


@pytest.fixture
def server(endpoints: dict[str, str]) -> Iterator[Mesh]:
    with closing(Mesh("server-1", endpoints, LIMIT)) as mesh:
        yield mesh


def heard(mesh: Mesh, messages: int) -> list[tuple[Message, list[bytes]]]:
    received: list[tuple[Message, list[bytes]]] = []
    for _ in range(100):
        received += [(message, [bytes(frame) for frame in frames]) for message, frames in mesh.receive(0.05)]
        if len(received) >= messages:
            break
    return received


def test_messages_come_in_order_with_their_values_and_are_answered_by_name(
    endpoints: dict[str, str], server: Mesh
) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T
    with closing(Mesh("worker-0", endpoints, LIMIT)) as worker:
        worker.post("server-1", Begin(0, 1))
        worker.post("server-1", Piece(0, 1, 7, 0, 1, rows=3), [values])

        assert heard(server, 2) == [(Begin(0, 1), []), (Piece(0, 1, 7, 0, 1, 3), [values.tobytes()])]
        server.post("worker-0", Grant(5))
        assert heard(worker, 1) == [(Grant(5), [])]


def test_what_is_longer_than_the_plan_allows_is_not_sent(server: Mesh) -> None:
    with pytest.raises(
        BadPlan, match=r"of 1008 bytes is to travel, 1000 are the most\n  at:  a message to w"
    ):
        server.post("worker-0", Grant(1), [np.zeros(126)])


def test_what_is_longer_is_not_heard_either_and_others_are(endpoints: dict[str, str], server: Mesh) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(endpoints["server-1"])
        stranger.send(bytes(LIMIT + 1))
        with closing(Mesh("worker-0", endpoints, LIMIT)) as worker:
            worker.post("server-1", Begin(0, 1))

            assert heard(server, 1) == [(Begin(0, 1), [])]


def test_a_message_to_nobody_is_dropped(server: Mesh) -> None:
    server.post("worker-9", Grant(1))

    assert heard(server, 0) == []


def test_every_buffer_fits_the_limit(tmp_path: Path) -> None:
    plan = compile_sessions(additive_step(), tmp_path / "out").plan

    assert limit_of_messages(plan) >= max(buffer.elements * 8 for buffer in plan.buffers)
