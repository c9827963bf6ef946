"""Have the ranks of a job started, each under its keeper, and watch over them from outside MPI."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO

import msgspec

from partc.runtime import errors
from partc.runtime.engines.machines import Machines
from partc.runtime.engines.place import Place
from partc.runtime.engines.rank_command import DAEMON
from partc.runtime.engines.start_ranks import prepare_ranks
from partc.runtime.errors import PartcError, RankFailed, Stopped
from partc.runtime.jobs.job import JobMessage, Notice
from partc.runtime.log import log as records
from partc.runtime.log import printable
from partc.runtime.plan.program import place_of
from partc.runtime.supervision.lost_keepers import LostKeepers, follows_from_mpi
from partc.runtime.supervision.messages import Ended
from partc.runtime.supervision.roster import Trouble, how
from partc.runtime.supervision.started_keepers import StartedKeepers
from partc.runtime.supervision.stop_signals import StopSignals, name_of, stop_signals, stopped
from partc.runtime.supervision.supervisor import Supervisor

OnProgress = Callable[[JobMessage], None]

_TOLD: msgspec.json.Decoder[JobMessage] = msgspec.json.Decoder(JobMessage)

FIRST = "rank 0"
MPIEXEC = "mpiexec"  # what is called so in a log: whatever has started the ranks
_GRACE_S = 5.0  # from a polite end to a kill
_STOP_S = 30.0  # that a job that is to stop may stand still
_LOOK_S = 0.1
_SETTLE_S = 0.4  # from the first bad news to a verdict: who died first may be told last
_MISSED_S = 4.0  # from MPI's end until keepers that it took along are missed
_NOTED_S = 1.5  # from MPI's end until all have been noted that it took along


def launch(
    hosts: Sequence[str],
    job_folder: Path,
    log: Path,
    machines: Machines,
    on_progress: OnProgress | None,
    timeout_s: float | None,
    daemon: str = DAEMON,
    folders: Sequence[Path] = (),
    place: Place | None = None,
    redirect: Path | None = None,
    requests: StopSignals | None = None,
) -> int:
    """Run a job to its end. Return the number of the signal that made its ranks stop before, 0 if none did.

    `hosts`: each rank's. A job in which no rank gets on for `timeout_s` is ended. `daemon`: the module that
    every rank runs. `folders`: temporary ones beside the job's, for keepers to remove if this process is
    killed. `place`: of this process, if others have started the ranks. `redirect`: a folder that takes what
    each rank prints, a file for each. `requests`: to stop, of another thread. Raises the error of the rank
    that is to blame, whose `cause` says where it was; and Stopped if ranks that a signal asked to stop did
    not do so well.
    """
    members = {f"rank {rank}": host for rank, host in enumerate(hosts)}
    start = prepare_ranks(hosts, job_folder, machines, daemon, place)
    with (
        stop_signals(requests) as signals,
        log.open("w", encoding="utf-8") as stream,
        Supervisor(members, start.machines.addresses, job_folder, timeout_s, folders) as supervisor,
    ):
        records.info("starting %s", start.description)
        written = Log(stream, redirect, members)
        written.write("launcher", start.description)
        process = start.begin()
        if place is not None:
            place.has_begun = True
        try:
            started = StartedKeepers(process.pid) if start.is_here else None
            lost = LostKeepers(members, start.machines.addresses, job_folder, started)
            watch = _Watch(process, lost, supervisor, signals, written, on_progress, start.is_joined)
            return watch.to_the_end()
        except RankFailed as error:
            if signals.number and requests is None:  # perhaps just behind a failure: nobody begins again
                raise stopped(signals.number, f"{error.what}, at {error.at}") from error
            raise
        finally:
            supervisor.end(only=[FIRST] if start.is_joined else None)
            is_deaf = bool(supervisor.roster.unheard() or supervisor.roster.quiet())
            _end(process, start.is_here, 0.0 if is_deaf else _GRACE_S)


class _Watch:
    """Decides what becomes of a job of ranks that need each other."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        lost: LostKeepers,
        supervisor: Supervisor,
        signals: StopSignals,
        log: "Log",
        on_progress: OnProgress | None,
        is_joined: bool,
    ) -> None:
        self._process = process
        self._is_joined = is_joined
        self._lost = lost
        self._supervisor = supervisor
        self._stop = StopRequest(supervisor, signals)
        self._log = log
        self._on_progress = on_progress
        self._lines = read_lines(MPIEXEC, process)

    def to_the_end(self) -> int:
        """Watch until all ranks have ended; return what `launch` does."""
        while not self._is_over():
            self._look()
        self._look()
        if self._process.returncode == 0 or self._all_well():
            return self._stop.number
        self._await_trouble()
        self._verdict()
        if self._stop.number:
            raise self._stop.error()
        last = self._log.last.get(MPIEXEC, "")
        first = ", ".join(self._lost.hosts_said)
        raise RankFailed(
            f"mpiexec died: {how(self._process.returncode)}, and no rank says why"
            + (f"; as it says, ranks of host {first} ended first" if first else "")
            + (f"; its last words: {last}" if last else ""),
            at="mpiexec" if self._supervisor.roster.beats() else "mpiexec, before a rank had started",
            fix=f"see who killed it, and whether it reaches all hosts; read {self._log.path}",
        )

    def _look(self) -> None:
        self._forward()
        self._supervisor.watch(_LOOK_S)
        for text in self._supervisor.roster.silences():
            self._log.write("launcher", text)
            if self._on_progress is not None:
                self._on_progress(Notice(text))
        self._lost.look(self._supervisor.roster)
        self._stop.look()
        if self._supervisor.roster.troubles() or self._is_cut_short():
            self._verdict()

    def _await_trouble(self) -> None:
        """Wait for word of why MPI has ended: it ends with any rank's keeper, and takes the others along.

        Where it was killed itself that is why.
        """
        roster = self._supervisor.roster
        until_s = time.monotonic() + (_SETTLE_S if self._is_mpi_killed() else _MISSED_S)
        while roster.beats() and not roster.troubles() and time.monotonic() < until_s:
            self._supervisor.watch(_LOOK_S)
            self._lost.look(roster)

    def _verdict(self) -> None:
        """Hear everybody who has something to say, then raise the error of who is to blame, if anybody is."""
        until_s = time.monotonic() + _SETTLE_S
        while (left_s := until_s - time.monotonic()) > 0:
            self._supervisor.watch(min(left_s, _LOOK_S))
        if self._is_cut_short():
            raise self._stop.error()
        is_known = self._await_first_lost()
        troubles = self._supervisor.roster.troubles()
        if troubles and not (follows_from_mpi(troubles[0]) and (self._is_mpi_killed() or not is_known)):
            self._supervisor.order("end")
            self._forward()
            raise error_of(troubles[0], self._log.path)

    def _await_first_lost(self) -> bool:
        """See who was lost first, where MPI ended the others for it; return False where nothing tells."""
        roster, until_s = self._supervisor.roster, time.monotonic() + _NOTED_S
        self._forward()
        while self._lost.has_more_to_say(roster, self._is_mpi_over()) and time.monotonic() < until_s:
            self._supervisor.watch(_LOOK_S)
            self._forward()
        self._lost.look(roster)
        return self._lost.name_first(roster, self._is_mpi_over())

    def _is_mpi_over(self) -> bool:
        return self._process.poll() is not None

    def _is_cut_short(self) -> bool:
        """Tell whether ranks that were loading have ended by the signal that asks for an end.

        The others, which would stop after a step, wait for them.
        """
        return bool(self._stop.number) and self._supervisor.roster.has_ended_by(signal.SIGTERM)

    def _is_mpi_killed(self) -> bool:
        return (self._process.poll() or 0) < 0

    def _is_over(self) -> bool:
        # Where others have started the ranks, the process is the first rank's alone.
        return self._process.poll() is not None and not (self._is_joined and self._supervisor.roster.living())

    def _all_well(self) -> bool:
        ended = self._supervisor.roster.ended()
        return not self._supervisor.roster.living() and all(e.is_well for e in ended.values()) and bool(ended)

    def _forward(self) -> None:
        """Hand progress on, and log the rest."""
        for name, line in [*taken(self._lines), *self._supervisor.take_lines()]:
            if name == MPIEXEC:
                self._lost.hear(line)
            progress = progress_in(line)
            if progress is None:
                self._log.write(name, line)
            elif self._on_progress is not None:
                self._on_progress(progress)


