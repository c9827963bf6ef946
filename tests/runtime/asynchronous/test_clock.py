import pytest

from partc.runtime.asynchronous.clock import Clock


def applied_everywhere(clock: Clock, worker: int, step: int, servers: int = 2) -> list[tuple[int, int]]:
    return [grant for server in range(servers) for grant in clock.applied(worker, server, step)]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_quickest_is_ahead_by_the_bound_and_no_more(staleness: int) -> None:
    clock = Clock(workers=2, servers=2, staleness=staleness)

    for step in range(1, staleness + 2):
        assert clock.ask(0, step) == [(0, step)]
        assert applied_everywhere(clock, 0, step) == []

    assert clock.ask(0, staleness + 2) == []
    assert applied_everywhere(clock, 1, 1) == [(0, staleness + 2)]


def test_a_step_is_finished_when_every_server_has_applied_it() -> None:
    clock = Clock(workers=1, servers=2, staleness=0)
    clock.ask(0, 1)

    assert clock.ask(0, 2) == []
    assert clock.applied(0, 1, 1) == []
    assert clock.applied(0, 0, 1) == [(0, 2)]


def test_nobody_waits_for_the_dead() -> None:
    clock = Clock(workers=3, servers=1, staleness=0)
    for worker in range(3):
        clock.ask(worker, 1)
    for worker in (0, 1):
        clock.applied(worker, 0, 1)

    assert clock.ask(0, 2) == clock.ask(1, 2) == []
    assert clock.gone(2) == [(0, 2), (1, 2)]
    assert clock.ask(2, 2) == clock.applied(2, 0, 1) == []
