"""A job that a forked process does ahead, while this one goes on; what it finds comes back as a message.

The process begins with all that this one knows, and nothing that it does is seen here but what it returns:
who does a job changes when it is done, never what is found.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

Result = TypeVar("Result")


FORKED_NODES = 1_000  # graphs from so many on are worth a second process, which takes some 0.1 s to begin


def is_worthwhile(nodes: int) -> bool:
    """Tell whether there is a second core, and a job about so many nodes takes longer than its process.

    A process that others began has its core already, and may begin none.
    """
    is_first = not multiprocessing.current_process().daemon
    return is_first and nodes >= FORKED_NODES and len(os.sched_getaffinity(0)) > 1


class Ahead(Generic[Result]):
    """A job of a process of its own, which ends with the block that it is begun for.

    `kind`: the type of what it returns.
    """

    def __init__(self, job: Callable[[], Result], kind: type[Result]) -> None:
        context = multiprocessing.get_context("fork")
        self._job, self._kind = job, kind
        self._here, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_do, args=(there, job), daemon=True)
        self._process.start()
        there.close()

    @property
    def is_done(self) -> bool:
        """Tell whether what was to be found is there, or the process has failed."""
        return self._here.closed or self._here.poll()

    def result(self) -> Result:
        """Return what was found; where the process was killed, or failed, the job is done here."""
        try:
            found = msgspec.msgpack.decode(self._here.recv_bytes(), type=self._kind)
        except EOFError:
            found = self._job()
        self.end()
        return found

    def end(self) -> None:
        """End the process, whether it is done or not."""
        self._process.kill()  # a handler that was forked with it may keep it from being terminated
        self._process.join()
        self._here.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _do(there: Connection, job: Callable[[], object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(Exception):  # whoever wants what was to be found does the job again, and meets the error
        there.send_bytes(msgspec.msgpack.encode(job()))
