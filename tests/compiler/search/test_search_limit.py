"""What ends a search arrives, whatever runs when it comes."""

import os
import signal
import sys
import time
from math import inf

import pytest

from partc.compiler.search.search_limit import BudgetSpent, SearchLimit, interrupted_at

LONG_S = 30.0


class InDestructor:
    """Does something where Python swallows what is raised."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number

    def __del__(self) -> None:
        if self.number is not None:
            os.kill(os.getpid(), self.number)
        end_s = time.monotonic() + 0.1
        while time.monotonic() < end_s:
            pass


def destroy_and_wait(thing: InDestructor) -> None:
    del thing
    time.sleep(LONG_S)


def test_the_budget_ends_what_is_done() -> None:
    limit = SearchLimit(0.05)

    with pytest.raises(BudgetSpent), interrupted_at(lambda: limit.until_s):
        time.sleep(LONG_S)


def test_the_clock_of_a_budget_may_stand() -> None:
    limit = SearchLimit(0.3)

    with interrupted_at(lambda: limit.until_s):
        with limit.stopped():
            time.sleep(0.4)
        with pytest.raises(BudgetSpent):
            time.sleep(LONG_S)

    assert limit.elapsed_s >= 0.3


def test_a_destructor_does_not_swallow_the_end_of_the_budget() -> None:
    with pytest.raises(BudgetSpent), interrupted_at(lambda: 0.0):
        destroy_and_wait(InDestructor())


def test_a_destructor_does_not_swallow_a_signal() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, interrupted_at(lambda: inf):
        destroy_and_wait(InDestructor(signal.SIGTERM))

    assert raised.type is KeyboardInterrupt


def test_what_else_a_destructor_raises_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("a mistake")

    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))
    with interrupted_at(lambda: inf):
        Broken()

    assert told == ["a mistake"]
