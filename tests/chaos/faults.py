"""What is done to a running job, and what must come of it."""

import re
import signal
from dataclasses import dataclass
from typing import Literal

from partc.runtime.supervision.supervisor import HUNG_S

TOLD_WITHIN_S = 5.0


@dataclass(frozen=True)
class Fault:
    """`role`: whose processes are hit, one of them drawn. `told`: a pattern of what the launcher says then;
    NAME is the victim's. `told_in`: its output, or, where others go on, the log.
    """

    name: str
    role: Literal["member", "keeper", "mpiexec", "proxy", "launcher"]
    signal: signal.Signals
    told: str
    within_s: float
    part: str = ""  # of the victim's name: rank, worker, server
    plan: Literal["ranks", "sessions"] = "ranks"
    goes_on: bool = False  # the others train on

    def is_told(self, name: str, text: str) -> bool:
        """Tell whether a text says what it must."""
        return re.search(self.told.replace("NAME", re.escape(name)), text) is not None


_DIED = r"NAME died: signal 9 \(SIGKILL\)"
_HANGS = r"NAME hangs: no sign of life"
_LOST = r"NAME was lost: its keeper died"
_HUNG_WITHIN_S = 2 * HUNG_S

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = (
    Fault("rank killed", "member", KILL, _DIED, TOLD_WITHIN_S, "rank"),
    Fault("rank's keeper killed", "keeper", KILL, _LOST, TOLD_WITHIN_S, "rank"),
    Fault("MPI's proxy killed", "proxy", KILL, "what started the ranks of its host is gone", TOLD_WITHIN_S),
    Fault("mpiexec killed", "mpiexec", KILL, r"mpiexec died: signal 9", TOLD_WITHIN_S),
    Fault("launcher killed", "launcher", KILL, "", TOLD_WITHIN_S),
    Fault("rank stopped", "member", STOP, _HANGS, _HUNG_WITHIN_S, "rank"),
    Fault("rank's keeper stopped", "keeper", STOP, "NAME was lost: not heard for", 15.0, "rank"),
    Fault("SIGINT", "launcher", signal.SIGINT, "stopped by Ctrl-C", TOLD_WITHIN_S),
    Fault("SIGTERM", "launcher", signal.SIGTERM, "stopped by SIGTERM", TOLD_WITHIN_S),
    Fault("SIGHUP", "launcher", signal.SIGHUP, "stopped by SIGHUP", TOLD_WITHIN_S),
    Fault(
        "worker killed",
        "member",
        KILL,
        r"NAME \(.* died: signal 9",
        TOLD_WITHIN_S,
        "worker",
        "sessions",
        True,
    ),
    Fault("worker stopped", "member", STOP, r"NAME \(.* hangs", _HUNG_WITHIN_S, "worker", "sessions", True),
    Fault("server killed", "member", KILL, _DIED, TOLD_WITHIN_S, "server", "sessions"),
    Fault("server stopped", "member", STOP, _HANGS, _HUNG_WITHIN_S, "server", "sessions"),
    Fault("sessions' launcher killed", "launcher", KILL, "", TOLD_WITHIN_S, "", "sessions"),
    Fault(
        "sessions: SIGTERM", "launcher", signal.SIGTERM, "stopped by SIGTERM", TOLD_WITHIN_S, "", "sessions"
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
