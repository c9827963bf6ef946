"""Hosts as network namespaces: links cut and slow, ranks slow, a host that stops. Needs root and iproute2."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.namespaces import Network, namespace_hosts, shaper
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.cost.cluster.cluster import Cluster
from tests.builders.plans.session_plans import additive_step
from tests.chaos.stage import Bench, Stage, mlp_step
from tests.chaos.training import Outcome, Training
from tests.checks.job_processes import JobProcess, is_alive

_OWN = 30 + os.getpid() % 200  # another run beside this one has other namespaces
NETWORK = Network(f"pch{_OWN}", f"10.213.{_OWN}")
BITS_PER_S = 1e9
HOSTS = 2
_PERIOD_S, _RUNS = 0.05, 0.2  # a fifth of the time
_SLOW_S = 10.0
_LOST_WITHIN_S = 120.0  # a cable that is cut for a minute may come back
_UNHEARD_S = 0.3  # that a keeper takes to be heard
_NAMED_WITHIN_S = 5.0
_SAID_WITHIN_S = 10.0  # twice the heartbeat: that a host is silent, given up or not
_AWAKE_S = 10.0  # that what wakes on a host that was given up may take to end


@contextmanager
def hosts(stage: Stage) -> Iterator[Bench]:
    """Make two hosts of one worker, and yield a plan for them."""
    with namespace_hosts(HOSTS, 1, BITS_PER_S, NETWORK) as cluster:
        yield stage.bench("namespaces", lambda folder: compile_for(cluster, folder))


@contextmanager
def session_hosts(stage: Stage) -> Iterator[Bench]:
    """Make two hosts of one worker, and yield an asynchronous plan for them."""
    with namespace_hosts(HOSTS, 1, BITS_PER_S, NETWORK) as cluster:
        options = Options(strategy="ps", asynchronous=True)
        step = import_training_graph(additive_step())
        yield Bench(
            stage.plan(
                "far sessions", lambda folder: compile_graph(step, cluster, folder, options) and folder
            )
        )


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
        if how.startswith("link cut") and training.told.count(": not heard") != training.told.count(
            ": heard again"
        ):
            failures.append("a silence was not told together with its end")
        failures = failures or training.differences(bench.expected)
        failures += [training.told[-800:]] if failures else []
        return Outcome(how, "training", failures=tuple(failures), figures=f"{during} steps meanwhile")


def freeze_a_host(stage: Stage, draw: random.Random) -> Outcome:
    """Stop all processes of a host; wake them when the job has gone on without them."""
    with hosts(stage) as bench, Training(bench.plan, stage.case_folder()) as training:
        training.begin_saving(bench.steps, bench.save_every, "--restarts", "1", "--timeout", "300")
        training.until(lambda: training.step)
        time.sleep(draw.uniform(0, 2))
        frozen = [JobProcess(number, "frozen") for number in processes_of(NETWORK.host(2))]
        training.send(frozen, signal.SIGSTOP)
        try:
            told_s, failures, woken = _wake(frozen, training)
            failures = failures or training.differences(bench.expected)
        finally:
            training.send(frozen, signal.SIGKILL)
        failures += [training.told[-800:]] if failures else []
        return Outcome(f"host 2, {woken} processes woken", "training", told_s, tuple(failures))


def kill_an_unheard_keeper(stage: Stage, draw: random.Random) -> Outcome:
    """Kill a keeper of another host while it loads; all others are ended by MPI then."""
    with hosts(stage) as bench, Training(bench.plan, stage.case_folder()) as training:
        training.begin_saving(bench.steps, bench.save_every, "--restarts", "1", "--timeout", "300")
        name = f"rank {draw.randrange(HOSTS)}"
        training.until(lambda: any(map(_has_janitor, _keepers_of(name, training))), look_s=0.0)
        victims = _keepers_of(name, training)
        time.sleep(draw.uniform(0, _UNHEARD_S))
        training.send(victims, signal.SIGKILL)
        begun_s = time.monotonic()
        training.until(lambda: f"{name} was lost" in training.told, within_s=_NAMED_WITHIN_S, look_s=0.01)
        told_s = time.monotonic() - begun_s
        failures = training.end(0) + training.left()
        failures = failures or training.differences(bench.expected)
        failures += [training.told[-800:]] if failures else []
        return Outcome(f"keeper of {name}", "loading", told_s, tuple(failures))


def _has_janitor(keeper: JobProcess) -> bool:
    """Tell whether a keeper is a program yet: killed before, it is missed by MPI alone, with all others."""
    return bool(Path(f"/proc/{keeper.process}/task/{keeper.process}/children").read_text())


def _keepers_of(name: str, training: Training) -> list[JobProcess]:
    return [found for found in training.processes("keeper") if found.name == name]


def _wake(frozen: list[JobProcess], training: Training) -> tuple[float, list[str], int]:
    """Wake who is frozen once the job goes on; return when it was told, what did not hold, how many woke."""
    begun_s = time.monotonic()
    training.until(lambda: "host h2 (rank 1): not heard" in training.told, within_s=_SAID_WITHIN_S)
    training.until(lambda: "rank 1 was lost" in training.told, within_s=_LOST_WITHIN_S)
    told_s = time.monotonic() - begun_s
    training.until_it_gets_on()
    asleep = [found for found in frozen if is_alive(found.process)]
    failures = [] if asleep else ["nobody of the host was left to be woken"]
    training.send(asleep, signal.SIGCONT)
    failures += training.end(0)
    deadline_s = time.monotonic() + _AWAKE_S
    while any(is_alive(found.process) for found in asleep) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    failures += [f"process {found.process} goes on" for found in asleep if is_alive(found.process)]
    return told_s, failures + training.left(), len(asleep)


def _cut(seconds: float, training: Training, draw: random.Random) -> None:
    link = NETWORK.outside(draw.randint(1, HOSTS))
    _run("ip", "link", "set", link, "down")
    time.sleep(seconds)
    _run("ip", "link", "set", link, "up")


def _a_tenth(training: Training, draw: random.Random) -> None:
    link = NETWORK.outside(draw.randint(1, HOSTS))
    for rate in (BITS_PER_S / 10, BITS_PER_S):
        _run("tc", "qdisc", "change", "dev", link, "root", *shaper(rate))
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


def compile_for(cluster: Cluster, folder: Path) -> Path:
    """Compile a small step for all workers of some hosts."""
    step = import_training_graph(mlp_step())
    compile_graph(step, cluster, folder, Options(strategy="allreduce", batch="global"))
    return folder


def processes_of(namespace: str) -> list[int]:
    """Return all processes of a host."""
    told = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(number) for number in told.stdout.split()]


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
