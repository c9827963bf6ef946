"""What a signal to the launcher leads to, by who is there: decisions alone, no processes."""

import signal

import pytest

from partc.runtime.errors import Stopped
from partc.runtime.jobs.launcher import StopRequest
from partc.runtime.supervision.messages import Beat, Ended, Position
from partc.runtime.supervision.roster import Limits, Roster
from partc.runtime.supervision.stop_signals import StopSignals


class Ordered:
    """A supervisor that notes what it is to tell."""

    asked_by_host = 0

    def __init__(self) -> None:
        self.roster = Roster({"rank 0": "a", "rank 1": "b"}, Limits(5.0, 5.0, 90.0, 15.0, 3.0, None))
        self.orders: list[tuple[str, list[str]]] = []

    def order(self, what: str, names: object = None) -> None:
        self.orders.append((what, sorted(names)))  # type: ignore[call-overload]


def asked(supervisor: Ordered) -> StopRequest:
    signals = StopSignals()
    signals.note(signal.SIGTERM)
    return StopRequest(supervisor, signals)  # type: ignore[arg-type]


def here(supervisor: Ordered, name: str, step: int = 0) -> None:
    supervisor.roster.hear_beat(name, Beat(1, 2, "a", Position(step)))


def test_nobody_is_waited_for_where_no_rank_has_begun() -> None:
    """A host that does not answer keeps ssh waiting for minutes."""
    with pytest.raises(Stopped, match="stopped by SIGTERM\n  at:  before the first step"):
        asked(Ordered()).look()


def test_an_end_that_is_the_launchers_own_is_at_once_and_names_no_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor, signals = Ordered(), StopSignals()
    signals.hurry(signal.SIGTERM)
    here(supervisor, "rank 0", step=7)

    with pytest.raises(Stopped):
        StopRequest(supervisor, signals).look()  # type: ignore[arg-type]

    assert supervisor.orders == [("stop", ["rank 0"])]
    assert caplog.text == ""


def test_the_first_signal_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Ordered()
    here(supervisor, "rank 0", step=7)

    asked(supervisor).look()

    assert "SIGTERM: the ranks are asked to stop; once more ends them at once" in caplog.text


def test_who_comes_later_is_asked_too_and_nobody_twice() -> None:
    supervisor = Ordered()
    stop = asked(supervisor)
    here(supervisor, "rank 0")
    stop.look()
    stop.look()
    here(supervisor, "rank 1")
    stop.look()

    assert supervisor.orders == [("stop", ["rank 0"]), ("stop", ["rank 1"])]
    assert supervisor.roster.is_stopping


def test_keepers_are_let_go_when_all_have_ended() -> None:
    supervisor = Ordered()
    stop = asked(supervisor)
    here(supervisor, "rank 0", step=7)
    stop.look()
    supervisor.roster.hear_end("rank 0", Ended(0, 0.0, Position(7), 0, has_finished=True))
    stop.look()

    assert supervisor.orders[-1] == ("end", ["rank 0"])


def test_ranks_that_stand_still_are_not_waited_for() -> None:
    supervisor = Ordered()
    stop = asked(supervisor)
    supervisor.roster.pass_time(0.0)
    here(supervisor, "rank 0", step=7)
    for second in range(29):
        supervisor.roster.pass_time(float(second))
    stop.look()
    for second in range(29, 60):
        supervisor.roster.pass_time(float(second))

    with pytest.raises(Stopped):
        stop.look()
