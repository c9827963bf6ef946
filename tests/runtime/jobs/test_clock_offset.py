import threading
import time
from collections.abc import Sequence
from queue import Queue

import numpy as np
import pytest

from partc.runtime.jobs.clock_offset import offset_to_first

AHEAD_S = 5.0


class PairOfRanks:
    """A rank of a world of two that passes arrays by queue."""

    def __init__(self, rank: int, queues: tuple[Queue, Queue]) -> None:
        self.rank, self.size, self._queues = rank, 2, queues

    def Send(self, array: np.ndarray, to: int) -> None:  # noqa: N802
        self._queues[to].put(array.copy())

    def Recv(self, array: np.ndarray, source: int) -> None:  # noqa: N802
        array[:] = self._queues[self.rank].get(timeout=10)


def offsets_of_two(neighbours: Sequence[Sequence[int]]) -> dict[int, tuple[float, float]]:
    """Return what two ranks find. `neighbours`: of each."""
    queues: tuple[Queue, Queue] = (Queue(), Queue())
    barrier = threading.Barrier(2)
    found: dict[int, tuple[float, float]] = {}

    def rank(number: int) -> None:
        pair = PairOfRanks(number, queues)
        found[number] = offset_to_first(pair, neighbours[number], lambda: barrier.wait(10) and None)

    second = threading.Thread(target=rank, args=(1,), name="second")
    second.start()
    rank(0)
    second.join()
    return found


def test_a_clock_that_is_ahead_is_set_back_within_its_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.perf_counter
    ahead = threading.current_thread

    def clock() -> float:
        return real() + (AHEAD_S if ahead().name == "second" else 0.0)

    monkeypatch.setattr(time, "perf_counter", clock)
    found = offsets_of_two([[0], [1]])

    assert found[0] == (0.0, 0.0)
    offset_s, uncertainty_s = found[1]
    assert abs(offset_s + AHEAD_S) <= uncertainty_s < AHEAD_S


def test_ranks_of_one_machine_have_one_clock() -> None:
    assert offsets_of_two([[0, 1], [0, 1]]) == {0: (0.0, 0.0), 1: (0.0, 0.0)}
