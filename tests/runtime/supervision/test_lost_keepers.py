"""Whose keeper died first, by janitors' notes and what mpiexec says: two hosts of two ranks."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from partc.runtime.supervision.lost_keepers import LostKeepers
from partc.runtime.supervision.messages import STARTER_GONE, Beat, Ended, Position
from partc.runtime.supervision.roster import Limits, Roster

HOSTS = {"rank 0": "h1", "rank 1": "h1", "rank 2": "h2", "rank 3": "h2"}
ADDRESSES = {"h1": "10.0.0.1", "h2": "10.0.0.2"}


def says(host: str) -> str:
    return f"=   PID 12190 RUNNING AT {ADDRESSES[host]}"


def beat(host: str) -> Beat:
    return Beat(7, 6, host, Position(3, "a.onnx", False, "cpu0"))


class Job:
    """`heard`: who was, before all ended; `noted`: by janitors, in this order."""

    def __init__(self, folder: Path, heard: Sequence[str], noted: Sequence[str], *lines: str) -> None:
        self.roster = Roster(HOSTS, Limits(5, 5, 90, 15, 3, 60))
        self.roster.pass_time(100.0)
        for name in heard:
            self.roster.hear_beat(name, beat(HOSTS[name]))
        for number, name in enumerate(noted):
            (folder / f"lost-keeper.{name}").touch()
            os.utime(folder / f"lost-keeper.{name}", ns=(number, number))
        self.lost = LostKeepers(HOSTS, ADDRESSES, folder, None)
        for line in lines:
            self.lost.hear(line)
        self.lost.look(self.roster)

    def first(self) -> str:
        """Return who is blamed once MPI has ended, nobody if it is not known."""
        is_known = self.lost.name_first(self.roster, is_mpi_over=True)
        troubles = self.roster.troubles()
        return troubles[0].cause.member if is_known and troubles else ""


@pytest.mark.parametrize("victim", ["rank 0", "rank 3"])
def test_who_was_noted_first_on_the_host_that_mpi_names_is_blamed(tmp_path: Path, victim: str) -> None:
    others = [name for name in HOSTS if name != victim]
    elsewhere = [name for name in others if HOSTS[name] != HOSTS[victim]]
    beside = [name for name in others if HOSTS[name] == HOSTS[victim]]

    job = Job(tmp_path, list(HOSTS), [*elsewhere, victim, *beside], says(HOSTS[victim]))

    assert job.first() == victim


def test_whose_janitor_noted_it_is_blamed_and_not_who_had_none_yet_on_another_host(tmp_path: Path) -> None:
    job = Job(tmp_path, [], ["rank 2", "rank 3"], "mpiexec: ====", says("h2"), says("h1"))

    assert job.first() == "rank 2"


def test_who_had_no_janitor_yet_is_blamed_where_mpi_names_its_host(tmp_path: Path) -> None:
    job = Job(tmp_path, ["rank 0", "rank 1", "rank 3"], ["rank 0", "rank 1"], says("h2"))
    job.roster.hear_end("rank 3", Ended(1, 0.0, Position(), 0))

    assert job.first() == "rank 2"


def test_nobody_is_named_where_a_keeper_without_a_janitor_may_have_been_the_first(tmp_path: Path) -> None:
    assert Job(tmp_path, ["rank 0"], ["rank 0", "rank 1", "rank 2"]).first() == ""


def test_of_a_host_that_went_with_its_janitors_nothing_is_noted_and_it_is_blamed(tmp_path: Path) -> None:
    job = Job(tmp_path, list(HOSTS), ["rank 1", "rank 0"])
    assert job.lost.has_more_to_say(job.roster, is_mpi_over=True)

    assert job.first() == "rank 2"
    assert not any(map(job.roster.may_answer, HOSTS))


def test_the_end_of_what_started_a_hosts_ranks_comes_before_those_that_mpi_ended_for_it(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, list(HOSTS), ["rank 0", "rank 1"], says("h1"))
    job.roster.pass_time(101.0)
    job.roster.hear_end("rank 3", Ended(-signal.SIGKILL, 0.0, Position(), 0, None, STARTER_GONE))

    assert job.first() == "rank 3"
    assert job.roster.troubles()[0].cause.reason == f"was ended: {STARTER_GONE}"


def test_a_rank_that_was_killed_is_blamed_whatever_mpi_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, list(HOSTS), [], says("h2"))
    job.roster.hear_end("rank 1", Ended(-signal.SIGKILL, 0.0, Position(), 0))
    job.roster.pass_time(100.1)
    (tmp_path / "lost-keeper.rank 2").touch()
    job.lost.look(job.roster)

    assert job.first() == "rank 1"


def test_as_long_as_mpi_goes_on_who_is_not_noted_lives(tmp_path: Path) -> None:
    job = Job(tmp_path, list(HOSTS), ["rank 3"])

    assert job.lost.name_first(job.roster, is_mpi_over=False)
    assert [trouble.cause.member for trouble in job.roster.troubles()] == ["rank 3"]
    assert not job.lost.has_more_to_say(job.roster, is_mpi_over=False)
