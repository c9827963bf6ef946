"""Keepers that end before they can be heard: processes without anything of MPI's."""

import os
import signal
import subprocess
import sys
import time

import pytest

from partc.runtime.supervision.started_keepers import StartedKeepers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def start(rank: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"], env={"PMI_RANK": str(rank), "PATH": os.environ["PATH"]})


def test_who_was_there_and_is_no_more_has_ended_and_who_is_stopped_is_seen() -> None:
    names = [f"rank {rank}" for rank in range(3)]
    keepers = StartedKeepers(os.getpid())
    processes = [start(rank) for rank in range(2)]
    try:
        deadline_s = time.monotonic() + 20
        while not {"rank 0", "rank 1"} <= keepers._seen.keys() and time.monotonic() < deadline_s:
            assert keepers.ended(names) == []
        assert keepers.stopped(names) == []
        processes[0].send_signal(signal.SIGSTOP)
        while not (stopped := keepers.stopped(names)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert stopped == ["rank 0"]
        processes[1].kill()  # and is a zombie, as long as nobody has waited for it
        while not (ended := keepers.ended(names)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert ended == ["rank 1"]
        assert keepers.ended(["rank 0"]) == [], "others have been heard, and say themselves how they end"
    finally:
        for process in processes:
            process.kill()
            process.wait()
