"""Try every model, one after another, and append what came of it to a file of JSON lines: resumable.

python -m tests.peers.zoo.run CACHE RESULTS.jsonl [--models A,B] [--variants raw] [--limit-s 120] [--thorough]
"""

import argparse
import dataclasses
import json
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from tests.peers.zoo.catalogue import MODELS
from tests.peers.zoo.trial import Attempt, Record, Trial, trials_of


class TooLong(Exception):
    """A trial took longer than it may."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Interrupt what takes longer than this."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run_trial(trial: Trial, cache: Path, limit_s: int = 120, keep: Path | None = None) -> Record:
    """Run one trial in a folder that is removed afterwards; what failed is left under `keep`."""
    scratch = Path(tempfile.mkdtemp(prefix="zoo-"))
    try:
        with limited(limit_s):
            record = Attempt(MODELS[trial.model], trial, cache, scratch).run()
        if keep is not None and record.outcome == "failed":
            _keep(scratch, keep / trial.label)
        return record
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _keep(scratch: Path, kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name in ("train.onnx", "asked.json", "out/strategy.json"):
        if (scratch / name).exists():
            shutil.copy(scratch / name, kept / Path(name).name)


def as_json(record: Record) -> str:
    """Return a record as one line."""
    return json.dumps(dataclasses.asdict(record))


def read_records(path: Path) -> list[Record]:
    """Read the records of a file, the last one of each trial."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        raw = json.loads(line)
        trial = Trial(**raw.pop("trial"))
        raw |= {key: tuple(raw[key]) for key in ("refusals", "departures")}
        found[trial] = Record(trial, **raw)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--variants", default="optimised,raw,perturbed")
    parser.add_argument("--limit-s", type=int, default=120)
    parser.add_argument("--keep", type=Path, help="folder for the training graphs of what failed")
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--again", default="", help="run trials of this outcome once more, such as failed")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    names = (
        asked.models.split(",")
        if asked.models
        else [n for n in MODELS if (asked.cache / f"{n}.json").exists()]
    )
    again = asked.again.split(",")
    done = {record.trial for record in read_records(asked.results) if record.outcome not in again}
    every = {name: trials_of(name, asked.thorough) for name in names}
    longest = max(map(len, every.values()))
    rounds = [t for turn in range(longest) for name in names for t in every[name][turn : turn + 1]]
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    with asked.results.open("a") as file:
        for trial in rounds:
            if trial in done or trial.variant not in asked.variants.split(","):
                continue
            record = run_trial(trial, asked.cache, asked.limit_s, asked.keep)
            print(as_json(record), file=file, flush=True)
            told = record.message.splitlines()[:1]
            print(
                record.outcome,
                record.stage,
                f"{record.seconds}s",
                *dataclasses.astuple(trial),
                told,
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
