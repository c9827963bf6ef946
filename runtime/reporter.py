"""What a rank prints while it trains: lines of JSON that the launcher reads."""

import time

import msgspec

from partc.runtime.job import Job, Progress


class Reporter:
    """Prints progress, now and then."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun_s = self._reported_s = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begun_s = time.monotonic()

    def steps_per_s(self, step: int) -> float:
        """Return the mean rate so far."""
        return step / max(time.monotonic() - self._begun_s, 1e-9)

    def report(self, step: int, loss: float | None) -> None:
        """Print a line of JSON, if the last is old enough."""
        now_s = time.monotonic()
        if step < self._job.steps and step > 1 and now_s - self._reported_s < self._job.report_every_s:
            return
        self._reported_s = now_s
        line = Progress(step, self._job.steps, loss, self.steps_per_s(step))
        print(msgspec.json.encode(line).decode(), flush=True)
