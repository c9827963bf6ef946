"""One case: start a job, hurt it at a random moment, and hold what follows to what must hold.

A case has a temporary folder and, if it may mount one, shared memory of its own: what is left there is its.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.chaos.faults import Fault
from tests.checks.job_processes import JobProcess, is_alive, job_processes

FOREVER = 10**9
_START_S = 120.0
_OVER_S = 60.0  # what takes longer hangs
_LEFT_S = 10.0  # from the launcher's end to the last process's, where it was killed itself
_LOADING_S, _TRAINING_S = 3.0, 2.0
_LOOK_S = 0.01
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Outcome:
    """`victim`: who was hit. `told_s`: from the fault to the word about it. `failures`: what did not hold."""

    victim: str
    moment: str
    told_s: float
    failures: tuple[str, ...]


def run_case(fault: Fault, plan: Path, root: Path, draw: random.Random) -> Outcome:
    """Run a case in the folder `root`, which is made and removed."""
    shutil.copytree(plan, root / "plan")
    (root / "tmp").mkdir()
    shared = set(os.listdir(SHARED))
    with (root / "told").open("w") as told:
        launcher = _start(root, told)
        try:
            return _hurt(fault, root, launcher, draw, shared)
        finally:
            _end_all(root, launcher)
            shutil.rmtree(root)


def _start(root: Path, told: IO[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.chaos.train", str(root / "plan"), str(FOREVER)]
    environment = dict(os.environ) | {"TMPDIR": str(root / "tmp")}
    return subprocess.Popen(
        command, stdout=told, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


def _hurt(
    fault: Fault, root: Path, launcher: "subprocess.Popen[bytes]", draw: random.Random, shared: set[str]
) -> Outcome:
    moment = draw.choice(("loading", "training", "training"))
    _wait_for(moment, fault, root, launcher)
    time.sleep(draw.uniform(0, _LOADING_S if moment == "loading" else _TRAINING_S))
    victim = _victim(fault, root / "plan", launcher, draw)
    hit = {found.process for found in job_processes(root / "plan")}
    os.kill(victim.process, fault.signal)
    begun_s = time.monotonic()
    failures = (
        [] if fault.role == "launcher" and fault.signal == signal.SIGKILL else _told(fault, victim, root)
    )
    told_s = time.monotonic() - begun_s
    if fault.goes_on and not failures:
        failures += _goes_on(root)
        launcher.send_signal(signal.SIGTERM)
    failures += _over(fault, launcher)
    failures += _left(root, hit, shared)
    if failures:
        failures.append((root / "told").read_text()[-600:])
    return Outcome(victim.name or victim.role, moment, told_s, tuple(failures))


def _wait_for(moment: str, fault: Fault, root: Path, launcher: "subprocess.Popen[bytes]") -> None:
    """Wait until every process has a keeper, or until there is progress."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        assert launcher.poll() is None, (root / "told").read_text()
        if moment == "training" and "step" in (root / "told").read_text():
            return
        members = [found for found in job_processes(root / "plan") if found.role == "member"]
        if moment == "loading" and len(members) >= 3:
            return
        time.sleep(0.05)
    raise AssertionError(f"the job did not start within {_START_S:.0f} s: {(root / 'told').read_text()}")


def _victim(fault: Fault, plan: Path, launcher: "subprocess.Popen[bytes]", draw: random.Random) -> JobProcess:
    if fault.role == "launcher":
        return JobProcess(launcher.pid, "launcher")
    found = [p for p in job_processes(plan) if p.role == fault.role and p.name.startswith(fault.part)]
    return draw.choice(sorted(found, key=lambda process: process.process))


def _told(fault: Fault, victim: JobProcess, root: Path) -> list[str]:
    """Wait until the fault is told; return what is wrong with that."""
    begun_s = time.monotonic()
    name = victim.name.replace("worker-", "worker ") if fault.goes_on else victim.name
    source = root / "plan" / "run.log" if fault.goes_on else root / "told"
    while (passed_s := time.monotonic() - begun_s) < _OVER_S:
        if fault.is_told(name, source.read_text(errors="replace")):
            late = passed_s > fault.within_s
            return [f"told after {passed_s:.1f} s, {fault.within_s:.0f} s are the limit"] if late else []
        if "\n  fix:" in (root / "told").read_text():
            time.sleep(0.1)
            if not fault.is_told(name, source.read_text(errors="replace")):
                return [f"the wrong one was named: {victim.name or victim.role} was hit"]
        time.sleep(_LOOK_S)
    return [f"nothing was told for {_OVER_S:.0f} s"]


def _goes_on(root: Path) -> list[str]:
    before, deadline_s = _last_step(root), time.monotonic() + 20
    while time.monotonic() < deadline_s:
        if _last_step(root) > before:
            return []
        time.sleep(0.05)
    return ["the others did not train on"]


def _last_step(root: Path) -> int:
    steps = [line for line in (root / "told").read_text().splitlines() if line.startswith("step ")]
    return int(steps[-1].split()[1]) if steps else 0


def _over(fault: Fault, launcher: "subprocess.Popen[bytes]") -> list[str]:
    try:
        code = launcher.wait(_OVER_S)
    except subprocess.TimeoutExpired:
        return [f"the launcher did not end within {_OVER_S:.0f} s"]
    if fault.goes_on:
        expected = 128 + signal.SIGTERM
    elif fault.role == "launcher":
        expected = -fault.signal if fault.signal == signal.SIGKILL else 128 + fault.signal
    else:
        expected = 1
    return [] if code == expected else [f"exit code {code}, not {expected}"]


def _left(root: Path, hit: set[int], shared: set[str]) -> list[str]:
    """Return what there is still of a job that is over."""
    deadline_s = time.monotonic() + _LEFT_S
    while (left := _remains(root, hit, shared)) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return [f"left behind: {what}" for what in left]


def _remains(root: Path, hit: set[int], shared: set[str]) -> list[str]:
    alive = [f"process {process}" for process in hit if is_alive(process)]
    alive += [f"{found.role} {found.name}" for found in job_processes(root / "plan")]
    folders = [path.name for path in (*(root / "plan").glob(".run-*"), *(root / "tmp").glob("[!.]*"))]
    return alive + folders + sorted(set(os.listdir(SHARED)) - shared)


def _end_all(root: Path, launcher: "subprocess.Popen[bytes]") -> None:
    """End what a case that failed has left."""
    launcher.kill()
    launcher.wait()
    for found in job_processes(root / "plan"):
        if is_alive(found.process):
            os.kill(found.process, signal.SIGKILL)
