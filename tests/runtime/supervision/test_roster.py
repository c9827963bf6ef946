"""Who is to blame: decisions alone."""

import signal

import pytest

from partc.runtime.supervision.messages import Beat, Ended, MemberFailure, Position
from partc.runtime.supervision.roster import Limits, Roster

LIMITS = Limits(hung_s=5, quiet_s=5, silent_s=10, deaf_s=10, gone_s=1, stuck_s=60)
KILLED = -signal.SIGKILL


def roster(ranks: int = 3) -> Roster:
    made = Roster({f"rank {rank}": "alpha" for rank in range(ranks)}, LIMITS)
    made.pass_time(100.0)
    for rank in range(ranks):
        made.hear_beat(f"rank {rank}", beat())
    return made


def beat(step: int = 1, at: str = "a.onnx", awaits: bool = False, still_s: float = 0.0) -> Beat:
    return Beat(7, 6, "here", Position(step, at, awaits, "cpu0"), still_s)


def ended(
    code: int,
    time_s: float = 0.0,
    failure: MemberFailure | None = None,
    by_keeper: str = "",
    has_finished: bool = False,
) -> Ended:
    return Ended(code, time_s, Position(3, "a.onnx", False, "cpu0"), 10**9, failure, by_keeper, has_finished)


def failure(what: str, is_echo: bool = False) -> MemberFailure:
    return MemberFailure(1.0, "RankFailed", what, "there", "do", is_echo)


def pass_seconds(made: Roster, seconds: int, since_s: float = 100.0) -> None:
    for second in range(seconds):
        made.pass_time(since_s + second + 1)


def blamed(made: Roster) -> list[tuple[str, str]]:
    return [(trouble.cause.member, trouble.cause.kind) for trouble in made.troubles()]


def test_who_runs_or_has_ended_well_is_in_no_trouble() -> None:
    made = roster()
    made.hear_end("rank 1", ended(0, has_finished=True))

    assert blamed(made) == []
    assert made.living() == ["rank 0", "rank 2"]


def test_who_leaves_with_exit_code_0_before_it_has_finished_is_to_blame() -> None:
    made = roster()
    made.hear_end("rank 0", ended(1, 0.0, failure("MPI error", is_echo=True)))
    made.pass_time(100.1)
    made.hear_end("rank 1", ended(0, 5.0))

    first, _ = made.troubles()

    assert (first.cause.kind, first.cause.member, first.cause.step) == ("killed", "rank 1", 3)
    assert first.cause.reason == "died: exit code 0, without a report"


def test_a_death_is_told_with_its_place() -> None:
    made = roster()
    made.hear_end("rank 1", ended(KILLED))

    (trouble,) = made.troubles()

    cause = trouble.cause
    assert (cause.kind, cause.member, cause.host, cause.device) == ("killed", "rank 1", "alpha", "cpu0")
    assert (cause.step, cause.at, cause.reason) == (3, "a.onnx", "died: signal 9 (SIGKILL)")


def test_a_silence_is_told_long_before_anybody_is_given_up_for_it() -> None:
    made = Roster({"rank 0": "alpha", "rank 1": "beta", "rank 2": "beta"}, LIMITS)
    made.pass_time(100.0)
    for rank in range(3):
        made.hear_beat(f"rank {rank}", beat())
    made.pass_time(100.5)
    made.hear_beat("rank 2", beat())
    told = []
    for tenth in range(1, 80):
        made.pass_time(100.5 + tenth / 10)
        made.hear_beat("rank 0", beat())
        told += made.silences()
        assert blamed(made) == []
    made.hear_beat("rank 1", beat())
    told += made.silences()
    made.hear_beat("rank 2", beat())
    told += made.silences()

    assert told == [
        "host beta (rank 1, rank 2): not heard for 5 s; given up after 10 s",
        "rank 1 on beta: heard again",
        "rank 2 on beta: heard again",
    ]


def test_one_keeper_of_a_host_is_silent_alone() -> None:
    made = roster(2)
    told = []
    for second in range(7):
        made.pass_time(101.0 + second)
        made.hear_beat("rank 0", beat())
        told += made.silences()

    assert told == ["rank 1 on alpha: not heard for 6 s; given up after 10 s"]


def test_who_has_ended_is_not_silent() -> None:
    made = roster(1)
    made.hear_end("rank 0", ended(0))
    pass_seconds(made, 20)

    assert made.silences() == []


def test_a_keeper_that_is_stopped_before_it_is_heard_is_named() -> None:
    made = Roster({"rank 0": "alpha", "rank 1": "alpha"}, LIMITS)
    made.pass_time(100.0)
    found = []
    for second in range(8):
        made.pass_time(101.0 + second)
        made.hear_beat("rank 0", beat())
        made.stop_unheard(["rank 1"])
        found.append(blamed(made))

    assert found == [[]] * 6 + [[("rank 1", "lost")]] * 2


def test_a_keeper_that_was_stopped_for_a_while_before_it_is_heard_is_not() -> None:
    made = Roster({"rank 0": "alpha"}, LIMITS)
    for second in range(20):
        made.pass_time(100.0 + second)
        made.stop_unheard(["rank 0"] if second % 4 else [])

    assert blamed(made) == []


