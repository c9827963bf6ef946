"""The launcher's side: hears all keepers of a job, tells them what to do, and knows who is in trouble.

Nobody else is heard: transports/locked_sockets.py.
"""

import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from partc.runtime.errors import naming_file
from partc.runtime.supervision.keeping import RENDEZVOUS_FILE
from partc.runtime.supervision.messages import (
    REPORTED,
    Beat,
    Ended,
    Order,
    Printed,
    Rendezvous,
    StopRequested,
)
from partc.runtime.supervision.process_state import is_running, process_state, ran_ns, remove_segments
from partc.runtime.supervision.roster import Limits, Roster
from partc.runtime.supervision.tcp_answers import Connection
from partc.runtime.transports.end_context import end_context
from partc.runtime.transports.locked_sockets import (
    LOCAL,
    is_one_machine,
    lock,
    own_address,
    own_key,
    socket_folder,
)

HUNG_S = 5.0
_BEATS_PER_S = 2_000  # of all keepers together
_BEAT_S = 0.25
_HERE_S, _AWAY_S = 0.5, 90.0  # a keeper's patience: a cut cable may come back, a socket file does not
_GONE_HERE_S, _GONE_AWAY_S = 1.0, 3.0
_SILENT_HERE_S = 10.0
_DEAF_S = 15.0  # TCP may repeat what a cut link lost 12.8 s after the link is there again
_CLOCK_S = 0.1  # that the system's clock for acknowledgements may be coarse
_ASK_S = 1.0  # between two questions whether a silent one's host answers
_SUSPICION_S = 3.0
_LARGEST_BYTES = 1 << 20
_LEAVE_S = 3.0
_SURE_S = 2.0
_LONGEST_LINE = 1 << 16
_AT_ONCE = 1_000  # messages


