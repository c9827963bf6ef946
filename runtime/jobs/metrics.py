"""metrics.jsonl: a line of every step, appended while a training goes on.

    {"step":1200,"loss":2.3026,"s":0.0123}

`s` are the seconds since the step before ended. A run that goes on from a checkpoint takes away what is
behind it. Lines are written at once: a killed run has those of all steps before its last checkpoint. Where
they cannot be written any more (a full disk), that is told once, and training goes on without them.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import msgspec

from partc.runtime.plan.record import Record

METRICS_FILE = "metrics.jsonl"


class StepMetrics(Record, frozen=True):
    """A step's line."""

    step: int
    loss: float | None  # JSON has no NaN and no infinity: null
    s: float


_LINE = msgspec.json.Decoder(StepMetrics)


class MetricsLog:
    """Appends a line for each step behind those up to step `after`, of which there may be some.

    A training that fails before its first step's end leaves the file as it was. `tell`: takes why there are
    no more lines.
    """

    def __init__(self, path: Path, after: int, tell: Callable[[str], None]) -> None:
        self._path = path
        self._after = after
        self._tell = tell
        self._is_given_up = False
        self._stream: FileIO | None = None
        self._ended_s = time.monotonic()

    def append(self, step: int, loss: float | None) -> None:
        """Write what a step came to."""
        if self._is_given_up:
            return
        now_s = time.monotonic()
        line = StepMetrics(step, loss, round(now_s - self._ended_s, 6))
        self._ended_s = now_s
        try:
            if self._stream is None:
                _keep_lines(self._path, self._after)
                self._stream = FileIO(self._path, "a")
            _write_line(self._stream, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            self._is_given_up = True
            self._tell(f"{self._path} has no lines from step {step} on: {error.strerror}; training goes on")

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()


def _write_line(stream: FileIO, line: bytes) -> None:
    """Write a line at once. Raises OSError, also where the disk had room for a part of it."""
    if stream.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _keep_lines(path: Path, after: int) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w") as part_file:
            if after and path.exists():
                with path.open() as lines:
                    part_file.writelines(line for line in lines if _step_of(line) <= after)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_metrics(path: Path) -> Iterator[StepMetrics]:
    """Yield the lines that were written whole."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield _LINE.decode(line)


def _step_of(line: str) -> float:
    try:
        return _LINE.decode(line).step
    except msgspec.MsgspecError:  # cut off by the end of its writer
        return float("inf")