@pytest.mark.parametrize("is_heard", [True, False])
def test_whose_keeper_was_lost_first_is_blamed_before_those_that_mpi_ended_for_it(is_heard: bool) -> None:
    made = Roster({"rank 0": "alpha", "rank 1": "beta"}, LIMITS)
    made.pass_time(100.0)
    for name in ("rank 0", *(["rank 1"] if is_heard else [])):
        made.hear_beat(name, beat())
    made.miss(["rank 0"])
    pass_seconds(made, 3)

    made.lose_first("rank 1")

    assert blamed(made) == [("rank 1", "lost"), ("rank 0", "lost")]


@pytest.mark.parametrize(
    "echo",
    [
        ended(1, 0.0, failure("MPI error", is_echo=True)),
        ended(15),
        ended(-signal.SIGABRT),
        Ended(-signal.SIGSEGV, 0.0, Position(3, "communication dW (0)", True, "cpu0"), 10**9),
        ended(KILLED, by_keeper="what started the ranks of its host is gone"),
    ],
    ids=[
        "an error of MPI's",
        "an exit without a word",
        "abort",
        "a crash while it waits",
        "ended by its keeper",
    ],
)
def test_what_others_die_of_is_not_the_cause_though_it_be_told_first(echo: Ended) -> None:
    made = roster()
    made.hear_end("rank 0", echo)
    made.pass_time(100.1)
    made.hear_end("rank 2", ended(KILLED, 5.0))

    assert [member for member, _ in blamed(made)] == ["rank 2", "rank 0"]


def test_a_crash_elsewhere_is_no_answer_to_anything() -> None:
    made = roster()
    made.hear_end("rank 0", ended(-signal.SIGSEGV))
    made.pass_time(100.1)
    made.hear_end("rank 2", ended(KILLED, 5.0))

    assert blamed(made)[0] == ("rank 0", "killed")


def test_of_two_deaths_heard_at_once_the_earlier_is_the_cause() -> None:
    made = roster()
    made.hear_end("rank 0", ended(KILLED, time_s=5.2))
    made.hear_end("rank 2", ended(KILLED, time_s=5.1))

    assert blamed(made)[0] == ("rank 2", "killed")


def test_who_shows_no_sign_of_life_hangs_and_who_waits_for_it_does_not() -> None:
    made = roster()
    for rank in (0, 2):
        made.hear_beat(f"rank {rank}", beat(awaits=True))
    made.hear_beat("rank 1", beat(still_s=5.5))

    assert blamed(made) == [("rank 1", "hung")]


def test_a_keeper_out_of_reach_is_lost_unless_it_is_heard_again() -> None:
    made = roster()
    made.miss(["rank 1", "rank 2"])
    made.pass_time(100.5)
    made.hear_beat("rank 2", beat())
    pass_seconds(made, 2, since_s=100.5)

    assert blamed(made) == [("rank 1", "lost")]


def test_the_keeper_that_was_out_of_reach_first_is_the_cause() -> None:
    made = roster()
    made.miss(["rank 2"])
    made.pass_time(100.05)
    made.miss(["rank 0", "rank 1", "rank 2"])
    pass_seconds(made, 2, since_s=100.05)

    assert blamed(made)[0] == ("rank 2", "lost")


def test_a_keeper_that_is_silent_is_lost() -> None:
    made = roster()
    for second in range(11):
        made.pass_time(101.0 + second)
        made.hear_beat("rank 0", beat())
        made.hear_beat("rank 1", beat())

    assert blamed(made) == [("rank 2", "lost")]


def listen(made: Roster, since_s: int, until_s: int, acknowledges: bool) -> list[tuple[str, str]]:
    """Hear rank 0 each second and nothing of rank 1, whose host acknowledges or does not."""
    for second in range(since_s, until_s):
        made.pass_time(100.0 + second)
        made.hear_beat("rank 0", beat())
        made.acknowledge(["rank 1"] if acknowledges else [])
    return blamed(made)


def test_a_keeper_is_given_up_sooner_while_its_host_answers() -> None:
    made = Roster({"rank 0": "alpha", "rank 1": "beta"}, Limits(5, 5, 90, 15, 3, None))
    made.pass_time(100.0)
    for name in ("rank 0", "rank 1"):
        made.hear_beat(name, beat())

    assert listen(made, 1, 7, acknowledges=True) == []
    (told,) = made.silences()
    assert told == "host beta (rank 1): not heard for 6 s; given up after 90 s, 20 s while its host answers"
    assert listen(made, 7, 22, acknowledges=True) == []
    assert listen(made, 22, 24, acknowledges=True) == [("rank 1", "lost")]
    assert made.troubles()[0].cause.reason == "was lost: not heard for 23 s, though its host answers"


def test_a_link_that_was_cut_for_a_minute_costs_nobody_when_the_host_answers_first() -> None:
    made = Roster({"rank 0": "alpha", "rank 1": "beta"}, Limits(5, 5, 90, 15, 3, None))
    made.pass_time(100.0)
    for name in ("rank 0", "rank 1"):
        made.hear_beat(name, beat())

    assert listen(made, 1, 60, acknowledges=False) == []
    assert listen(made, 60, 74, acknowledges=True) == []
    made.hear_beat("rank 1", beat())
    assert listen(made, 74, 90, acknowledges=True) == []


