"""metrics.jsonl: a line of every step, appended while a training goes on.

    {"step":1,"loss":2.5649,"s":0.0456,"training":"9f86d081884c7d65"}
    {"step":2,"loss":2.3026,"s":0.0123}

`s` are the seconds since the step before ended. A run's first line tells which training it is. A run that
goes on from a checkpoint takes away what is behind it, and all lines of another training. Lines are written
at once: a killed run has those of all steps before its last checkpoint. Where they cannot be written any more
(a full disk), that is told once, and training goes on without them.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path

import msgspec

from partc.runtime.plan.record import Record

METRICS_FILE = "metrics.jsonl"


class StepMetrics(Record, frozen=True, omit_defaults=True):
    """A step's line."""

    step: int
    loss: float | None  # JSON has no NaN and no infinity: null
    s: float
    training: str = ""  # of this line and those behind it, up to one that tells another


_LINE = msgspec.json.Decoder(StepMetrics)


class MetricsLog:
    """Appends a line for each step behind those of a training up to step `after`, of which there may be some.

    A training that fails before its first step's end leaves the file as it was. `tell`: takes why there are
    no more lines.
    """

    def __init__(self, path: Path, after: int, training: str, tell: Callable[[str], None]) -> None:
        self._path = path
        self._after = after
        self._training = training
        self._tell = tell
        self._is_given_up = False
        self._stream: FileIO | None = None
        self._ended_s = time.monotonic()

    def append(self, step: int, loss: float | None) -> None:
        """Write what a step came to."""
        if self._is_given_up:
            return
        now_s = time.monotonic()
        training = self._training if self._stream is None else ""
        line = StepMetrics(step, loss, round(now_s - self._ended_s, 6), training)
        self._ended_s = now_s
        try:
            if self._stream is None:
                _keep_lines(self._path, self._after, self._training)
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


def _keep_lines(path: Path, after: int, training: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w") as part_file:
            if after and path.exists():
                with path.open() as lines:
                    part_file.writelines(_lines_of(lines, after, training))
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


def _lines_of(lines: Iterable[str], after: int, training: str) -> Iterator[str]:
    """Yield those of a training, up to a step."""
    current = ""
    for line in lines:
        try:
            metrics = _LINE.decode(line)
        except msgspec.MsgspecError:  # cut off by the end of its writer
            continue
        current = metrics.training or current
        if current == training and metrics.step <= after:
            yield line
