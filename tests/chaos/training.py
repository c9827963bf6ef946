"""A training in processes of its own: started, listened to, hurt by others, and held to leave nothing behind.

It has a temporary folder and, if it may mount one, shared memory of its own: what is left there is its.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.jobs.results import TRAINED_FILE
from tests.checks.job_processes import JobProcess, is_alive, job_processes

FOREVER = 10**9
START_S = 120.0
OVER_S = 90.0  # what takes longer hangs
_LEFT_S = 10.0  # from the launcher's end to the last process's, where it was killed itself
LOOK_S = 0.01
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    `victim`: who was hit, `moment`: when. `told_s`: from the fault to the word about it. `failures`: what did
    not hold. `figures`: what else was measured. `aimed`, `hit`: a phase that the victim was to be in, and the
    one that it was in (phases.py).
    """

    victim: str = ""
    moment: str = ""
    told_s: float = 0.0
    failures: tuple[str, ...] = ()
    figures: str = ""
    aimed: str = ""
    hit: str = ""


class TooEarly(Exception):
    """The training was over before it could be hurt: not a case."""


class Training:
    """One plan's training in the folder `root`, which is made and removed; begin it as often as needed.

    `plan`: is copied there. Use it in a `with`.
    """

    def __init__(self, plan: Path, root: Path) -> None:
        self.root = root
        self.plan = root / "plan"
        self.checkpoints = root / "checkpoints"
        root.mkdir(parents=True, exist_ok=True)
        shutil.copytree(plan, self.plan)
        (root / "tmp").mkdir()
        self.environment = {"TMPDIR": str(root / "tmp")}
        self._told = root / "told"
        self._told.touch()
        self._shared = set(os.listdir(SHARED))
        self._seen: set[int] = set()
        self.launcher: subprocess.Popen[bytes] | None = None

    def begin(self, steps: int, *options: str) -> None:
        """Start a launcher. `options`: of tests/chaos/train.py."""
        command = [sys.executable, "-m", "tests.chaos.train", str(self.plan), str(steps), *options]
        with self._told.open("a") as told:
            self.launcher = subprocess.Popen(
                command,
                stdout=told,
                stderr=subprocess.STDOUT,
                env=dict(os.environ) | self.environment,
                start_new_session=True,
            )

    def begin_saving(self, steps: int, every: int, *options: str) -> None:
        """Start a launcher that saves."""
        self.begin(steps, "--checkpoints", str(self.checkpoints), "--save-every", str(every), *options)

    @property
    def told(self) -> str:
        """What the launcher has said so far."""
        return self._told.read_text(errors="replace")

    @property
    def log(self) -> str:
        """What ranks have said so far."""
        return (self.plan / "run.log").read_text(errors="replace")

    @property
    def step(self) -> int:
        """How far it is."""
        steps = [line for line in self.told.splitlines() if line.startswith("step ")]
        return int(steps[-1].split()[1]) if steps else 0

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        assert self.launcher is not None
        return self.launcher.poll() is not None

    def processes(self, role: str, part: str = "") -> list[JobProcess]:
        """Return its processes of a role whose names begin so, in a fixed order."""
        found = job_processes(self.plan)
        self._seen |= {process.process for process in found}
        chosen = [p for p in found if p.role == role and p.name.startswith(part)]
        return sorted(chosen, key=lambda process: process.process)

    def until(self, holds: Callable[[], object], within_s: float = START_S, look_s: float = 0.05) -> None:
        """Wait until something holds. Raises TooEarly where the training ends before."""
        deadline_s = time.monotonic() + within_s
        while not holds():
            if self.is_over:
                raise TooEarly(self.told[-600:])
            if time.monotonic() > deadline_s:
                raise AssertionError(f"nothing of that for {within_s:.0f} s: {self.told[-600:]}")
            time.sleep(look_s)

    def until_it_gets_on(self) -> None:
        """Wait until there is a step more than when it was last asked, or begun again, and some of them."""
        lines = len(self.told.splitlines())
        self.until(lambda: sum(line.startswith("step ") for line in self.told.splitlines()[lines:]) >= 2)

    def kill_launcher(self) -> None:
        """Kill the launcher alone."""
        assert self.launcher is not None
        self.processes("member")
        self.launcher.kill()

    def send(self, victims: list[JobProcess], number: signal.Signals) -> None:
        """Send a signal to those of these that are still there, at once: they go on meanwhile."""
        for victim in victims:
            if is_alive(victim.process):
                os.kill(victim.process, number)
        self.processes("member")

    def end(self, expected: int, within_s: float = OVER_S) -> list[str]:
        """Wait for the launcher's end, as long as it says something; return what is wrong with it."""
        assert self.launcher is not None
        while True:
            said = self.told
            try:
                code = self.launcher.wait(within_s)
            except subprocess.TimeoutExpired:
                if said == self.told:
                    return [f"the launcher said nothing for {within_s:.0f} s, and did not end"]
            else:
                return [] if code == expected else [f"exit code {code}, not {expected}"]

    def left(self) -> list[str]:
        """Return what there is still of a training that is over."""
        deadline_s = time.monotonic() + _LEFT_S
        while (left := self._remains()) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        return [f"left behind: {what}" for what in left]

    def differences(self, expected: Mapping[str, np.ndarray]) -> list[str]:
        """Return which trained variables have other bits than these."""
        trained = read_arrays(self.plan / TRAINED_FILE)
        other = [name for name, value in expected.items() if trained[name].tobytes() != value.tobytes()]
        return [f"other bits in {len(other)} variables, {other[0]!r} one"] if other else []

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *error: object) -> None:
        """End what a case that failed has left."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
        for found in job_processes(self.plan):
            if is_alive(found.process):
                os.kill(found.process, signal.SIGKILL)
        shutil.rmtree(self.root)

    def _remains(self) -> list[str]:
        alive = [f"process {process}" for process in self._seen if is_alive(process)]
        alive += [f"{found.role} {found.name}" for found in job_processes(self.plan)]
        folders = [*self.plan.glob(".run-*"), *(self.root / "tmp").glob("[!.]*")]
        if self.launcher is not None and self.launcher.returncode == 0:  # else who resumes removes them
            folders += self.checkpoints.glob(".step-*")
        names = [path.name for path in folders]
        return alive + names + sorted(set(os.listdir(SHARED)) - self._shared)
