"""Run one case in a child of this process, which has everything imported, within memory and time.

A child's address space is limited to what it had at its birth and twice LIMIT_BYTES more: what would take
more memory is told by the system, at once. Its resident memory is measured besides, less what it was born
with: a child of a process that ran a thousand tests has their memory.
"""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partc.compiler.commands.cli import COMMANDS, app_for, exit_code_of, main
from partc.compiler.verification.verify import launch_in_process, verify
from partc.runtime.asynchronous.in_process import train_sessions_in_process
from partc.runtime.asynchronous.sessions.session import plan_of_data
from partc.runtime.data.feeds import open_source
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.checks.peak_memory import resident_bytes, virtual_bytes
from tests.fuzz.cases import Case

for _command in COMMANDS:  # imports each, before any child is born
    app_for(_command)

LIMIT_BYTES = 2 * 10**9
LIMIT_S = 60.0
DIFFERS = 71  # exit code: the plan is not what one device computes


@dataclass(frozen=True)
class Outcome:
    """What a case came to: its peak beyond what it was born with. `failures` are the promises it broke."""

    code: int
    told: str
    peak_bytes: int
    seconds: float
    failures: tuple[str, ...]


def run_case(case: Case, folder: Path, log: Path) -> Outcome:
    """Run a case in `folder`, its output in `log`, and hold it to what partc promises."""
    before = set(_files(folder))
    inherited_bytes = resident_bytes()
    begun_s = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(case, folder, log)
    status, usage = _wait(child)
    seconds = time.monotonic() - begun_s
    code = os.waitstatus_to_exitcode(status)
    told = log.read_text(errors="replace")
    peak_bytes = max(0, usage.ru_maxrss * 1024 - inherited_bytes)
    left = sorted(set(_files(folder)) - before)
    failures = _failures(case, code, told, peak_bytes, seconds, left)
    return Outcome(code, told, peak_bytes, seconds, tuple(failures))


def _failures(
    case: Case, code: int, told: str, peak_bytes: int, seconds: float, left: Sequence[str]
) -> list[str]:
    found = []
    if "Traceback" in told or "internal error" in told or code not in (0, 2, DIFFERS):
        found.append(f"exit code {code}: {_last_line(told)}")
    if code == DIFFERS:
        found.append(f"trained otherwise than on one device: {_last_line(told)}")
    if peak_bytes > LIMIT_BYTES or "MemoryError" in told:
        found.append(f"memory: {peak_bytes / 1e9:.1f} GB")
    if seconds > LIMIT_S:
        found.append(f"time: {seconds:.0f} s")
    if code not in (0, DIFFERS) and left:
        found.append(f"left behind: {', '.join(left[:3])}")
    diverged = "partc: the loss is" in told  # which is no refusal of a file
    if code == 2 and case.file not in told and not diverged:
        found.append(f"the file is not named: {told.strip()[:300]}")
    if code == 2 and not ("\n  at:  " in told and "\n  fix: " in told):
        found.append(f"not told in three parts: {told.strip()[:300]}")
    return found


def _last_line(told: str) -> str:
    lines = told.strip().splitlines()
    if "internal error" in told:
        return next(line for line in lines if "internal error" in line) + " " + lines[-2].strip()
    return " / ".join(line.strip() for line in lines[-3:])


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*")]


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    deadline_s = time.monotonic() + 1.5 * LIMIT_S
    while time.monotonic() < deadline_s:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return status, usage


def _be_child(case: Case, folder: Path, log: Path) -> None:
    """Run the case and end this process."""
    code = 70
    try:
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        limit = virtual_bytes() + 2 * LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _train(*case.arguments[1:]) if case.arguments[0] == "train" else main(case.arguments)
        if code == 0 and case.verified:
            code = _verify()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(plan: str, data: str = "synthetic") -> int:
    """Train a step of all ranks in this process: what the daemons of `partc run` read, they read here."""

    def train() -> None:
        folder = read_plan_folder(plan)
        if folder.plan.asynchronous:
            total = open_source(data, plan_of_data(folder.plan)).total(0)
            train_sessions_in_process(folder, [total])
        else:
            train_in_process(folder, [open_source(data, folder.plan).total(0)])

    return exit_code_of(train)


def _verify() -> int:
    """Hold the plan in out/ against one device, all ranks in this process."""
    report = verify("out", steps=2, launcher=launch_in_process)
    print(report.summary())
    return 0 if report.passed else DIFFERS
