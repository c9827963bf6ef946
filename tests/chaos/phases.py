"""In which phase of a step a process of a running job is, and was when it died.

It is read from outside, out of the memory in which a member notes where it is for its keeper
(partc/runtime/supervision/track_memory.py): /proc/PID/map_files gives it to root (proc_pid_map_files(5)).
"""

import mmap
import os
import time
from pathlib import Path

from partc.runtime.supervision.track_memory import SIZE_BYTES, read_note
from tests.checks.job_processes import JobProcess

LOADING, IDLE, SEGMENT = "loading", "idle", "in a segment"
COLLECTIVE, PUSH, CHECKPOINT = "in a collective", "in a push", "in a checkpoint"
PHASES = (LOADING, IDLE, SEGMENT, COLLECTIVE, PUSH, CHECKPOINT)
_ZERO = "/dev/zero (deleted)"  # what the system calls shared memory without a name
_SECONDS = 10.0


class Seen:
    """What a member notes; what it noted last, when it is dead. Use it as long as its memory is wanted."""

    def __init__(self, member: JobProcess, checkpoints: Path) -> None:
        self._memory = _memory_of(member.process)
        self._checkpoints = checkpoints
        self._file = f"{member.name.replace(' ', '-')}.json"  # its last one of a checkpoint
        self._commits = member.name == "rank 0"

    @property
    def note(self) -> tuple[int, str, bool] | None:
        """Its step, place, and whether it awaits others there."""
        return None if self._memory is None else read_note(self._memory)

    @property
    def phase(self) -> str:
        """Return in which phase it is. Its part of a checkpoint is written beside its steps."""
        return CHECKPOINT if self.writes_checkpoint else self.phase_of_step

    @property
    def phase_of_step(self) -> str:
        """The same, and no look at the disk."""
        note = self.note
        if note is None:
            return LOADING
        _, at, _ = note
        if at.startswith("segments/"):
            return SEGMENT
        if at.startswith("communication"):
            return PUSH if "push" in at.lower() else COLLECTIVE
        return CHECKPOINT if "checkpoint" in at else IDLE

    @property
    def writes_checkpoint(self) -> bool:
        """Whether it has begun its part of a checkpoint, and not ended it; the first rank's is the last."""
        parts = list(self._checkpoints.glob(".step-*"))
        return any(self._commits or not (part / self._file).exists() for part in parts)

    def await_phase(self, phase: str, dwell_s: float, tries: int) -> None:
        """Wait until it is in a phase of a step, and still is `dwell_s` later; after some tries, so be it."""
        deadline_s = time.monotonic() + _SECONDS
        for _ in range(tries):
            while self.phase_of_step != phase:
                if time.monotonic() > deadline_s:
                    return
            until_s = time.perf_counter() + dwell_s
            while time.perf_counter() < until_s:
                pass
            if self.phase_of_step == phase:
                return


def _memory_of(process: int) -> mmap.mmap | None:
    """Return the memory that a process notes in; None if there is none, or no leave to see it."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        for line in lines:
            area, _, rest = line.partition(" ")
            first, last = (int(end, 16) for end in area.split("-"))
            if rest.endswith(_ZERO) and last - first == SIZE_BYTES:
                opened = os.open(f"/proc/{process}/map_files/{first:x}-{last:x}", os.O_RDONLY)
                try:
                    return mmap.mmap(opened, SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
                finally:
                    os.close(opened)
    except OSError:
        return None
    return None