class StopRequest:
    """Has a job stop when a signal asks for it: well the first time, at once the second."""

    def __init__(self, supervisor: Supervisor, signals: StopSignals) -> None:
        self._supervisor = supervisor
        self._signals = signals
        self._asked: set[str] = set()
        self.number = 0

    def look(self) -> None:
        """See whether somebody asks. Raises Stopped where it was asked twice, or nothing moves."""
        number = self._signals.number or self._supervisor.asked_by_host
        if not number:
            return
        roster = self._supervisor.roster
        if not self.number:
            self.number = number
            roster.is_stopping = True
            if not self.is_hurried:
                text = "%s: the ranks are asked to stop; once more ends them at once"
                records.warning(text, name_of(number))
        if late := set(roster.living()) - self._asked:  # keepers of a job that has just begun come one by one
            self._supervisor.order("stop", late)
            self._asked |= late
        stands_still = bool(roster.living()) and roster.still_s > _STOP_S
        if self.is_hurried or stands_still or not roster.beats():  # nobody has begun: nothing is lost
            raise self.error()
        if not roster.living():
            self._supervisor.order("end", roster.ended())

    @property
    def is_hurried(self) -> bool:
        """Whether the end is to come at once."""
        return self._signals.count > 1

    def error(self) -> Stopped:
        """Return what to raise where ranks could not stop well."""
        positions = map(self._supervisor.roster.position, self._supervisor.roster.ended())
        step = max((position.step for position in positions), default=0)
        return stopped(self.number, f"step {step}" if step else "before the first step")


