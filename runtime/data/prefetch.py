"""Read the next step's data while a step is computed."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from partc.runtime.data.feeds import Shares
from partc.runtime.data.not_finite import Index
from partc.runtime.plan.program import Rank
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]


class Prefetched:
    """One rank's shares of a source, each read one step ahead by a thread. Steps must come in order.

    `last`: the step behind which nothing is read. `waited_s`: for how long training stood still for data.
    """

    def __init__(self, source: Shares, last: int) -> None:
        self._source = source
        self._last = last
        self._reader = ThreadPoolExecutor(1, "data")
        self._ahead: tuple[int, Future[dict[str, Array]]] | None = None
        self.waited_s = 0.0

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed. Raises what the source raises, in the step that it is about."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = step, self._reader.submit(self._source.share, rank, step)
        begun_s = time.monotonic()
        fed = self._ahead[1].result()
        self.waited_s += time.monotonic() - begun_s
        self._ahead = None
        if step < self._last:
            self._ahead = step + 1, self._reader.submit(self._source.share, rank, step + 1)
        return fed

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say where the user finds an element."""
        return self._source.place(rank, step, data_input, index)

    def close(self) -> None:
        """End the thread; what it reads is not waited for."""
        self._reader.shutdown(wait=False, cancel_futures=True)
