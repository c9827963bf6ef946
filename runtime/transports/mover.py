"""A thread that moves communications on while its process computes.

MPI moves long messages only when it is called, and a segment may take seconds: 12.6 MB between two hosts at
1 Gbit/s and 100 ms of computing took 207 ms, where the wire needs 107 (docs/decisions/012).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PAUSE_S = 1e-3  # between two looks; computing that is over sooner is not disturbed


class Mover:
    """Calls `move` every now and then, on a thread of its own, while the caller is within `beside`.

    `move` is never called on two threads at once if the caller, too, holds `lock` when it calls it.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._move = move
        self._computing = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Move on while the body computes. Raises what `move` raised meanwhile."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
            self._thread.start()
        self._computing.set()
        try:
            yield
        finally:
            self._computing.clear()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while self._failure is None:
            self._computing.wait()
            time.sleep(_PAUSE_S)
            with self.lock:
                if not self._computing.is_set():
                    continue
                try:
                    self._move()
                except Exception as error:  # the thread that computes raises it
                    self._failure = error