def error_of(trouble: Trouble, log: Path, counted: str = "") -> PartcError:
    """Return the error of the process that is to blame. `counted`: what its step is, if not its own."""
    cause = trouble.cause
    failure = None if trouble.ended is None else trouble.ended.failure
    if failure is not None:
        kind = getattr(errors, failure.kind, RankFailed)
        error: PartcError = kind(failure.what, at=failure.at, fix=failure.fix)
    else:
        place = place_of(cause.host, cause.device) if cause.device else cause.host
        error = RankFailed(
            f"{cause.member} {cause.reason}",
            at=", ".join(
                (f"{cause.member} ({place})", *([f"step {cause.step}{counted}"] * bool(cause.step)), cause.at)
            ),
            fix=f"{_FIXES[cause.kind]}; read {log}{_memory(trouble.ended)}",
        )
    error.cause = cause
    return error


_FIXES = {
    "killed": "see who killed it, or what called exit(); a kill without a word is often a lack of memory",
    "failed": "see what it says",
    "hung": "see what stopped it: a signal, a frozen container, a disk that does not answer",
    "stuck": "see what it is at; raise the timeout if steps are this long",
    "lost": "see whether its host runs and can be reached",
}


def _memory(ended: Ended | None) -> str:
    return f" (it held at most {ended.peak_bytes / 1e9:.1f} GB)" if ended is not None else ""


class Log:
    """The file of what ranks print. A disk that is full ends no training.

    `redirect`: a folder that takes the same, a file for each process: for `members` even if they are silent.
    """

    def __init__(self, stream: IO[str], redirect: Path | None = None, members: Collection[str] = ()) -> None:
        self._stream = stream
        self._apart: dict[str, Path] = {}  # process -> its own file
        self._redirect = redirect
        for name in members if redirect is not None else ():
            self._write_apart(name, "")
        self.path = Path(stream.name)
        self._is_full = False
        self.last: dict[str, str] = {}  # process -> its last line

    def write(self, name: str, line: str) -> None:
        """Add a line that a process printed."""
        self.last[name] = printable(line).strip() or self.last.get(name, "")
        if self._is_full:
            return
        try:
            self._stream.write(f"{name}: {printable(line)}\n")
            self._stream.flush()
            self._write_apart(name, f"{printable(line)}\n")
        except OSError as error:
            self._is_full = True
            records.warning("%s ends here: %s", self.path, error.strerror)

    def _write_apart(self, name: str, line: str) -> None:
        if self._redirect is None:
            return
        mode = "a" if name in self._apart else "w"
        path = self._apart.setdefault(name, self._redirect / f"{name.replace(' ', '-')}.log")
        with path.open(mode) as file:
            file.write(line)


NamedLine = tuple[str, str]  # (process, what it printed)


def read_lines(
    name: str, process: "subprocess.Popen[bytes]", lines: "queue.Queue[NamedLine] | None" = None
) -> "queue.Queue[NamedLine]":
    """Return a queue that takes what a process prints: mpiexec or ssh, since members have keepers."""
    into: queue.Queue[NamedLine] = queue.Queue() if lines is None else lines

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            into.put((name, line.decode(errors="replace").rstrip("\n")))

    threading.Thread(target=read, daemon=True).start()
    return into


def taken(lines: "queue.Queue[NamedLine]") -> list[NamedLine]:
    """Return what is in a queue now."""
    return [lines.get() for _ in range(lines.qsize())]


def progress_in(line: str) -> JobMessage | None:
    """Return what a line of a rank tells a person, None if it is some other line."""
    try:
        return _TOLD.decode(line)
    except msgspec.MsgspecError:
        return None


def _end(process: "subprocess.Popen[bytes]", is_here: bool, patience_s: float) -> None:
    """End mpiexec and what it started, if they still run after `patience_s`.

    It ends with its ranks, but for those that nobody has heard yet, which know of no end. Where all are here,
    nothing is left for it to do, and it would take seconds.
    """
    ways = ((signal.SIGTERM, patience_s), (signal.SIGKILL, _GRACE_S))
    for number, grace_s in ((signal.SIGKILL, 0.0),) if is_here else ways:
        deadline_s = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
    process.wait()
