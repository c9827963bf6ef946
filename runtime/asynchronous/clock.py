"""Bounded staleness: who may start which step.

    step t of worker w may start  <=>  every live worker has finished step t - S - 1

A step is finished when every server has applied what it pushes. So whoever computes step t sees all
updates of all live workers up to step t - S - 1, and perhaps newer ones. S = 0: rounds.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS 2013, section 3. There a clock may also be older than what is read; here, too.
"""

Grants = list[tuple[int, int]]  # (worker, step)


class Clock:
    """Answers questions for steps as the slowest live worker advances."""

    def __init__(self, workers: int, servers: int, staleness: int) -> None:
        self._staleness = staleness
        self._applied = {worker: [0] * servers for worker in range(workers)}
        self._asking: dict[int, int] = {}

    def ask(self, worker: int, step: int) -> Grants:
        """Note that a worker wants to start a step; return who may start what from now on."""
        if worker in self._applied:
            self._asking[worker] = step
        return self._grant()

    def applied(self, worker: int, server: int, step: int) -> Grants:
        """Note that a server (by its place among the servers) has applied a worker's step."""
        if worker in self._applied:
            self._applied[worker][server] = step
        return self._grant()

    def gone(self, worker: int) -> Grants:
        """Wait for a worker no more."""
        self._applied.pop(worker, None)
        self._asking.pop(worker, None)
        return self._grant()

    def _grant(self) -> Grants:
        slowest = min((min(steps) for steps in self._applied.values()), default=0)
        allowed = [(w, step) for w, step in self._asking.items() if step <= slowest + self._staleness + 1]
        for worker, _ in allowed:
            del self._asking[worker]
        return allowed
