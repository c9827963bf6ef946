"""A process that waits for what cannot be interrupted is busy, and neither silent nor hung."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from partc.runtime.supervision.process_state import ProcessState, process_state

# After vfork(2) a process stands still, as one that waits for a disk does, until its child has ended.
WAITS_UNINTERRUPTED = """
import ctypes, os, time
if ctypes.PyDLL(None).vfork() == 0:
    time.sleep(60)
    os._exit(0)
"""
SLEEPS = "import time; time.sleep(60)"


@contextmanager
def started(program: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield process.pid
    finally:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()


def settled(process: int, letter: str) -> ProcessState | None:
    """Return the state of a process once /proc has this letter for it."""
    until_s = time.monotonic() + 20
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != letter:
        assert time.monotonic() < until_s, f"never in state {letter}"
        time.sleep(0.01)
    return process_state(process)


@pytest.mark.parametrize(
    ("program", "letter", "is_busy"), [(WAITS_UNINTERRUPTED, "D", True), (SLEEPS, "S", False)]
)
def test_who_waits_uninterrupted_is_busy_and_who_sleeps_is_not(
    program: str, letter: str, is_busy: bool
) -> None:
    with started(program) as process:
        state = settled(process, letter)

    assert state is not None
    assert (state.is_busy, state.is_stopped) == (is_busy, False)


def test_who_is_stopped_is_not_busy() -> None:
    with started(SLEEPS) as process:
        os.kill(process, signal.SIGSTOP)
        state = settled(process, "T")

    assert state is not None
    assert (state.is_busy, state.is_stopped) == (False, True)
