"""Removes MPI's shared memory when a keeper is killed together with its rank: no one else on its host might.

MPI's proxy kills all that it has started when it loses its mpiexec: this process is in a session of its own.
It loads nothing, holds nothing but a pipe from its keeper, and ends when that does.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

from partc.runtime.supervision.process_state import name_process, remove_segments

JANITOR = "partc-janitor"  # what the system calls it


class Janitor:
    """The keeper's side of it. `pipe`: takes names; None where there is no janitor, process `process`."""

    def __init__(self, pipe: int | None, process: int) -> None:
        self.pipe = pipe
        self._process = process
        self._told: set[str] = set()

    def note(self, segments: Iterable[str]) -> None:
        """Let it know of shared memory that is to go with this keeper."""
        new = sorted(set(segments) - self._told)
        if self.pipe is not None and new:
            self._told.update(new)
            with suppress(OSError):  # somebody has killed it
                os.write(self.pipe, "".join(f"{name}\n" for name in new).encode())

    def dismiss(self) -> None:
        """Let it tidy up, and wait until it has."""
        if self.pipe is not None:
            os.close(self.pipe)
            os.waitpid(self._process, 0)
            self.pipe = None


def begin_janitor() -> Janitor:
    """Start one, as long as little is loaded."""
    if sys.platform != "linux":
        return Janitor(None, 0)
    heard, told = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(told)
        with suppress(BaseException):
            _wait_and_tidy(heard)
        os._exit(0)
    os.close(heard)
    return Janitor(told, process)


def _wait_and_tidy(heard: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name_process(JANITOR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor != heard:
            with suppress(OSError):  # the listing's own
                os.close(descriptor)
    names = b""
    while piece := os.read(heard, 1 << 16):
        names += piece
    remove_segments(names.decode(errors="replace").split())
