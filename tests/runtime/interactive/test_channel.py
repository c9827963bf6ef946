"""The connection between a stepper and its ranks, without ranks."""

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zmq

from partc.runtime.errors import RankFailed
from partc.runtime.interactive.channel import RankEnd, StepperEnd
from partc.runtime.interactive.messages import LARGEST_FRAME_BYTES, Done, Step, decode, describe, encode

ARRAYS = {
    "long": np.arange(400_000.0).reshape(2, -1),
    "empty": np.zeros((0, 3), np.int8),
    "scalar": np.array(5, np.int32),
}
OVER_TCP = {"alpha": "127.0.0.2"}
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
LONG_COMMAND = b"\x06" + struct.pack(">Q", 1 << 40)  # ZMTP 3: a command whose length has eight bytes


@pytest.fixture
def stepper(tmp_path: Path) -> Iterator[StepperEnd]:
    end = StepperEnd(OVER_TCP, tmp_path)
    yield end
    end.close()


def test_arrays_travel_in_frames_that_are_not_long() -> None:
    frames = encode(Done(7, describe(ARRAYS)), ARRAYS)

    assert max(map(len, frames)) <= LARGEST_FRAME_BYTES
    message, arrays = decode(frames)
    assert isinstance(message, Done)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


@pytest.mark.parametrize(
    "wrong",
    [[], [b"nonsense"], encode(Done(1, describe(ARRAYS)), ARRAYS)[:-1], [*encode(Done(1), {}), b"more"]],
    ids=["nothing", "no message", "a frame less", "a frame more"],
)
def test_frames_that_do_not_fit_are_refused(wrong: list[bytes]) -> None:
    with pytest.raises(RankFailed, match="a message that is none"):
        decode(wrong)


@pytest.mark.parametrize("addresses", [{"alpha": "localhost"}, OVER_TCP], ids=["here", "over the network"])
def test_a_rank_is_heard_and_answered(addresses: dict[str, str], tmp_path: Path) -> None:
    stepper = StepperEnd(addresses, tmp_path)
    rank = RankEnd(stepper.channel, "alpha", 3, tmp_path)

    rank.send(Done(1, describe(ARRAYS)), ARRAYS)
    received = stepper.receive(10.0)
    assert received is not None
    assert received[0] == 3
    stepper.send(3, Step(2, ()), {})
    message, _ = rank.receive(lambda: None)

    assert message == Step(2, ())
    rank.close()
    stepper.close()
    assert not stepper.sockets.exists()


def pour(endpoint: str, said: bytes) -> None:
    """Say something, then send 64 MB."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), 10.0) as stranger:
        stranger.sendall(said)
        for _ in range(64):
            stranger.sendall(bytes(1 << 20))


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", NULL_GREETING + bytes(1000), CURVE_GREETING + LONG_COMMAND],
    ids=["no peer", "a peer without a key", "a command of a terabyte"],
)
def test_a_stranger_is_cut_off(said: bytes, stepper: StepperEnd) -> None:
    """It may send no more than a few megabytes, which the system holds."""
    with pytest.raises(ConnectionError):
        pour(stepper.channel.endpoints["alpha"], said)

    assert stepper.receive(0.05) is None


def test_a_peer_with_another_key_is_not_heard(stepper: StepperEnd, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = StepperEnd(OVER_TCP, tmp_path / "other")
    stranger = RankEnd(stepper.channel, "alpha", 0, tmp_path / "other")

    with suppress(zmq.ZMQError):
        stranger.send(Done(1), {})

    assert stepper.receive(0.3) is None
    stranger.close()
    other.close()
