"""Trainings at length: what they hold, and what they come to."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import KILL
from tests.chaos.stage import Stage, mlp
from tests.chaos.training import FOREVER, Outcome, Training

_KILLS = 50
_GROWTH_BYTES = 16 << 20
_LONG_STEPS, _LONG_SAVE_EVERY, _LONG_KILL_EVERY = 100_000, 1_000, 10_000
_LONGEST_S = 900.0


@dataclass(frozen=True)
class Held:
    """What a process holds of its system."""

    descriptors: int
    threads: int
    memory_bytes: int
    ports: int


def held_by(process: int) -> Held:
    """Look at a process."""
    folder = Path(f"/proc/{process}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    names = [str(path.readlink()) for path in (folder / "fd").iterdir() if path.is_symlink()]
    return Held(
        len(names),
        int(status["Threads"]),
        int(status["VmRSS"].split()[0]) * 1024,
        len(_listening() & {name[8:-1] for name in names if name.startswith("socket:")}),
    )


def _listening() -> set[str]:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {fields[9] for fields in map(str.split, lines) if fields[3] == "0A"}


def restart_often(stage: Stage, draw: random.Random) -> Outcome:
    """Kill a rank of each generation; the launcher holds after the last what it held after the first."""
    plan = stage.bench("AllReduce").plan
    with Training(plan, stage.case_folder()) as training:
        training.begin_saving(FOREVER, 100, "--restarts", str(_KILLS))
        assert training.launcher is not None
        held: list[Held] = []
        for _ in range(_KILLS + 1):
            training.until_it_gets_on()
            held.append(held_by(training.launcher.pid))
            if len(held) <= _KILLS:
                training.send([draw.choice(training.processes("member"))], KILL)
        training.launcher.terminate()
        failures = training.end(143) + training.left() + _growth(held[1], held[-1])
        figures = f"held after the first kill {held[1]}, after the last {held[-1]}"
        return Outcome("ranks", f"{_KILLS} times", failures=tuple(failures), figures=figures)


def _growth(first: Held, last: Held) -> list[str]:
    failures = [
        f"{getattr(first, what)} {what} became {getattr(last, what)}"
        for what in ("descriptors", "threads", "ports")
        if getattr(first, what) < getattr(last, what)
    ]
    if last.memory_bytes - first.memory_bytes > _GROWTH_BYTES:
        failures.append(f"{first.memory_bytes} bytes became {last.memory_bytes}")
    return failures


def train_long(stage: Stage, draw: random.Random) -> Outcome:
    """Train 100,000 steps with a kill every 10,000, and once without."""
    plan = stage.plan("long", lambda folder: mlp(folder, "1x2", "allreduce", (16, 32, 10)))
    begun_s = time.monotonic()
    memory: list[dict[str, int]] = []
    with Training(plan, stage.case_folder()) as training:
        training.begin_saving(_LONG_STEPS, _LONG_SAVE_EVERY, "--restarts", "20")
        for step in range(_LONG_KILL_EVERY, _LONG_STEPS, _LONG_KILL_EVERY):
            training.until(lambda step=step: training.step >= step, within_s=_LONGEST_S)
            memory.append(_memory(training))
            training.send([draw.choice(training.processes("member"))], KILL)
        failures = training.end(0, _LONGEST_S)
        took_s = time.monotonic() - begun_s
        failures += training.left()
        failures = failures or training.differences(stage.trained(plan, _LONG_STEPS))
        if training.told.count("restart ") != len(memory):
            failures.append(f"{training.told.count('restart ')} restarts")
    if took_s > _LONGEST_S:
        failures.append(f"it took {took_s:.0f} s")
    failures += [
        f"{who} held {memory[0][who]} bytes first, {memory[-1][who]} in the end"
        for who in memory[0]
        if memory[-1][who] - memory[0][who] > _GROWTH_BYTES
    ]
    held = ", ".join(f"{who} {_mb(memory[0], who)} to {_mb(memory[-1], who)} MB" for who in memory[0])
    return Outcome(
        "ranks", f"{len(memory)} times", failures=tuple(failures), figures=f"{took_s:.0f} s, {held}"
    )


def _memory(training: Training) -> dict[str, int]:
    assert training.launcher is not None
    members = {member.name: member.process for member in training.processes("member")}
    found: Mapping[str, int] = {"launcher": training.launcher.pid} | dict(sorted(members.items()))
    return {name: held_by(process).memory_bytes for name, process in found.items()}


def _mb(memory: Mapping[str, int], who: str) -> int:
    return round(memory[who] / 2**20)
