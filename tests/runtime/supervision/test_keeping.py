"""Keepers of small processes, without MPI: what they tell, and when they end what they keep."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from partc.runtime.engines.rank_command import KEEPER
from partc.runtime.errors import BadData, Cause
from partc.runtime.supervision.janitor import lost_keepers
from partc.runtime.supervision.pulse import failure_of
from partc.runtime.supervision.supervisor import Supervisor
from tests.checks.job_processes import is_alive

MEMBER = """
import os, signal, sys, threading, time
from partc.runtime.errors import BadData
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.pulse import Pulse, failure_of

asked = []

def position():
    asked.append(True)
    return Position(4, "b.onnx", False, "cpu7")

pulse = Pulse.of_process()
pulse.follow(position)
while len(asked) < 2:  # asked again, it has told what it was asked for before
    time.sleep(0.01)
HOW
"""
WITHIN_S = 30.0
SOON_S = 0.6  # on a machine that others use as well, who sleeps may not be given a core for so long


class Kept:
    """One process under a keeper, and its supervisor."""

    def __init__(self, folder: Path, how: str, addresses: dict[str, str], hung_s: float) -> None:
        self.is_closed = False
        (folder / "member.py").write_text(MEMBER.replace("HOW", how))
        self.supervisor = Supervisor({"one": "alpha"}, addresses, folder, None, hung_s=hung_s)
        environment = dict(os.environ) | {"PYTHONPATH": str(folder)}
        command = [sys.executable, "-m", KEEPER, str(folder), "one", "member"]
        self.keeper = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def until(self, holds: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < deadline_s
            self.supervisor.watch(0.02)

    def close(self, *, well: bool = True) -> None:
        if not self.is_closed:
            self.is_closed = True
            if well:
                self.supervisor.end()
            self.supervisor.__exit__(None, None, None)

    def child(self) -> int:
        self.until(lambda: self.supervisor.roster.position("one").step == 4)
        (beat,) = self.supervisor.roster.beats()
        return beat.process

    def cause(self) -> Cause:
        self.until(self.supervisor.roster.troubles)
        return self.supervisor.roster.troubles()[0].cause


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def start(
        how: str = "time.sleep(60)", addresses: dict[str, str] | None = None, hung_s: float = WITHIN_S
    ) -> Kept:
        made.append(Kept(tmp_path, how, addresses or {}, hung_s))
        return made[-1]

    yield start
    for kept in made:
        kept.close()
        kept.keeper.kill()
        kept.keeper.wait()


def test_a_death_is_told_before_the_keeper_ends(keep: Callable[..., Kept]) -> None:
    kept = keep()
    os.kill(kept.child(), signal.SIGSEGV)

    cause = kept.cause()

    assert (cause.kind, cause.device, cause.step, cause.at) == ("killed", "cpu7", 4, "b.onnx")
    assert cause.reason == "died: signal 11 (SIGSEGV)"
    assert kept.keeper.poll() is None
    kept.supervisor.order("end", ["one"])
    assert kept.keeper.wait(WITHIN_S) == 128 + signal.SIGSEGV


def test_a_death_is_told_with_the_instruction_that_was_noted_last(keep: Callable[..., Kept]) -> None:
    kept = keep(
        "from partc.runtime.supervision.track import Track; track = Track(); "
        "track.begin(5, track.place('reading data')); track.begin(6, track.place('AllReduce g', True)); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    cause = kept.cause()

    assert (cause.kind, cause.device, cause.step, cause.at) == ("killed", "cpu7", 6, "AllReduce g")


def test_an_error_is_told_by_who_meets_it_and_needs_no_disk(keep: Callable[..., Kept]) -> None:
    kept = keep('pulse.fail(failure_of(BadData("a hole", at="x[3]", fix="mend it"), "there"))')

    assert (kept.cause().kind, kept.cause().reason) == ("failed", "a hole")
    failure = kept.supervisor.roster.ended()["one"].failure
    assert failure is not None
    assert (failure.kind, failure.at, failure.fix) == ("BadData", "x[3]", "mend it")


def test_what_raised_a_refusal_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = BadData("no batch", at="--data", fix="mend it")
    refusal.__cause__ = KeyError("my reader")

    failure = failure_of(refusal, "rank 0")

    assert (failure.kind, failure.what) == ("BadData", "no batch")
    assert "KeyError: 'my reader'" in capsys.readouterr().err


def test_a_module_that_cannot_be_loaded_says_so(keep: Callable[..., Kept]) -> None:
    kept = keep("import no_such_library")

    assert kept.cause().reason == "ModuleNotFoundError: No module named 'no_such_library'"


def test_a_good_end_is_none_of_these(keep: Callable[..., Kept]) -> None:
    kept = keep("pulse.end()")

    kept.until(kept.supervisor.roster.ended)

    assert kept.supervisor.roster.troubles() == []
    assert kept.keeper.wait(WITHIN_S) == 0


def test_an_exit_with_0_is_no_good_end_where_nothing_was_finished(keep: Callable[..., Kept]) -> None:
    kept = keep("os._exit(0)")

    assert kept.cause().reason == "died: exit code 0, without a report"
    kept.supervisor.order("end", ["one"])
    assert kept.keeper.wait(WITHIN_S) == 1, "what started it is to see that it failed"


def test_a_stopped_process_hangs_and_wakes_no_more(keep: Callable[..., Kept]) -> None:
    kept = keep(hung_s=SOON_S)
    child = kept.child()
    os.kill(child, signal.SIGSTOP)

    assert kept.cause().kind == "hung"

    kept.supervisor.end()
    assert not is_alive(child)


def test_a_process_that_computes_and_cannot_tell_does_not_hang(keep: Callable[..., Kept]) -> None:
    kept = keep("sum(range(10**8))", hung_s=SOON_S)  # which does not give Python's lock away
    kept.child()
    begun_s = time.monotonic()

    while time.monotonic() - begun_s < 1.5:
        kept.supervisor.watch(0.05)
        assert kept.supervisor.roster.troubles() == []


def test_a_stop_is_handed_on_as_a_signal(keep: Callable[..., Kept]) -> None:
    kept = keep("signal.signal(signal.SIGTERM, lambda *_: sys.exit(pulse.end())); time.sleep(60)")
    kept.child()
    time.sleep(0.5)

    kept.supervisor.order("stop")

    kept.until(lambda: kept.keeper.poll() is not None)
    assert kept.keeper.returncode == 0


def test_what_is_printed_comes_line_by_line_though_it_is_no_text(keep: Callable[..., Kept]) -> None:
    kept = keep(r'os.write(1, b"one\ntwo \xff\xfe"); time.sleep(0.2); os.write(2, b" three\n"); pulse.end()')
    lines: list[tuple[str, str]] = []

    kept.until(lambda: lines.extend(kept.supervisor.take_lines()) or len(lines) > 1)

    assert lines == [("one", "one"), ("one", "two \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} three")]


def test_a_signal_of_the_batch_system_is_told_and_not_followed(keep: Callable[..., Kept]) -> None:
    kept = keep()
    child = kept.child()

    kept.keeper.terminate()

    kept.until(lambda: kept.supervisor.asked_by_host)
    assert kept.supervisor.asked_by_host == signal.SIGTERM
    assert is_alive(child)


def test_what_runs_under_nohup_does_not_end_with_its_terminal(keep: Callable[..., Kept]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        kept = keep()
    finally:
        signal.signal(signal.SIGHUP, before)
    kept.child()

    kept.keeper.send_signal(signal.SIGHUP)
    for _ in range(4):
        (before,) = kept.supervisor.roster.beats()
        kept.until(lambda before=before: before is not kept.supervisor.roster.beat("one"))
    kept.keeper.send_signal(signal.SIGTERM)

    kept.until(lambda: kept.supervisor.asked_by_host)
    assert kept.supervisor.asked_by_host == signal.SIGTERM  # the first that anybody heeds


def test_a_process_ends_with_its_keeper(keep: Callable[..., Kept], tmp_path: Path) -> None:
    kept = keep()
    child = kept.child()
    assert lost_keepers(tmp_path) == []

    kept.keeper.kill()

    assert kept.cause().kind == "lost"
    kept.until(lambda: not is_alive(child))
    kept.until(lambda: lost_keepers(tmp_path) == ["one"])


def test_a_keeper_that_is_stopped_is_given_up_since_its_host_answers(
    keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partc.runtime.supervision.supervisor._DEAF_S", 0.5)
    kept = keep(addresses={"alpha": "127.0.0.2"}, hung_s=SOON_S)
    kept.child()

    os.kill(kept.keeper.pid, signal.SIGSTOP)

    assert kept.cause().reason.endswith("though its host answers")


def test_a_keeper_that_ends_by_itself_is_not_lost(keep: Callable[..., Kept], tmp_path: Path) -> None:
    kept = keep("sys.exit(3)")
    kept.cause()

    kept.supervisor.end()

    assert kept.keeper.wait(WITHIN_S) == 3
    assert lost_keepers(tmp_path) == []


def test_shared_memory_goes_when_a_keeper_is_killed(keep: Callable[..., Kept]) -> None:
    """As MPI's proxy kills it, all of its group, when nobody else is on the host who could tidy up."""
    segment = Path(f"/dev/shm/mpich_shm_test_{os.getpid()}")
    kept = keep(
        f"import mmap; file = open({str(segment)!r}, 'w+b'); file.write(bytes(4096)); file.flush(); "
        "mapped = mmap.mmap(file.fileno(), 4096); time.sleep(60)"
    )
    try:
        kept.until(lambda: any(beat.segments for beat in kept.supervisor.roster.beats()))
        assert segment.exists()
        kept.keeper.kill()
        kept.until(lambda: not segment.exists())
    finally:
        segment.unlink(missing_ok=True)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.2"], ids=["here", "over the network"])
def test_a_process_ends_with_the_supervisor(keep: Callable[..., Kept], address: str) -> None:
    kept = keep(addresses={"alpha": address})
    child = kept.child()

    kept.close(well=False)

    deadline_s = time.monotonic() + WITHIN_S
    while is_alive(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not is_alive(child)
    assert kept.keeper.wait(WITHIN_S) == 128 + signal.SIGKILL


@pytest.mark.parametrize("address", ["localhost", "127.0.0.2"], ids=["here", "over the network"])
def test_a_process_that_starts_when_the_supervisor_is_gone_ends(tmp_path: Path, address: str) -> None:
    with Supervisor({"one": "alpha"}, {"alpha": address}, tmp_path, None):
        pass
    (tmp_path / "member.py").write_text(MEMBER.replace("HOW", "time.sleep(600)"))
    command = [sys.executable, "-m", KEEPER, str(tmp_path), "one", "member"]
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    keeper = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    try:
        assert keeper.wait(WITHIN_S) == 128 + signal.SIGKILL
    finally:
        keeper.kill()
        keeper.wait()
