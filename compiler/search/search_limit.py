"""What ends a search: a time, a number of proposals (the same on any machine), Ctrl-C and signals."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from types import FrameType


@dataclass
class SearchLimit:
    """A budget in seconds; or of proposals, and then of no time."""

    budget_s: float
    proposals: int | None = None
    begun_s: float = field(default_factory=time.monotonic)
    _stood_s: float | None = None  # since when the clock stands

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the clock stand meanwhile: what is done inside takes nothing of the budget."""
        self._stood_s = time.monotonic()
        try:
            yield
        finally:
            self.begun_s += time.monotonic() - self._stood_s
            self._stood_s = None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self.begun_s

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until_s - time.monotonic()

    @property
    def until_s(self) -> float:
        """Return when it ends, on the monotonic clock."""
        stood_s = 0.0 if self._stood_s is None else time.monotonic() - self._stood_s
        return inf if self.proposals is not None else self.begun_s + self.budget_s + stood_s

    def early_until_s(self, share: float) -> float:
        """Return when the first share of the budget ends."""
        return inf if self.proposals is not None else self.begun_s + share * self.budget_s

    def part_until_s(self, share: float, reserve_s: float = 0.0) -> float:
        """Return when a share of what is left ends, apart from a reserve."""
        return time.monotonic() + share * (self.left_s - reserve_s)

    def part(self, share: float) -> float:
        """Return a share of the proposals."""
        return inf if self.proposals is None else share * self.proposals


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
