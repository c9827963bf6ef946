"""What Prometheus reads of a real short run."""

import math
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job import Checkpoints, Progress, Restarted, Waited
from partc.runtime.jobs.metrics_port import MetricsPort
from partc.runtime.jobs.runner import Runner
from tests.builders.plans.linear_plans import linear_all_reduce

SLOW = """
import time
import numpy as np

def batches():
    while True:
        time.sleep(0.02)
        yield {"x": np.ones((8, 3)), "y": np.ones((8, 2))}
"""


def metrics_of(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_run_can_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(SLOW)
    folder = linear_all_reduce(tmp_path / "out", 2)
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=20)

    with MetricsPort("127.0.0.1", 0) as port:
        result = Runner(folder).train(
            "slow:batches", 60, checkpoints=asked, on_progress=port.hear, tells_waiting=True, outputs="loss"
        )
        metrics = metrics_of(port.url)

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", port.url)
    assert metrics["partc_step"] == 60
    assert metrics["partc_loss"] == pytest.approx(float(result.outputs[-1]["loss"].mean()))
    assert metrics["partc_step_seconds"] >= 0.015
    assert metrics["partc_samples_per_second"] == pytest.approx(8 / metrics["partc_step_seconds"])
    assert metrics["partc_checkpoints_total"] == 3
    assert metrics["partc_restarts_total"] == 0
    assert all(0 <= metrics[f'partc_wait_ratio{{rank="{rank}"}}'] <= 1 for rank in (0, 1))
    with pytest.raises(OSError):
        metrics_of(port.url)


def test_a_restart_is_counted_and_its_time_is_no_steps() -> None:
    with MetricsPort("127.0.0.1", 0) as port:
        for told in (Progress(10, 100, 0.5, 4.0), Restarted("all ranks"), Progress(2, 100, None, 8.0)):
            port.hear(told)
        port.hear(Waited("worker-1", 1.0, 4.0))
        metrics = metrics_of(port.url)

    assert metrics["partc_restarts_total"] == 1
    assert (metrics["partc_step"], metrics["partc_loss"]) == (2, 0.5)
    assert metrics["partc_step_seconds"] == 1 / 8
    assert metrics['partc_wait_ratio{rank="worker-1"}'] == 0.25


def test_samples_are_those_that_were_used_lately() -> None:
    with MetricsPort("127.0.0.1", 0) as port:
        port.hear(Progress(10, 100, 0.5, 4.0, samples_per_s=80.0))
        first = metrics_of(port.url)
        port.hear(Progress(20, 100, 0.5, 4.0, samples_per_s=80.0))
        later = metrics_of(port.url)

    assert first["partc_samples_per_second"] == 80
    assert later["partc_samples_per_second"] == pytest.approx(20 / later["partc_step_seconds"])


def test_what_nobody_measured_and_a_loss_that_is_no_number_are_nan() -> None:
    gauges = ("partc_step", "partc_loss", "partc_step_seconds", "partc_samples_per_second")
    with MetricsPort("127.0.0.1", 0) as port:
        before = metrics_of(port.url)
        port.hear(Progress(1, 9, 0.5, 2.0))
        port.hear(Progress(7, 9, None, 2.0, not_finite_since=3))
        after = metrics_of(port.url)

    assert all(math.isnan(before[gauge]) for gauge in gauges)
    assert math.isnan(after["partc_loss"]) and after["partc_step"] == 7


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            BadUsage, match=rf"port {number} of 127.0.0.1 .*\n  at:  --metrics-port\n  fix: name"
        ):
            MetricsPort("127.0.0.1", number)


def test_without_its_client_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(BadUsage, match=r"(?s)not installed.*--metrics-port.*pip install 'partc\[metrics\]'"):
        MetricsPort("127.0.0.1", 0)
