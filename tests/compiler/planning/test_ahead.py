"""A job that another process does ahead: who does it does not change what is found."""

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass

import pytest

from partc.compiler.planning.ahead import FORKED_NODES, Ahead, is_worthwhile


@dataclass(frozen=True)
class Found:
    number: float
    by: int


def find() -> Found:
    return Found(0.1 + 0.2, os.getpid())


def test_what_another_process_finds_is_had_whole() -> None:
    with Ahead(find, Found) as ahead:
        found = ahead.result()

    assert found.number == 0.1 + 0.2
    assert found.by != os.getpid()


def test_where_the_process_is_killed_the_job_is_done_here() -> None:
    first = os.getpid()

    def killed() -> Found:
        if os.getpid() != first:
            os.kill(os.getpid(), signal.SIGKILL)
        return find()

    with Ahead(killed, Found) as ahead:
        assert ahead.result() == Found(0.1 + 0.2, first)


def test_what_goes_wrong_there_goes_wrong_here() -> None:
    def failing() -> Found:
        raise ValueError("no number")

    with Ahead(failing, Found) as ahead, pytest.raises(ValueError, match="no number"):
        ahead.result()


def test_nobody_waits_for_what_is_not_wanted() -> None:
    before = set(multiprocessing.active_children())
    with Ahead(lambda: time.sleep(600) or find(), Found):
        assert len(set(multiprocessing.active_children()) - before) == 1

    assert set(multiprocessing.active_children()) <= before


def test_who_cannot_be_terminated_is_ended_all_the_same() -> None:
    def deaf() -> Found:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        there.send(True)
        time.sleep(600)
        return find()

    before = set(multiprocessing.active_children())
    here, there = multiprocessing.Pipe(duplex=False)
    with Ahead(deaf, Found):
        assert here.recv()

    assert set(multiprocessing.active_children()) <= before


def test_a_process_that_was_begun_begins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert is_worthwhile(FORKED_NODES)

    with Ahead(lambda: is_worthwhile(FORKED_NODES), bool) as ahead:
        assert not ahead.result()
