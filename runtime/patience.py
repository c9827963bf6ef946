"""How a daemon waits: test, yield, then sleep. Never a blocking MPI call.

Ranks may outnumber cores: who waits must leave the core to who computes.
"""

import os
import time

from partc.runtime.errors import RankFailed
from partc.runtime.program import Start

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 500e-6


class Patience:
    """Waits between two tests of one communication."""

    def __init__(self, spin_s: float, deadline_s: float) -> None:
        self._spin_s = spin_s
        self._deadline_s = deadline_s
        self._awaited: Start | None = None
        self._since_s = 0.0
        self._sleep_s = _FIRST_SLEEP_S

    def wait(self, start: Start, rank: int) -> None:
        """Let a moment pass. Raises RankFailed when `start` has been awaited longer than the deadline."""
        now_s = time.monotonic()
        if start is not self._awaited:
            self._awaited, self._since_s, self._sleep_s = start, now_s, _FIRST_SLEEP_S
        waited_s = now_s - self._since_s
        if waited_s < self._spin_s:
            os.sched_yield()
            return
        if waited_s > self._deadline_s:
            raise RankFailed(
                f"nothing came for {waited_s:.0f} s",
                at=f"rank {rank}, communication {start.label or start.kind} ({start.tag_id})",
                fix="look for a rank that hangs or is starved; raise the timeout if steps are this long",
            )
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)


def spin_s_for(local_ranks_threads: int) -> float:
    """Return how long to spin: long where every thread has a core, short where they share."""
    return 5e-3 if local_ranks_threads <= (os.cpu_count() or 1) else 50e-6
