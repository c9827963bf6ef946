"""When a keeper has no supervisor any more: every order of what may happen to its connection."""

from itertools import product

import pytest

from partc.runtime.supervision.contact import FIRST_S, REFUSED_AFTER_S, Contact

PATIENCE_S = 90.0  # between machines


def lost_after(contact: Contact, from_s: float, *, refused: bool) -> float:
    """Return after how many seconds from then the supervisor counts as gone, looked at each tenth."""
    for tenth in range(2_000):
        if contact.is_lost(from_s + tenth / 10, lambda: refused):
            return tenth / 10
    raise AssertionError("it never does")


def test_a_keeper_that_comes_after_its_launcher_was_killed_ends_soon() -> None:
    """It has never had a connection, and would wait for a minute: its rank trains on meanwhile."""
    assert lost_after(Contact(PATIENCE_S, 0.0), 0.0, refused=True) == pytest.approx(REFUSED_AFTER_S)


def test_who_is_gone_stays_gone() -> None:
    """A keeper asks again when it leaves, and removes the launcher's folders then."""
    contact = Contact(PATIENCE_S, 0.0)

    assert contact.is_lost(1.5, lambda: True)
    assert contact.is_lost(1.6, lambda: False)


def test_a_keeper_that_nobody_answers_waits_for_a_slow_machine() -> None:
    assert lost_after(Contact(PATIENCE_S, 0.0), 0.0, refused=False) == pytest.approx(FIRST_S, abs=0.2)


def test_a_cut_cable_may_come_back() -> None:
    contact = Contact(PATIENCE_S, 0.0)
    contact.begins()
    contact.ends(100.0)
    assert not contact.is_lost(100.0 + PATIENCE_S, lambda: False)
    contact.begins()
    assert not contact.is_lost(1e6, lambda: True)

    contact.ends(2e6)
    assert lost_after(contact, 2e6, refused=False) == pytest.approx(PATIENCE_S, abs=0.2)


def test_attempts_that_fail_do_not_begin_the_wait_anew() -> None:
    contact = Contact(PATIENCE_S, 0.0)
    contact.begins()
    for second in range(100):
        contact.ends(float(second))

    assert contact.is_lost(PATIENCE_S + 1, lambda: False)


@pytest.mark.parametrize("events", tuple(product(("begins", "ends"), repeat=4)), ids=" ".join)
def test_whatever_came_before_a_killed_launcher_is_known_at_once(events: tuple[str, ...]) -> None:
    """A second passes between any two events; then nobody listens any more."""
    contact = Contact(PATIENCE_S, 0.0)
    for now_s, event in enumerate(events):
        if event == "begins":
            contact.begins()
        else:
            contact.ends(float(now_s))
    contact.ends(4.0)

    assert lost_after(contact, 4.0, refused=True) <= REFUSED_AFTER_S
