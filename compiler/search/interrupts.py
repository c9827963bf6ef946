"""What ends a search before it is done, with the best so far: Ctrl-C, SIGTERM, SIGHUP, or its budget."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
LEAST_S = 1e-3  # of a timer: one of 0 s never rings


class BudgetSpent(KeyboardInterrupt):
    """The time is over."""


@contextmanager
def interrupted_at(until_s: Callable[[], float]) -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt what is done inside as Ctrl-C does, and the clock by BudgetSpent.

    `until_s`: on the monotonic clock, or inf; asked again when it is over, for it may have become later.
    In the main thread alone, as only that has signals. A signal that was ignored, as nohup has it of SIGHUP,
    still is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGALRM)}
    for number in ENDING:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    alarm = _Alarm(until_s)
    signal.signal(signal.SIGALRM, alarm.ring)
    end_s = until_s()
    left_s = 0.0 if end_s == inf else max(LEAST_S, end_s - time.monotonic())
    timer = signal.setitimer(signal.ITIMER_REAL, left_s)
    unraisable, sys.unraisablehook = sys.unraisablehook, alarm.ring_again
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        sys.unraisablehook = unraisable
        for number, how in before.items():
            signal.signal(number, how)


class _Alarm:
    """Raises what is due when the timer rings, and again where a destructor swallowed it."""

    def __init__(self, until_s: Callable[[], float]) -> None:
        self._until_s = until_s
        self._due: type[KeyboardInterrupt] = BudgetSpent
        self._otherwise = sys.unraisablehook

    def ring(self, number: int, frame: FrameType | None) -> None:
        left_s = self._until_s() - time.monotonic()
        if self._due is BudgetSpent and left_s > LEAST_S:
            signal.setitimer(signal.ITIMER_REAL, left_s)
        else:
            raise self._due

    def ring_again(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._due = type(unraisable.exc_value)
            signal.setitimer(signal.ITIMER_REAL, LEAST_S)
        else:
            self._otherwise(unraisable)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
