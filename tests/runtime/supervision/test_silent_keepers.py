"""Keepers of this machine that say nothing: one that runs is slow, one that is stopped is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from partc.runtime.supervision.keeping import RENDEZVOUS_FILE
from partc.runtime.supervision.messages import Beat, Position, Rendezvous
from partc.runtime.supervision.supervisor import Supervisor

RUNS = "import time\nwhile True: time.sleep(0.01)"
_SILENT_S = 1.5
WITHIN_S = 30.0


@pytest.fixture
def silent_keeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", RUNS])
    yield process
    process.kill()
    process.wait()


def test_a_keeper_that_runs_is_not_lost_and_one_that_is_stopped_is(
    silent_keeper: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partc.runtime.supervision.supervisor._SILENT_HERE_S", _SILENT_S)
    monkeypatch.setattr("partc.runtime.supervision.supervisor._ASK_S", 0.2)
    with (
        Supervisor({"one": "alpha"}, {}, tmp_path, None, hung_s=0.3) as supervisor,
        told_once(tmp_path, Beat(os.getpid(), silent_keeper.pid, socket.gethostname(), Position())),
    ):
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + 2 * _SILENT_S:
            supervisor.watch(0.05)
            assert supervisor.roster.troubles() == []
        assert supervisor.roster.quiet() == ["one"]

        silent_keeper.send_signal(signal.SIGSTOP)

        while not supervisor.roster.troubles() and time.monotonic() < begun_s + WITHIN_S:
            supervisor.watch(0.05)
        assert supervisor.roster.troubles()[0].cause.reason.startswith("was lost: not heard for")
        silent_keeper.kill()


@contextmanager
def told_once(folder: Path, beat: Beat) -> Iterator[None]:
    """Say once that a keeper is there, and stay connected."""
    rendezvous = msgspec.json.decode((folder / RENDEZVOUS_FILE).read_bytes(), type=Rendezvous)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.ROUTING_ID, b"one")
        dealer.connect(rendezvous.endpoints["one"])
        dealer.send(msgspec.msgpack.encode(beat))
        yield
