"""A checkpoint is damaged, or there is no room for one: the one before is used, and that is said."""

import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from partc.runtime.checkpoints.manifest import COMMIT_FILE, MANIFEST_FILE, folder_of, steps_in
from tests.chaos.faults import KILL
from tests.chaos.stage import Stage
from tests.chaos.training import Outcome, Training

MEANWHILE, AFTER_ITS_END = "room again meanwhile", "room again after its end"
ROOM = (MEANWHILE, AFTER_ITS_END)
_DISK = "8m"
_CHECKPOINTS = 3


def _flip_a_byte(folder: Path, draw: random.Random) -> None:
    path = draw.choice([path for path in _read_files(folder) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    # The last byte of COMMIT ends its line: what stands before is what is read.
    content[draw.randrange(len(content) - (path.name == COMMIT_FILE))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _truncate(folder: Path, draw: random.Random) -> None:
    path = draw.choice([path for path in _read_files(folder) if path.stat().st_size])
    shorter = path.stat().st_size - (2 if path.name == COMMIT_FILE else 1)
    os.truncate(path, draw.randint(0, shorter))


def _remove(folder: Path, draw: random.Random) -> None:
    draw.choice(_read_files(folder)).unlink()


def _read_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), folder / MANIFEST_FILE, folder / COMMIT_FILE])


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a bit flipped": _flip_a_byte,
    "a file truncated": _truncate,
    "a file removed": _remove,
}


def resume_after(how: str, stage: Stage, draw: random.Random) -> Outcome:
    """Kill a training, damage its newest checkpoint, and resume."""
    bench = stage.bench("AllReduce")
    with Training(bench.plan, stage.case_folder()) as training:
        training.begin_saving(bench.steps, bench.save_every)
        training.until(lambda: len(steps_in(training.checkpoints)) >= _CHECKPOINTS)
        training.kill_launcher()
        failures = training.end(-KILL) + training.left()
        *_, before, newest = steps_in(training.checkpoints)
        DAMAGES[how](training.checkpoints / folder_of(newest), draw)
        training.begin_saving(bench.steps, bench.save_every, "--resume")
        failures += training.end(0)
        if f"the checkpoint of step {before} is used" not in training.told:
            failures.append(
                f"nobody said that the checkpoint of step {before} is used: {training.told[-600:]}"
            )
        failures = failures or training.differences(bench.expected)
        return Outcome(f"the checkpoint of step {newest}", failures=tuple(failures))


def fill_the_disk(when: str, stage: Stage, draw: random.Random) -> Outcome:
    """Fill the disk of checkpoints; make room again as ROOM says: before its end, or after."""
    bench = stage.bench("AllReduce")
    with Training(bench.plan, stage.case_folder()) as training:
        training.checkpoints.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "full", str(training.checkpoints)], check=True
        )
        try:
            training.begin_saving(bench.steps, bench.save_every)
            training.until(lambda: len(steps_in(training.checkpoints)) >= 2)
            filler = training.checkpoints / "filler"
            _fill(filler)
            training.until(lambda: "training goes on" in training.told)
            failures = (
                [] if "No space left on device" in training.told else ["nobody said that the disk is full"]
            )
            if when == MEANWHILE:
                filler.unlink()
                failures += training.end(0)
            else:
                failures += training.end(2)
                filler.unlink()
                training.begin_saving(bench.steps, bench.save_every, "--resume")
                failures += training.end(0)
            failures = failures or training.differences(bench.expected)
            failures += [training.told[-800:]] if failures else []
            return Outcome("the disk", failures=tuple(failures))
        finally:
            time.sleep(0.2)
            subprocess.run(["umount", "--lazy", str(training.checkpoints)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1 << 16))
        except OSError:
            return
