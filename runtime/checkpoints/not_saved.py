"""What is said of checkpoints that cannot be written: before the first step, where that can be seen then."""

import errno
import os
import tempfile
from pathlib import Path

from partc.runtime.errors import NotSaved
from partc.runtime.plan.record import Record

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_ELSEWHERE = "name another folder with --checkpoints"


class Unsaved(Record, frozen=True):
    """The last checkpoint of a training, which could not be written."""

    what: str
    at: str
    fix: str

    def error(self, instead: str = "") -> NotSaved:
        """Return the error. `instead`: where what was trained is."""
        return NotSaved(self.what, at=self.at, fix=self.fix + (f"; {instead}" if instead else ""))


def number_of(fault: Exception | None) -> int:
    """Return the system's number of a fault, 0 of none."""
    return 0 if fault is None else getattr(fault, "errno", None) or errno.EIO


def repair_of(number: int) -> str:
    """Return what to do about a folder into which nothing can be written for that error of the system's."""
    if number in _FULL:
        return f"make room there, or {_ELSEWHERE}"
    if number in _FORBIDDEN:
        return f"let this user write there, or {_ELSEWHERE}"
    return _ELSEWHERE


def probe_folder(folder: Path) -> None:
    """Make the folder of checkpoints, and see that files can be made in it. Raises NotSaved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        number = number_of(error)
        raise NotSaved(
            f"no checkpoint could be written: {os.strerror(number)}", at=str(folder), fix=repair_of(number)
        ) from error
