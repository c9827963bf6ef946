"""What is done to a running job, and what must come of it."""

import re
import signal
from dataclasses import dataclass
from typing import Literal

from partc.runtime.supervision.supervisor import HUNG_S

TOLD_WITHIN_S = 5.0


@dataclass(frozen=True)
class Fault:
    """`role`: whose processes are hit, `victims` of them drawn. `told`: a pattern of what the launcher says
    then; NAME is a victim's. It says so in its output, or, where the others go on, in the log.

    `then`: it resumes, by itself unless the launcher was hit, and ends with the bits of an uninterrupted run;
    the others train on; or all end. `again`: once more while it recovers. `with_keeper`: the keeper, too.
    """

    name: str
    weight: int  # how many of 270 cases
    role: Literal["member", "keeper", "mpiexec", "proxy", "launcher"]
    signal: signal.Signals
    told: str
    part: str = "rank"  # of the victim's name: rank, worker, server
    bench: Literal["AllReduce", "servers", "sessions"] = "AllReduce"
    then: Literal["resumes", "goes on", "ends"] = "resumes"
    within_s: float = TOLD_WITHIN_S
    victims: int = 1
    again: bool = False
    with_keeper: bool = False
    is_hydras: bool = False  # the mpiexec of many machines is to be used for one

    @property
    def row(self) -> str:
        """Which row of the proof it belongs to."""
        if self.victims > 1 or self.again:
            return "two at once; a fault during recovery"
        if self.bench == "sessions":
            return "asynchronous"
        return {KILL: "killed", STOP: "hung"}.get(self.signal, "asked to stop")

    @property
    def hits_launcher(self) -> bool:
        """Whether it is the launcher that is hit."""
        return self.role == "launcher"

    @property
    def tells_place(self) -> bool:
        """Whether one process is killed alone, and its keeper tells where."""
        is_alone = self.role == "member" and self.victims == 1 and not self.again
        return is_alone and self.signal == KILL and self.then != "goes on"

    def is_told(self, names: list[str], text: str) -> bool:
        """Tell whether a text says what it must, of one of these."""
        patterns = (self.told.replace("NAME", re.escape(name)) for name in names)
        return any(re.search(pattern, text) for pattern in patterns)


_DIED = r"NAME died: signal 9 \(SIGKILL\)"
_HANGS = r"NAME hangs: no sign of life"
_LOST = r"NAME was lost: its keeper died"
_SILENT = "NAME was lost: not heard for"
_PROXY = "what started the ranks of its host is gone"
_HUNG_WITHIN_S = 2 * HUNG_S
_SILENT_WITHIN_S = 15.0

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
FAULTS = (
    Fault("rank killed", 60, "member", KILL, _DIED),
    Fault("rank killed, with servers", 20, "member", KILL, _DIED, bench="servers"),
    Fault("rank's keeper killed", 20, "keeper", KILL, _LOST),
    Fault("MPI's proxy killed", 10, "proxy", KILL, _PROXY, part="", is_hydras=True),
    Fault("mpiexec killed", 15, "mpiexec", KILL, r"mpiexec died: signal 9", part=""),
    Fault("launcher killed", 15, "launcher", KILL, ""),
    Fault("two ranks killed", 10, "member", KILL, _DIED, victims=2),
    Fault("rank killed, and another during recovery", 10, "member", KILL, _DIED, again=True),
    Fault("rank stopped", 25, "member", STOP, _HANGS, within_s=_HUNG_WITHIN_S),
    Fault("rank's keeper stopped", 7, "keeper", STOP, _SILENT, within_s=_SILENT_WITHIN_S),
    Fault(
        "rank and its keeper stopped",
        6,
        "member",
        STOP,
        _SILENT,
        within_s=_SILENT_WITHIN_S,
        with_keeper=True,
    ),
    Fault("SIGINT", 5, "launcher", INT, "stopped by Ctrl-C"),
    Fault("SIGTERM", 5, "launcher", TERM, "stopped by SIGTERM"),
    Fault("SIGHUP", 5, "launcher", HUP, "stopped by SIGHUP"),
    Fault(
        "worker killed",
        20,
        "member",
        KILL,
        r"NAME \(.* died: signal 9",
        part="worker",
        bench="sessions",
        then="goes on",
    ),
    Fault(
        "worker stopped",
        6,
        "member",
        STOP,
        r"NAME \(.* hangs",
        part="worker",
        bench="sessions",
        then="goes on",
        within_s=_HUNG_WITHIN_S,
    ),
    Fault("server killed", 12, "member", KILL, _DIED, part="server", bench="sessions", then="ends"),
    Fault(
        "server stopped",
        6,
        "member",
        STOP,
        _HANGS,
        part="server",
        bench="sessions",
        then="ends",
        within_s=_HUNG_WITHIN_S,
    ),
    Fault("sessions' launcher killed", 8, "launcher", KILL, "", bench="sessions", then="ends"),
    Fault("sessions: SIGTERM", 5, "launcher", TERM, "stopped by SIGTERM", bench="sessions", then="ends"),
)
