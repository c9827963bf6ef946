"""Keepers of this machine that have not been heard yet, as the system tells of them.

One that is killed while it loads can say nothing, and MPI signals all others then: processes alone tell whose
end came first. Linux tells by /proc; elsewhere nobody is seen.
"""

import os
from collections.abc import Collection
from pathlib import Path

from partc.runtime.supervision.keeper import RANKS
from partc.runtime.supervision.process_state import is_running, process_state


class StartedKeepers:
    """The processes that one process, an mpiexec of this machine, has started."""

    def __init__(self, starter: int) -> None:
        self._starter = starter
        self._seen: dict[str, int] = {}  # rank 0 -> its keeper's process

    def ended(self, unheard: Collection[str]) -> list[str]:
        """Return whose keepers were there and are no more, of those who have not been heard."""
        self._look_for(unheard)
        return [name for name in unheard if name in self._seen and not is_running(self._seen[name])]

    def stopped(self, unheard: Collection[str]) -> list[str]:
        """Return whose keepers were stopped by a signal, of those who have not been heard."""
        self._look_for(unheard)
        return [name for name in unheard if name in self._seen and _is_stopped(self._seen[name])]

    def _look_for(self, unheard: Collection[str]) -> None:
        if not set(unheard) <= self._seen.keys():
            self._look()

    def _look(self) -> None:
        for folder in Path("/proc").glob("[0-9]*"):
            process = int(folder.name)
            if process in self._seen.values() or _parent(folder) != self._starter:
                continue
            if (name := _rank_name(folder)) is not None:
                self._seen[name] = process


def _is_stopped(process: int) -> bool:
    state = process_state(process)
    return state is not None and state.is_stopped


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _rank_name(folder: Path) -> str | None:
    """Return as which rank MPI has started a process; None where it was not, or is no program yet."""
    try:
        words = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    environment = dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)
    number = next((environment[name] for name in RANKS if name in environment), None)
    return None if number is None else f"rank {number}"