def test_a_keeper_that_is_seen_to_run_is_not_given_up_though_it_is_silent() -> None:
    made = roster(1)
    for second in range(1, 30):
        made.pass_time(100.0 + second)
        made.see("rank 0")
    assert blamed(made) == []
    assert made.silences() == ["host alpha (rank 0): not heard for 29 s; given up after 10 s"]

    pass_seconds(made, 11, since_s=129.0)

    assert blamed(made) == [("rank 0", "lost")]


def test_a_keeper_that_was_seen_to_die_is_lost_at_once_though_it_was_heard() -> None:
    made = roster()
    made.lose(["rank 1"])
    made.hear_beat("rank 1", beat())  # that was on its way

    assert blamed(made) == [("rank 1", "lost")]
    assert not made.may_answer("rank 1") and made.may_answer("rank 0")


def test_nobody_is_silent_while_nobody_listened() -> None:
    made = roster()
    made.pass_time(10_000.0)

    assert blamed(made) == []


def stand_still(made: Roster, beats: dict[str, Beat], seconds: int = 63) -> None:
    for second in range(seconds):
        made.pass_time(101.0 + second)
        for name, heard in beats.items():
            made.hear_beat(name, heard)


def test_slow_is_not_stuck_while_anybody_gets_on() -> None:
    made = roster()
    for second in range(200):
        made.pass_time(101.0 + second)
        made.hear_beat("rank 0", beat(step=second // 40))
        made.hear_beat("rank 1", beat())
        made.hear_beat("rank 2", beat())

    assert blamed(made) == []


def test_of_ranks_that_do_not_get_on_the_one_that_waits_for_nobody_is_to_blame() -> None:
    made = roster()
    waits = beat(2, "communication dW (4)", awaits=True)

    stand_still(made, {"rank 0": waits, "rank 1": beat(2, "b.onnx"), "rank 2": waits})

    (trouble,) = made.troubles()
    assert (trouble.cause.member, trouble.cause.kind, trouble.cause.at) == ("rank 1", "stuck", "b.onnx")
    assert "rank 0 waits in communication dW (4)" in trouble.cause.reason


def test_where_all_wait_who_is_furthest_behind_is_to_blame() -> None:
    made = roster()

    stand_still(made, {f"rank {r}": beat(3 - (r == 1), "communication", awaits=True) for r in range(3)})

    assert blamed(made) == [("rank 1", "stuck")]


def test_who_never_started_is_to_blame_first() -> None:
    made = Roster({"rank 0": "alpha", "rank 1": "beta"}, LIMITS)
    made.pass_time(100.0)

    stand_still(made, {"rank 0": beat()})

    (trouble,) = made.troubles()
    assert (trouble.cause.member, trouble.cause.host, trouble.cause.at) == (
        "rank 1",
        "beta",
        "before it started",
    )


def test_an_end_by_the_signal_that_asked_for_it_is_no_trouble() -> None:
    made = roster()
    made.is_stopping = True
    made.hear_end("rank 0", ended(-signal.SIGTERM))
    made.hear_end("rank 1", ended(1, 0.0, failure("no space left")))

    assert blamed(made) == [("rank 1", "failed")]


def test_nobody_asks_about_who_was_left_behind() -> None:
    made = roster()
    made.hear_end("rank 0", ended(KILLED))
    made.forget("rank 0")

    assert blamed(made) == []


def test_strangers_are_no_members_and_those_without_a_number_not_endlessly_many() -> None:
    made = roster()
    assert made.knows("rank 2")
    assert not made.knows("rank 3")

    for process in range(100):
        if made.knows(f"process {process}"):
            made.hear_beat(f"process {process}", beat())

    assert len(made.living()) == 6


def test_who_was_not_heard_yet_is_known() -> None:
    made = Roster({"rank 0": "alpha", "rank 1": "beta"}, LIMITS)
    made.hear_beat("rank 0", beat())

    assert made.unheard() == ["rank 1"]


def test_an_end_by_a_signal_is_known() -> None:
    made = roster()
    made.hear_end("rank 0", ended(-signal.SIGTERM))

    assert made.has_ended_by(signal.SIGTERM)
    assert not made.has_ended_by(signal.SIGKILL)


def test_a_keeper_that_ends_before_it_is_heard_is_lost_and_the_first_one_is_blamed() -> None:
    made = Roster({f"rank {rank}": "alpha" for rank in range(3)}, LIMITS)
    made.pass_time(100.0)
    made.hear_beat("rank 0", beat())
    assert made.unheard() == ["rank 1", "rank 2"] and blamed(made) == []

    made.lose(["rank 2"])
    made.pass_time(100.5)
    made.lose(["rank 1", "rank 2"])
    made.miss(["rank 0"])

    assert blamed(made) == [("rank 2", "lost"), ("rank 1", "lost")]
    assert made.troubles()[0].cause.reason == "was lost: its keeper died"
