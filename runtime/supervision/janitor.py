"""Removes MPI's shared memory when a keeper is killed together with its rank: no one else on its host might.

It notes that in the job's folder, too. When the notes were made tells who was killed first, and a keeper that
nobody had heard yet is missed by nobody else.

MPI's proxy kills all that it has started when it loses its mpiexec: this process is in a session of its own.
It loads nothing, holds nothing but a pipe from its keeper, and ends when that does.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from partc.runtime.supervision.process_state import name_process, remove_segments

JANITOR = "partc-janitor"  # what the system calls it
_LOST = "lost-keeper."  # and the member's name: a file
_DISMISSED = "-"  # in place of a segment's name: the keeper ends by itself


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
            with suppress(OSError):
                os.write(self.pipe, f"{_DISMISSED}\n".encode())
            os.close(self.pipe)
            os.waitpid(self._process, 0)
            self.pipe = None


def lost_keepers(folder: Path) -> list[str]:
    """Return whose keepers were killed, as janitors noted it in the job's folder; who was so first, first."""
    notes: list[tuple[int, str]] = []
    for note in folder.glob(f"{_LOST}*"):
        with suppress(OSError):
            notes.append((note.stat().st_mtime_ns, note.name.removeprefix(_LOST)))
    return [name for _, name in sorted(notes)]


def begin_janitor(folder: Path, name: str) -> Janitor:
    """Start one, as long as little is loaded. `folder`: the job's; `name`: the member's."""
    if sys.platform != "linux":
        return Janitor(None, 0)
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(write_end)
        with suppress(BaseException):
            _wait_and_tidy(read_end, folder / f"{_LOST}{name}")
        os._exit(0)
    os.close(read_end)
    return Janitor(write_end, process)


def _wait_and_tidy(heard: int, note: Path) -> None:
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
    words = names.decode(errors="replace").split()
    if _DISMISSED not in words:
        with suppress(OSError):  # a job that is over has no folder
            note.touch()
    remove_segments(words)
