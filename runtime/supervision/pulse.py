"""A member's side of its keeper: where it is, a few times a second, and why it stops.

A thread of its own tells: calls that give Python's lock away (onnxruntime's, MPI's) do not hold it up,
however long. Without a keeper nothing is told.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from partc.runtime.errors import PartcError, RankFailed
from partc.runtime.log import printable
from partc.runtime.supervision.messages import Finished, MemberFailure, Position, Said
from partc.runtime.supervision.process_state import PULSE

BEAT_S = 0.25
_ENCODER = msgspec.json.Encoder()


class Pulse:
    """What one member tells. `pipe`: to its keeper; None where it has none."""

    def __init__(self, pipe: int | None) -> None:
        self._pipe = pipe
        self._ended = threading.Event()
        self._telling = threading.Lock()

    @classmethod
    def of_process(cls) -> "Pulse":
        """Return this process's, once: what it starts is no member."""
        pipe = os.environ.pop(PULSE, None)
        return cls(None if pipe is None else int(pipe))

    @property
    def is_kept(self) -> bool:
        """Tell whether a keeper sees to what follows from this process's end."""
        return self._pipe is not None

    def follow(self, position: Callable[[], Position]) -> None:
        """Tell where this member is from now on."""
        if self._pipe is not None:
            threading.Thread(target=self._beat, args=(position,), daemon=True, name="pulse").start()

    def end(self) -> None:
        """Tell that training is over, the last word: this process ends by itself."""
        self._ended.set()
        self._tell(Finished())
        with self._telling:
            if self._pipe is not None:
                os.close(self._pipe)
                self._pipe = None

    def fail(self, failure: MemberFailure) -> None:
        """Tell why this member stops, and stop it, if it has a keeper."""
        print(f"{failure.what}\n  at:  {failure.at}", file=sys.stderr, flush=True)
        if self._pipe is None:
            return
        self._ended.set()
        self._tell(failure)
        sys.stdout.flush()
        os._exit(1)  # not by way of MPI, which would wait for the others

    def _beat(self, position: Callable[[], Position]) -> None:
        while not self._ended.wait(BEAT_S):
            self._tell(position())

    def _tell(self, message: Said) -> None:
        with self._telling:
            try:
                if self._pipe is not None:
                    os.write(self._pipe, _ENCODER.encode(message) + b"\n")
            except BrokenPipeError:  # where the system does not end orphans
                os.kill(os.getpid(), signal.SIGKILL)


def failure_of(error: BaseException, at: str) -> MemberFailure:
    """Return what a member leaves behind when it stops; `at` is where it was. The log has what raised it."""
    kind = type(error)
    if not isinstance(error, PartcError):
        traceback.print_exception(error)
        error = _rank_failed(error, at)
    elif error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    is_echo = kind.__module__.startswith("mpi4py")
    what, at, fix = (printable(text) for text in (error.what, error.at, error.fix))  # JSON wants UTF-8
    return MemberFailure(time.time(), type(error).__name__, what, at, fix, is_echo)


def _rank_failed(error: BaseException, at: str) -> RankFailed:
    if isinstance(error, OSError) and error.filename is not None:
        fix = "give it files that it can read and write, on a disk that has room"
        return RankFailed(f"{error.strerror}: {error.filename}", at=at, fix=fix)
    return RankFailed(f"{type(error).__name__}: {error}", at=at, fix="see run.log in the plan's folder")
