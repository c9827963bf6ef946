from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zmq

from partc.runtime.asynchronous.processes.job import SessionJob
from partc.runtime.asynchronous.processes.sockets import PeerSockets, find, limit_of_messages
from partc.runtime.asynchronous.sessions.messages import Begin, Grant, Piece, SessionMessage, encode_message
from partc.runtime.errors import BadPlan, RankFailed
from partc.runtime.transports.locked_sockets import KEY_FILE, own_key, read_key
from tests.builders.plans.session_plans import additive_step, compile_sessions

LIMIT = 1000


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {"server-1": f"ipc://{tmp_path}/1"}


def mesh(name: str, endpoints: dict[str, str], folder: Path) -> PeerSockets:
    return PeerSockets(name, SessionJob(endpoints, LIMIT, steps=(0,), places={}), folder, deadline_s=0.2)


@pytest.fixture
def server(endpoints: dict[str, str], tmp_path: Path) -> Iterator[PeerSockets]:
    with closing(mesh("server-1", endpoints, tmp_path)) as opened:
        yield opened


def heard(opened: PeerSockets, messages: int, tries: int = 100) -> list[tuple[SessionMessage, list[bytes]]]:
    received: list[tuple[SessionMessage, list[bytes]]] = []
    for _ in range(tries):
        received += [
            (message, [bytes(frame) for frame in frames]) for message, frames in opened.receive(0.05)
        ]
        if len(received) >= messages:
            break
    return received


def test_messages_come_in_order_with_their_values_and_are_answered_by_name(
    endpoints: dict[str, str], server: PeerSockets, tmp_path: Path
) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T
    with closing(mesh("worker-0", endpoints, tmp_path)) as worker:
        worker.post("server-1", Begin(0, 1))
        worker.post("server-1", Piece(0, 1, 7, 0, 1, rows=3), [values])

        assert heard(server, 2) == [(Begin(0, 1), []), (Piece(0, 1, 7, 0, 1, 3), [values.tobytes()])]
        server.post("worker-0", Grant(5))
        assert heard(worker, 1) == [(Grant(5), [])]


def test_what_is_longer_than_the_plan_allows_is_not_sent(server: PeerSockets) -> None:
    with pytest.raises(
        BadPlan, match=r"of 1008 bytes is to travel, 1000 are the most\n  at:  a message to w"
    ):
        server.post("worker-0", Grant(1), [np.zeros(126)])


def test_what_is_longer_is_not_heard_either_and_others_are(
    endpoints: dict[str, str], server: PeerSockets, tmp_path: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(endpoints["server-1"])
        stranger.send(bytes(LIMIT + 1))
        with closing(mesh("worker-0", endpoints, tmp_path)) as worker:
            worker.post("server-1", Begin(0, 1))

            assert heard(server, 1) == [(Begin(0, 1), [])]


def test_a_message_to_nobody_is_dropped(server: PeerSockets) -> None:
    server.post("worker-9", Grant(1))

    assert heard(server, 0) == []


# ---------------------------------------------------------------- between machines

ELSEWHERE = {"server-1": "tcp://127.0.0.2:*"}


def test_a_server_elsewhere_tells_its_port_and_hears_who_has_the_key(tmp_path: Path) -> None:
    own_key(tmp_path)
    with closing(mesh("server-1", ELSEWHERE, tmp_path)) as server:
        assert find("server-1", ELSEWHERE["server-1"], tmp_path, 0.0).startswith("tcp://127.0.0.2:")
        with closing(mesh("worker-0", ELSEWHERE, tmp_path)) as worker:
            worker.post("server-1", Begin(0, 1))

            assert heard(server, 1) == [(Begin(0, 1), [])]


def test_a_server_elsewhere_is_deaf_to_strangers(tmp_path: Path) -> None:
    """One with a key of its own, and one that speaks in the clear."""
    own_key(tmp_path)
    with closing(mesh("server-1", ELSEWHERE, tmp_path)) as server, zmq.Context() as context:
        endpoint = find("server-1", ELSEWHERE["server-1"], tmp_path, 0.0)
        public, secret = zmq.curve_keypair()
        for key in ({}, {"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": public}):
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                for name, value in key.items():
                    setattr(stranger, name, value)
                stranger.connect(endpoint)
                stranger.send(encode_message(Begin(0, 1)))

                assert heard(server, 1, tries=20) == []


def test_a_name_that_the_job_does_not_have_is_not_heard(
    server: PeerSockets, endpoints: dict[str, str], tmp_path: Path
) -> None:
    with closing(mesh("worker-1", endpoints, tmp_path)) as stranger:
        stranger.post("server-1", Begin(0, 1))
        assert heard(server, 1, tries=10) == []


def test_the_key_is_its_users_alone(tmp_path: Path) -> None:
    assert read_key(tmp_path) is None

    own_key(tmp_path)

    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    key = read_key(tmp_path)
    assert key is not None
    assert zmq.curve_public(key.secret.encode()).decode() == key.public


def test_a_server_that_never_tells_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="server-1 did not say where it listens for 0 s"):
        mesh("worker-0", ELSEWHERE, tmp_path)


def test_every_buffer_fits_the_limit(tmp_path: Path) -> None:
    plan = compile_sessions(additive_step(), tmp_path / "out").plan

    assert limit_of_messages(plan) >= max(buffer.elements * 8 for buffer in plan.buffers)
