"""What a training does, for Prometheus to ask: on a port, in its text format.

partc_step, partc_loss, partc_step_seconds, partc_samples_per_second    of the last half second or so
partc_wait_ratio{rank}                                  of a rank's time, what it waited for others
partc_checkpoints_total, partc_restarts_total           since this command began

What nobody has measured yet is NaN, and so is a loss that is not finite.
"""

import math
import time
from types import TracebackType
from typing import Self

from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job import JobMessage, Progress, Restarted, Saved, Waited


class MetricsPort:
    """Answers at http://ADDRESS:PORT/metrics; port 0: any that is free. Use it in a `with`.

    Raises BadUsage where Prometheus' client is not installed, or the port is not to be had.
    """

    def __init__(self, address: str, port: int) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise BadUsage(
                "Prometheus' client is not installed", at="--metrics-port", fix="pip install 'partc[metrics]'"
            ) from error
        registry = prometheus.CollectorRegistry()
        self._last: tuple[int, float] | None = None  # step, when it was heard of
        self._step = prometheus.Gauge("partc_step", "Steps that are trained.", registry=registry)
        self._loss = prometheus.Gauge("partc_loss", "The last step's loss.", registry=registry)
        self._step_s = prometheus.Gauge("partc_step_seconds", "Seconds of a step.", registry=registry)
        self._samples_per_s = prometheus.Gauge(
            "partc_samples_per_second", "Samples that are used in a second.", registry=registry
        )
        for gauge in (self._step, self._loss, self._step_s, self._samples_per_s):
            gauge.set(math.nan)  # it would say 0
        self._waits = prometheus.Gauge(
            "partc_wait_ratio", "Of a rank's time, what it waits for others.", ["rank"], registry=registry
        )
        self._checkpoints = prometheus.Counter(
            "partc_checkpoints", "Checkpoints that are complete.", registry=registry
        )
        self._restarts = prometheus.Counter(
            "partc_restarts", "Restarts, of a worker or of all ranks.", registry=registry
        )
        try:
            self._server, self._thread = prometheus.start_http_server(port, address, registry)
        except OSError as error:
            raise BadUsage(
                f"port {port} of {address} cannot be listened on: {error.strerror}",
                at="--metrics-port",
                fix="name another port, or 0 for any that is free",
            ) from error
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def hear(self, message: JobMessage) -> None:
        """Take in what a job tells."""
        match message:
            case Progress():
                self._go_on(message)
            case Waited(member=member, waited_s=waited_s, trained_s=trained_s):
                self._waits.labels(member.removeprefix("rank ")).set(min(1.0, waited_s / trained_s))
            case Saved():
                self._checkpoints.inc()
            case Restarted():
                self._restarts.inc()
                self._last = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _go_on(self, progress: Progress) -> None:
        self._step.set(progress.step)
        if progress.not_finite_since:
            self._loss.set(math.nan)
        elif progress.loss is not None:
            self._loss.set(progress.loss)
        now_s = time.monotonic()
        step_s = 1 / progress.steps_per_s
        if self._last is not None and progress.step > self._last[0]:
            step_s = (now_s - self._last[1]) / (progress.step - self._last[0])
        self._last = progress.step, now_s
        self._step_s.set(step_s)
        if progress.samples_per_s is not None:
            samples_of_step = progress.samples_per_s / progress.steps_per_s
            self._samples_per_s.set(samples_of_step / step_s)
