"""What a keeper does while its member runs: hear it, look at it, tell the supervisor, and end it when told.

It ends its member, too, when the supervisor is gone or what started the keeper is: nobody then waits for it.
"""

import mmap
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from partc.runtime.jobs.job_folder import remove_left
from partc.runtime.supervision.contact import Contact
from partc.runtime.supervision.janitor import Janitor
from partc.runtime.supervision.messages import (
    ORDER,
    SAID,
    STARTER_GONE,
    Beat,
    Ended,
    Finished,
    MemberFailure,
    Order,
    Position,
    Printed,
    Rendezvous,
    Reported,
    StopRequested,
)
from partc.runtime.supervision.process_state import (
    ProcessState,
    process_state,
    remove_segments,
    shared_segments,
)
from partc.runtime.supervision.track_memory import read_note
from partc.runtime.transports.end_context import end_context
from partc.runtime.transports.locked_sockets import is_refused, lock, read_key

RENDEZVOUS_FILE = "supervisor.json"
_LAST_S = 10.0  # that an end is held back, until the supervisor has heard of it
_DEAF_S = 5.0  # that a killed process may take to go: longer where a disk does not answer
_SEGMENTS_EVERY_S = 2.0
_SOON_S = 0.02
_CHUNK = 1 << 16
_QUEUE = 100  # messages that wait for the supervisor
_OTHERS_S = 1.0  # for keepers beside this one, which MPI kills when it goes


def await_folder(pipe: int) -> Path | None:
    """Return the job's folder, which a member has learned by MPI and writes to `pipe`, a file descriptor.

    None if the member ends without.
    """
    line = b""
    while not line.endswith(b"\n"):
        if not (read := os.read(pipe, 1)):
            return None
        line += read
    return Path(os.fsdecode(line[:-1])) if line.startswith(b"/") else None


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """A member's process, and what it shares with its keeper.

    `heartbeat`, `printed`: pipes on which it says that it lives, and to which it prints.
    `track`: where it is.
    """

    child: int
    heartbeat: int
    printed: int
    track: mmap.mmap


def keep(folder: Path, name: str, process: MemberProcess, janitor: Janitor, stays: bool = False) -> int:
    """Keep a member until its end; return the exit code that tells it.

    `janitor`: tidies up when this process is killed. `stays`: what started it started the launcher, too, and
    ends that when this one goes, before that has said what it has to say.
    """
    rendezvous = msgspec.json.decode((folder / RENDEZVOUS_FILE).read_bytes(), type=Rendezvous)
    member, line = _Member(process, janitor), _Line(folder, name, rendezvous)
    try:
        return _Keeper(member, line, rendezvous.beat_s, stays).watch()
    finally:
        janitor.dismiss()
        line.close()
        if line.is_cut():
            for temporary in rendezvous.folders:
                remove_left(Path(temporary))
            time.sleep(_OTHERS_S)


class _Keeper:
    """Watches one member."""

    def __init__(self, member: "_Member", line: "_Line", beat_s: float, stays: bool) -> None:
        self._member = member
        self._line = line
        self._beat_s = beat_s
        self._stays = stays
        self._parent = os.getppid()
        self._asked = 0  # by a signal of this number
        self._by_keeper = ""
        self._beaten_s = 0.0
        self._host = socket.gethostname()
        is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as nohup has it
        for number in (signal.SIGINT, signal.SIGTERM, *(() if is_detached else (signal.SIGHUP,))):
            signal.signal(number, self._note)

    def watch(self) -> int:
        """Watch until the member has ended."""
        while True:
            order = self._line.receive(_SOON_S if self._member.is_changing else self._beat_s, self._member)
            self._member.listen()
            self._pass_on()
            if order is not None:
                self._obey(order)
            elif self._asked:
                self._line.tell(StopRequested(self._asked))
                self._asked = 0
            elif not self._by_keeper:
                self._by_keeper = self._fence()
            if self._by_keeper:
                self._member.end()
            if (ended := self._member.ended(self._by_keeper)) is not None:
                return self._leave(ended)
            self._tell_beat()

    def _pass_on(self) -> None:
        """Hand on what the member prints, as long as the supervisor takes it: who prints more has to wait."""
        while self._line.has_room() and (text := self._member.read_printed()):
            self._line.tell(Printed(text))

    def _tell_beat(self) -> None:
        now_s = time.monotonic()
        if now_s - self._beaten_s >= self._beat_s / 2:  # not after every line that is printed
            self._beaten_s = now_s
            self._line.tell(self._member.beat(self._host))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = number

    def _obey(self, order: Order) -> None:
        if order.what == "stop":
            self._member.signal(signal.SIGTERM)
        elif order.what == "end":
            self._by_keeper = "as the supervisor asked"

    def _fence(self) -> str:
        """Return why this member must not go on, if it must not."""
        if self._line.is_cut():
            return "the launcher is gone"
        return STARTER_GONE if os.getppid() != self._parent else ""

    def _leave(self, ended: Ended) -> int:
        """Tell how the member ended, and wait to be let go: MPI ends all others when this process goes."""
        if not ended.is_well:
            remove_segments(self._member.segments)
        is_told, deadline_s = False, time.monotonic() + _LAST_S
        while time.monotonic() < deadline_s and (self._stays or not self._line.is_cut()):
            self._pass_on()
            is_told = is_told or self._line.tell(ended)
            order = self._line.receive(self._beat_s, None)
            if order is not None and order.what == "end":
                break
        if ended.code < 0:
            return 128 - ended.code
        return ended.code or int(not ended.has_finished)  # MPI ends all others for whatever is not 0


