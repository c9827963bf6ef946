"""Signals that ask a job to end: the first for a good end, the second for one at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from partc.runtime.errors import Stopped

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """What came: `number` of the first signal, 0 if none; how many in all."""

    def __init__(self) -> None:
        self.number = 0
        self.count = 0

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Take in a signal."""
        self.number = self.number or number
        self.count += 1

    def hurry(self, number: int) -> None:
        """Take in a request for an end that waits for nobody: it is the process's own, and no signal came."""
        self.count += 2  # before the number, by which another thread sees that something is asked
        self.number = self.number or number


@contextmanager
def stop_signals(requests: StopSignals | None = None) -> Iterator[StopSignals]:
    """Note these signals meanwhile, instead of what else they would do; in the main thread alone.

    A signal that was ignored, as nohup has it of SIGHUP, still is. `requests`: where they are noted, which
    another thread may do as well.
    """
    came = requests or StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    heeded = {number: how for number, how in before.items() if how is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, came.note)
    try:
        yield came
    finally:
        for number, how in heeded.items():
            signal.signal(number, how)


def raise_when_stopped() -> None:
    """Let SIGTERM and SIGHUP raise Stopped in the main thread: on its way out, temporary things go."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _raise_stopped)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise stopped(number, "this command")


def stopped(number: int, at: str) -> Stopped:
    """Return the error of what a signal has stopped."""
    fix = "start it again; what was not saved is lost"
    return Stopped(f"stopped by {name_of(number)}", at=at, fix=fix, signal=number)


def name_of(number: int) -> str:
    """Return what a person calls a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
