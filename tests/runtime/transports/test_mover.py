"""A thread moves communications on while another computes."""

import threading
import time

import pytest

from partc.runtime.transports.mover import Mover


def wait_until(condition: threading.Event) -> None:
    assert condition.wait(timeout=30)


def test_it_moves_while_the_caller_computes_and_not_after() -> None:
    moved = threading.Event()
    threads: set[int] = set()

    def move() -> None:
        threads.add(threading.get_ident())
        moved.set()

    mover = Mover(move)
    with mover.beside():
        wait_until(moved)
    with mover.lock:
        moved.clear()
    time.sleep(0.02)

    assert not moved.is_set()
    assert threads and threading.get_ident() not in threads


def test_it_moves_in_every_computation() -> None:
    moved = threading.Event()
    mover = Mover(moved.set)

    for _ in range(3):
        with mover.beside():
            wait_until(moved)
        with mover.lock:
            moved.clear()


def test_it_never_moves_while_the_caller_does() -> None:
    moved = threading.Event()
    mover = Mover(moved.set)

    with mover.beside():
        wait_until(moved)
        with mover.lock:
            moved.clear()
            time.sleep(0.02)
            assert not moved.is_set()


def test_what_goes_wrong_beside_a_computation_is_raised_behind_it() -> None:
    failed = threading.Event()

    def move() -> None:
        failed.set()
        raise ValueError("a broken message")

    mover = Mover(move)

    def compute() -> None:
        with mover.beside():
            wait_until(failed)
            time.sleep(0.02)

    with pytest.raises(ValueError, match="a broken message"):
        compute()
