import pytest

from partc.runtime.asynchronous.servers.coordinator import Clock


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_quickest_is_ahead_by_the_bound_and_no_more(staleness: int) -> None:
    clock = Clock([0, 0], staleness)

    for step in range(1, staleness + 2):
        assert clock.ask(0, step) == [(0, step)]
        assert clock.finished(0, step) == []

    assert clock.ask(0, staleness + 2) == []
    assert clock.finished(1, 1) == [(0, staleness + 2)]


def test_without_a_bound_nobody_waits() -> None:
    assert Clock([0, 0], None).ask(0, 1000) == [(0, 1000)]


def test_a_resumed_training_goes_on_where_its_workers_were() -> None:
    clock = Clock([7, 5], 1)

    assert clock.ask(0, 8) == []
    assert clock.finished(1, 6) == [(0, 8)]


def test_nobody_waits_for_the_dead_until_they_are_back() -> None:
    clock = Clock([0, 0, 0], 0)
    for worker in range(3):
        clock.ask(worker, 1)
    for worker in (0, 1):
        clock.finished(worker, 1)

    assert clock.ask(0, 2) == clock.ask(1, 2) == []
    assert clock.lose(2) == [(0, 2), (1, 2)]
    assert clock.ask(2, 2) == clock.finished(2, 1) == []
    clock.back(2, 0)
    assert clock.ask(0, 3) == []
    assert clock.finished(2, 1) == []
    assert clock.finished(2, 2) == clock.finished(0, 2) == []
    assert clock.finished(1, 2) == [(0, 3)]