class Supervisor:
    """Watches over the members of one job.

    `hosts`: member -> host; `addresses`: host -> network name. `folder`: the job's, which all hosts see.
    `stuck_s`: how long nobody may get on. `folders`: the
    job's other temporary ones, which keepers remove if the launcher is killed. Use it in a `with`.
    """

    def __init__(
        self,
        hosts: Mapping[str, str],
        addresses: Mapping[str, str],
        folder: Path,
        stuck_s: float | None,
        folders: Sequence[Path] = (),
        hung_s: float = HUNG_S,
    ) -> None:
        here = is_one_machine({host: addresses.get(host, LOCAL) for host in hosts.values()})
        silent_s, gone_s = (_SILENT_HERE_S, _GONE_HERE_S) if here else (_AWAY_S, _GONE_AWAY_S)
        self.roster = Roster(hosts, Limits(hung_s, hung_s, silent_s, _DEAF_S, gone_s, stuck_s))
        self._connections: dict[str, Connection] = {}
        self._silent_asked_s: dict[str, float] = {}
        self._ran_ns: dict[str, int] = {}  # by keepers that were not heard
        self._asked = 0
        self._asked_s = 0.0
        self._suspicious_until_s = 0.0
        self._lines: list[tuple[str, str]] = []
        self._rest: dict[str, bytes] = defaultdict(bytes)  # of a line that is not whole yet
        self._at_the_end = ExitStack()
        self._sockets = self._at_the_end.enter_context(socket_folder())
        self._context = zmq.Context()
        self._at_the_end.callback(end_context, self._context, linger_ms=200)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        self._router.set(zmq.MAXMSGSIZE, _LARGEST_BYTES)
        self._router.set(zmq.SNDHWM, 0)
        endpoints = self._listen_here(hosts) if here else self._listen(hosts, addresses, folder)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._at_the_end.callback(self._router.disable_monitor)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        beat_s = max(_BEAT_S, len(hosts) / _BEATS_PER_S)
        temporary = tuple(str(path.absolute()) for path in (folder, self._sockets, *folders))
        rendezvous = Rendezvous(endpoints, beat_s, _HERE_S if here else _AWAY_S, temporary)
        with naming_file(folder / RENDEZVOUS_FILE):
            (folder / RENDEZVOUS_FILE).write_bytes(msgspec.json.encode(rendezvous))

    def watch(self, timeout_s: float) -> None:
        """Hear what has come; wait for the first for `timeout_s`."""
        ready = dict(self._poller.poll(round(timeout_s * 1e3)))
        self.roster.pass_time(time.monotonic())
        if self._monitor in ready:
            while self._monitor.poll(0):
                recv_monitor_message(self._monitor)
            self._suspicious_until_s = time.monotonic() + _SUSPICION_S
        if time.monotonic() < self._suspicious_until_s:
            self.roster.miss(name for name in self.roster.living() if not self._send(name, Order("go_on")))
        for _ in range(_AT_ONCE):
            if not self._hear():
                break
        self._ask_the_silent()

    @property
    def asked_by_host(self) -> int:
        """The signal by which a batch system wants an end, 0 if none does.

        MPI signals, too, when a keeper has died: that is known before this tells, unless somebody who has not
        been heard yet is the one.
        """
        if self._asked == signal.SIGINT and self.roster.unheard():
            return 0
        return self._asked if time.monotonic() - self._asked_s > _SURE_S else 0

    def order(self, what: Literal["stop", "end"], names: Collection[str] | None = None) -> None:
        """Have members, all that live if none are named, stop well, or end; keepers of the dead leave."""
        for name in self.roster.living() if names is None else names:
            self._send(name, Order(what))

    def take_lines(self) -> list[tuple[str, str]]:
        """Return what members have printed since, line by line: (member, line)."""
        lines, self._lines = self._lines, []
        return lines

    def end(self, only: Collection[str] | None = None) -> None:
        """End whoever still runs, and wait until nobody of this machine does.

        `only`: whose keepers may go; what has started the others would end this process when they do.
        """
        self.order("end")
        deadline_s = time.monotonic() + _LEAVE_S
        while any(map(self._may_answer, self.roster.living())) and time.monotonic() < deadline_s:
            self.watch(0.02)
        if only is not None:
            self.order("end", only)
            return
        # Not before all have ended: MPI kills keepers when one leaves, and they have something to tidy up.
        self.order("end", self.roster.ended())
        here = [beat for beat in self.roster.beats() if _is_here(beat)]
        processes = [process for beat in here for process in (beat.keeper, beat.process)]
        _kill(filter(_is_stopped, processes))
        deadline_s = time.monotonic() + _LEAVE_S
        while any(map(is_running, processes)) and time.monotonic() < deadline_s:
            self.watch(0.02)
        _kill(filter(is_running, processes))
        if not all(ended.is_well for ended in self.roster.ended().values()) or self.roster.living():
            remove_segments({name for beat in here for name in beat.segments})

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._at_the_end.close()

    def _listen_here(self, hosts: Mapping[str, str]) -> dict[str, str]:
        endpoint = f"ipc://{self._sockets}/supervisor"
        self._router.bind(endpoint)
        return dict.fromkeys(hosts, endpoint)

    def _listen(self, hosts: Mapping[str, str], addresses: Mapping[str, str], folder: Path) -> dict[str, str]:
        lock(self._router, own_key(folder), is_server=True)
        own = {host: own_address(addresses.get(host, LOCAL)) for host in set(hosts.values())}
        endpoints: dict[str, str] = {}
        for address in set(own.values()):
            self._router.bind(f"tcp://{address}:*")
            endpoints[address] = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return {member: endpoints[own[host]] for member, host in hosts.items()}

    def _may_answer(self, name: str) -> bool:
        beat = self.roster.beat(name)
        if beat is None or not _is_here(beat):
            return self.roster.may_answer(name)
        return is_running(beat.keeper) and not _is_stopped(beat.keeper)

    def _ask_the_silent(self) -> None:
        """See whether those that are not heard run, or at least their hosts acknowledge what is sent."""
        silent, now_s = self.roster.quiet(), time.monotonic()
        if not silent:
            self._silent_asked_s = {}
        if not silent or now_s < max(self._silent_asked_s.values(), default=0.0) + _ASK_S:
            return
        for name in filter(self._runs_here, silent):
            self.roster.see(name)
        self.roster.acknowledge([name for name in silent if self._has_acknowledged(name, now_s)])
        self._silent_asked_s = dict.fromkeys(silent, now_s)
        for name in silent:
            self._send(name, Order("go_on"))

    def _has_acknowledged(self, name: str, now_s: float) -> bool:
        """Tell whether the host of a silent keeper has acknowledged what was sent to it last."""
        connection, asked_s = self._connections.get(name), self._silent_asked_s.get(name)
        if connection is None or asked_s is None:
            return False
        return connection.acknowledged_s() < now_s - asked_s + _CLOCK_S

    def _send(self, name: str, order: Order) -> bool:
        """Tell a keeper; return whether it can be reached."""
        try:
            self._router.send_multipart([name.encode(), msgspec.msgpack.encode(order)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _runs_here(self, name: str) -> bool:
        """Tell whether a keeper of this machine has run since it was last asked, or waits to."""
        beat = self.roster.beat(name)
        state = None if beat is None or not _is_here(beat) else process_state(beat.keeper)
        if beat is None or state is None or state.is_stopped:
            return False
        before, self._ran_ns[name] = self._ran_ns.get(name), ran_ns(beat.keeper)
        return state.is_busy or before not in (None, self._ran_ns[name])

    def _hear(self) -> bool:
        try:
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            reported = REPORTED.decode(frames[0].bytes)
        except zmq.Again:
            return False
        except (msgspec.MsgspecError, IndexError):
            return True
        name = identity.bytes.decode(errors="replace")
        if not self.roster.knows(name):
            return True
        if (connection := Connection.of(frames[0])) is not None:
            self._connections[name] = connection
        match reported:
            case Beat():
                self.roster.hear_beat(name, reported)
            case Ended():
                self.roster.hear_end(name, reported)
                if reported.is_well:
                    self.order("end", [name])
            case Printed(text=text):
                *whole, self._rest[name] = (self._rest[name] + text).split(b"\n")
                self._lines += [(name, line.decode(errors="replace")) for line in whole]
                self._rest[name] = self._rest[name][-_LONGEST_LINE:]
            case StopRequested(signal=number):
                if not self._asked:
                    self._asked, self._asked_s = number, time.monotonic()
        return True


def _is_here(beat: Beat) -> bool:
    return beat.host == socket.gethostname()


def _is_stopped(process: int) -> bool:
    state = process_state(process)
    return state is not None and state.is_stopped


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
