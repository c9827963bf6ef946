"""stdout and stderr that outlast whoever reads them: work is finished, whether somebody looks or not.

    partc run out | head -1     the reader is gone: what it does not read is dropped
    partc run out >&-           nobody was there
    partc run out > /dev/full   an error, once, when all is done; on stderr none, as nobody would read it

Replaced below Python's buffers, so that whatever prints is met: rich, JSON, and the flush at the end.
"""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from partc.runtime.errors import HostLacks

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES = {1: "stdout", 2: "stderr"}


class _StandardStream(io.FileIO):
    """A standard stream of this process; from the first write that fails on, it leads nowhere."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self._was_terminal = self.isatty()
        self.failure: OSError | None = None  # of the first write that failed for another reason

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or drop what nobody reads, or has room for."""
        try:
            return super().write(data)
        except OSError as error:
            _discard(self.fileno())
            is_unread = isinstance(error, BrokenPipeError) or (
                self._was_terminal and error.errno == errno.EIO  # it was closed, with its window
            )
            if not is_unread:
                self.failure = error
            return memoryview(data).nbytes


def flush_stdout() -> None:
    """Write what is left. Raises HostLacks where something could not be written."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if isinstance(raw, _StandardStream) and raw.failure is not None:
        failure, raw.failure = raw.failure, None
        fix = "send it to where there is room, or give -q"
        raise HostLacks(failure.strerror or str(failure), at="standard output", fix=fix) from failure


def outlast_readers() -> None:
    """Let stdout and stderr take all that is written, unless somebody has replaced them."""
    for number in range(3):  # closed, its number would be that of the next file that is opened
        try:
            os.fstat(number)
        except OSError:
            _discard(number)
    for number, name in _NAMES.items():
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _replacement(number, stream))


def _replacement(number: int, stream: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """Return what takes a stream's place; Python has none where it found it closed."""
    raw = _StandardStream(number)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
    stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as `python -u` has it
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _discard(number: int) -> None:
    """Let a file descriptor lead nowhere, in the processes that this one starts, too."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, number)
    os.set_inheritable(number, True)
    if null != number:
        os.close(null)