class _Member:
    """A child process, and the pipes on which it tells where it is, and prints."""

    def __init__(self, process: MemberProcess, janitor: Janitor) -> None:
        self.heartbeat: int | None = process.heartbeat
        self.printed: int | None = process.printed
        self.segments: set[str] = set()
        self._janitor = janitor
        self._child = process.child
        self._track = process.track
        self._told_position = Position()
        self._failure: MemberFailure | None = None
        self._has_finished = False
        self._rest = b""
        self._has_beaten = False
        self._still_s = 0.0
        self._cpu_ticks = -1
        self._looked_s = self._mapped_s = time.monotonic()
        self._killed_s = 0.0
        os.set_blocking(process.heartbeat, False)
        os.set_blocking(process.printed, False)

    def listen(self) -> None:
        """Take in what it has said, and see whether it lives."""
        messages = self._read()
        now_s = time.monotonic()
        # This process may have been held up together with its child: time that nobody watched does not count.
        passed_s = min(now_s - self._looked_s, 1.0)
        self._looked_s = now_s
        state = process_state(self._child)
        moved = state is not None and not state.is_stopped and self._runs(state)
        self._cpu_ticks = -1 if state is None else state.cpu_ticks
        judged = state is not None and (state.is_stopped or (self._has_beaten and self.heartbeat is not None))
        self._still_s = 0.0 if messages or moved or not judged else self._still_s + passed_s
        if self.is_changing or now_s - self._mapped_s > _SEGMENTS_EVERY_S:
            self._note_segments()

    def _runs(self, state: ProcessState) -> bool:
        """Tell whether it has used a core since, or waits for one or a disk: seconds on a busy machine."""
        return state.is_busy or state.cpu_ticks != self._cpu_ticks

    def beat(self, host: str) -> Beat:
        """Return how it is."""
        segments = tuple(sorted(self.segments))
        return Beat(self._child, os.getpid(), host, self._position, self._still_s, segments)

    @property
    def _position(self) -> Position:
        """Where it is now, or was when it died."""
        note, reported = read_note(self._track), self._told_position
        return reported if note is None else Position(*note, reported.device)

    @property
    def is_changing(self) -> bool:
        """Tell whether it is about to begin, when MPI makes segments and removes some, or about to end."""
        return not self._has_beaten or self.heartbeat is None

    def signal(self, number: int) -> None:
        """Send it a signal; it has not been waited for, so its number is its own."""
        self._note_segments()
        os.kill(self._child, number)

    def end(self) -> None:
        """End it and what it started, once."""
        if not self._killed_s:
            self._killed_s = time.monotonic()
            self._note_segments()
            for kill in (os.killpg, os.kill):  # it leads a group as soon as it runs
                try:
                    kill(self._child, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def ended(self, by_keeper: str) -> Ended | None:
        """Return how it ended, None while it runs."""
        child, status, usage = os.wait4(self._child, os.WNOHANG)
        if not child:
            if not self._killed_s or time.monotonic() - self._killed_s < _DEAF_S:
                return None
            status = signal.SIGKILL
        self._read()
        code = os.waitstatus_to_exitcode(status)
        peak_bytes = _peak_bytes(usage)
        failure, has_finished = self._failure, self._has_finished
        return Ended(code, time.time(), self._position, peak_bytes, failure, by_keeper, has_finished)

    def read_printed(self) -> bytes:
        """Return what it has printed since; nothing if that is nothing."""
        if self.printed is None:
            return b""
        try:
            text = os.read(self.printed, _CHUNK)
        except BlockingIOError:
            return b""
        if not text:
            os.close(self.printed)
            self.printed = None
        return text

    def _read(self) -> bool:
        """Take in all whole lines; tell whether there were any."""
        heard = False
        while self.heartbeat is not None:
            try:
                text = os.read(self.heartbeat, _CHUNK)
            except BlockingIOError:
                break
            if not text:
                os.close(self.heartbeat)
                self.heartbeat = None
            *lines, rest = (self._rest + text).split(b"\n")
            self._rest = rest[-_CHUNK:]
            for line in lines:
                heard = self._take(line) or heard
        return heard

    def _note_segments(self) -> None:
        self._mapped_s = time.monotonic()
        self.segments |= shared_segments(self._child)
        self._janitor.note(self.segments)

    def _take(self, line: bytes) -> bool:
        try:
            message = SAID.decode(line)
        except msgspec.MsgspecError:
            return False
        match message:
            case MemberFailure():
                self._failure = message
            case Finished():
                self._has_finished = True
            case Position():
                self._told_position = message
                self._has_beaten = True
        return True


class _Line:
    """The connection to the supervisor."""

    def __init__(self, folder: Path, name: str, rendezvous: Rendezvous) -> None:
        first_life = name.partition(".")[0]  # of an asynchronous worker that is started again
        endpoint = rendezvous.endpoints.get(first_life) or next(iter(rendezvous.endpoints.values()))
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._dealer.set(zmq.ROUTING_ID, name.encode())
        self._dealer.set(zmq.SNDHWM, _QUEUE)
        if (key := read_key(folder)) is not None:
            lock(self._dealer, key, is_server=False)
            self._dealer.set(zmq.HEARTBEAT_IVL, 5_000)
            self._dealer.set(zmq.HEARTBEAT_TIMEOUT, 20_000)
            self._dealer.set(zmq.CONNECT_TIMEOUT, 5_000)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._dealer.get_monitor_socket(events)
        self._dealer.connect(endpoint)
        self._endpoint = endpoint
        self._contact = Contact(rendezvous.patience_s, time.monotonic())
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def tell(self, report: Reported) -> bool:
        """Send to the supervisor, now or when there is a connection again; tell whether there was room."""
        try:
            self._dealer.send(msgspec.msgpack.encode(report), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def has_room(self) -> bool:
        """Tell whether the supervisor takes more."""
        return bool(self._dealer.poll(0, zmq.POLLOUT))

    def receive(self, timeout_s: float, member: "_Member | None") -> Order | None:
        """Return the next order; None if none comes in time, or the member has said something."""
        pipes = [] if member is None else [member.heartbeat, *([member.printed] if self.has_room() else [])]
        watched = [pipe for pipe in pipes if pipe is not None]
        for pipe in watched:
            self._poller.register(pipe, zmq.POLLIN)
        ready = dict(self._poller.poll(round(timeout_s * 1e3)))
        for pipe in watched:
            self._poller.unregister(pipe)
        if self._monitor in ready:
            self._note_connection()
        if self._dealer not in ready:
            return None
        try:
            return ORDER.decode(self._dealer.recv(zmq.NOBLOCK))
        except (zmq.Again, msgspec.MsgspecError):
            return None

    def is_cut(self) -> bool:
        """Tell whether the launcher is gone, or has been out of reach for too long."""
        return self._contact.is_lost(time.monotonic(), partial(is_refused, self._endpoint))

    def close(self) -> None:
        """Close, once what was said last has left."""
        self._dealer.disable_monitor()
        end_context(self._context, linger_ms=500)

    def _note_connection(self) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._contact.begins()
            else:
                self._contact.ends(time.monotonic())


def _peak_bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
