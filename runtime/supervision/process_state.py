"""What the system tells of another process of this machine, and what it does for one.

Linux tells by /proc (proc_pid_stat(5), proc_pid_maps(5)); elsewhere nothing is known, and so nobody hangs.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PULSE = "PARTC_PULSE"  # environment variable: the descriptor of a member's pipe to its keeper
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_SHARED = Path("/dev/shm")
# What MPI libraries name their segments: MPICH, Open MPI, UCX. Others' files there are none of ours.
_SEGMENTS = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """`is_stopped`: by a signal, not by a debugger. `cpu_ticks`: used so far.

    `is_busy`: its first thread runs, or waits for a core, a disk or what else cannot be interrupted.
    """

    is_stopped: bool
    cpu_ticks: int
    is_busy: bool = False


def process_state(process: int) -> ProcessState | None:
    """Return how a process is, None if nobody can tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessState(fields[0] == b"T", int(fields[11]) + int(fields[12]), fields[0] in (b"R", b"D"))


def ran_ns(process: int) -> int:
    """Return for how many nanoseconds a process's first thread has run so far, 0 if nobody can tell."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_bytes().split()[0])
    except (OSError, IndexError):
        return 0


def is_running(process: int) -> bool:
    """Tell whether a process of this machine is there, zombies left out."""
    try:
        os.kill(process, 0)
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's, or no /proc
        return True
    return fields[0] != b"Z"


def shared_segments(process: int) -> set[str]:
    """Return the names of MPI's shared memory that a process maps."""
    try:
        lines = Path(f"/proc/{process}/maps").read_bytes().splitlines()
    except OSError:
        return set()
    inside = bytes(_SHARED) + b"/"
    mapped = {line.partition(inside)[2].decode(errors="replace") for line in lines if inside in line}
    return {name for name in mapped if name.startswith(_SEGMENTS) and not name.endswith(" (deleted)")}


def remove_segments(names: Iterable[str]) -> None:
    """Remove shared memory of a job that is dead: who still maps it keeps it."""
    for name in names:
        if name.startswith(_SEGMENTS) and "/" not in name:
            try:
                (_SHARED / name).unlink(missing_ok=True)
            except OSError:  # somebody else's
                continue


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent dies, however that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)


def name_process(name: str) -> None:
    """Let the system call this process so, in at most 15 letters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
