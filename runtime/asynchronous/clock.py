"""Bounded staleness: who may start which step.

    step t of worker w may start  <=>  every live worker has finished step t - S - 1

A step is finished when every server has applied what it pushes. So whoever computes step t sees all
updates of all live workers up to step t - S - 1, and perhaps newer ones. S = 0: rounds. A worker that comes
back is behind the others, who wait for it from then on.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS 2013, section 3. There a clock may also be older than what is read; here, too.
"""

from collections.abc import Sequence

Grants = list[tuple[int, int]]  # (worker, step)


class Clock:
    """Answers questions for steps as the slowest live worker advances.

    `steps`: the step that each worker has finished before. `staleness` None: nobody waits.
    """

    def __init__(self, steps: Sequence[int], staleness: int | None) -> None:
        self._staleness = staleness
        self._finished = dict(enumerate(steps))
        self._asking: dict[int, int] = {}

    def ask(self, worker: int, step: int) -> Grants:
        """Note that a worker wants to start a step; return who may start what from now on."""
        if worker in self._finished:
            self._asking[worker] = step
        return self._grant()

    def finished(self, worker: int, step: int) -> Grants:
        """Note that every server has applied a worker's step."""
        if worker in self._finished:
            self._finished[worker] = step
        return self._grant()

    def gone(self, worker: int) -> Grants:
        """Wait for a worker no more."""
        self._finished.pop(worker, None)
        self._asking.pop(worker, None)
        return self._grant()

    def back(self, worker: int, step: int) -> None:
        """Wait for a worker again: it goes on behind a step."""
        self._finished[worker] = step

    def _grant(self) -> Grants:
        slowest = min(self._finished.values(), default=0)
        allowed = [
            (worker, step)
            for worker, step in self._asking.items()
            if self._staleness is None or step <= slowest + self._staleness + 1
        ]
        for worker, _ in allowed:
            del self._asking[worker]
        return allowed
