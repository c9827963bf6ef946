"""What asks this process to stop, and what is left alone."""

import os
import signal
from collections.abc import Iterator

import pytest

from partc.runtime.supervision.stop_signals import raise_when_stopped, stop_signals


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, how in before.items():
        signal.signal(number, how)


def test_a_terminal_that_closes_asks_for_an_end() -> None:
    with stop_signals() as came:
        os.kill(os.getpid(), signal.SIGHUP)

    assert (came.number, came.count) == (signal.SIGHUP, 1)


def test_under_nohup_it_does_not_and_sigterm_does() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_when_stopped()

    with stop_signals() as came:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)

    assert (came.number, came.count) == (signal.SIGTERM, 1)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
