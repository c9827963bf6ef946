"""Hosts as network namespaces: links cut and slow, ranks slow. Needs root and iproute2."""

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.namespaces import Network, namespace_hosts
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.cost.cluster.cluster import Cluster
from tests.chaos.stage import Bench, Stage, mlp_step
from tests.chaos.training import Outcome, Training

NETWORK = Network("pch", "10.213.9")
BITS_PER_S = 1e9
_HOSTS = 2
_PERIOD_S, _RUNS = 0.05, 0.2  # a fifth of the time
_SLOW_S = 10.0


@contextmanager
def hosts(stage: Stage) -> Iterator[Bench]:
    """Make two hosts of one worker, and yield a plan for them."""
    with namespace_hosts(_HOSTS, 1, BITS_PER_S, NETWORK) as cluster:
        yield stage.bench("namespaces", lambda folder: _compile(cluster, folder))


def train_through(how: str, stage: Stage, draw: random.Random) -> Outcome:
    """Train while something is slow; nobody is to be blamed for it."""
    with hosts(stage) as bench, Training(bench.plan, stage.case_folder()) as training:
        training.begin(bench.steps, "--timeout", "300")
        training.until(lambda: training.step)
        time.sleep(draw.uniform(0, 2))
        before = training.step
        TROUBLES[how](training, draw)
        during = training.step - before
        failures = training.end(0, within_s=600.0) + training.left()
        failures += [f"it was told: {line}" for line in training.told.splitlines() if " was lost" in line]
        failures = failures or training.differences(bench.expected)
        failures += [training.told[-800:]] if failures else []
        return Outcome(how, "training", failures=tuple(failures), figures=f"{during} steps meanwhile")


def _cut(seconds: float, training: Training, draw: random.Random) -> None:
    link = NETWORK.outside(draw.randint(1, _HOSTS))
    _run("ip", "link", "set", link, "down")
    time.sleep(seconds)
    _run("ip", "link", "set", link, "up")


def _a_tenth(training: Training, draw: random.Random) -> None:
    link = NETWORK.outside(draw.randint(1, _HOSTS))
    limit = ("burst", "256kb", "latency", "100ms")
    for rate in (BITS_PER_S / 10, BITS_PER_S):
        _run("tc", "qdisc", "change", "dev", link, "root", "tbf", "rate", f"{rate:.0f}bit", *limit)
        time.sleep(_SLOW_S if rate < BITS_PER_S else 0)


def _five_times_slower(training: Training, draw: random.Random) -> None:
    """Let a rank run for a fifth of the time."""
    slow = [draw.choice(training.processes("member"))]
    done = threading.Event()
    threading.Timer(_SLOW_S, done.set).start()
    while not done.is_set():
        training.send(slow, signal.SIGSTOP)
        time.sleep(_PERIOD_S * (1 - _RUNS))
        training.send(slow, signal.SIGCONT)
        time.sleep(_PERIOD_S * _RUNS)


TROUBLES: dict[str, Callable[[Training, random.Random], None]] = {
    "link cut for 10 s": lambda training, draw: _cut(10.0, training, draw),
    "link cut for 60 s": lambda training, draw: _cut(60.0, training, draw),
    "a tenth of the rate": _a_tenth,
    "a rank five times slower": _five_times_slower,
}


def _compile(cluster: Cluster, folder: Path) -> Path:
    step = import_training_graph(mlp_step())
    compile_graph(step, cluster, folder, Options(strategy="allreduce", batch="global"))
    return folder


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
