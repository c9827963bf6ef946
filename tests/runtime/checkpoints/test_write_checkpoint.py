"""Checkpoints are written whole or not at all, wherever writing ends."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from partc.runtime.checkpoints.manifest import TrainingPosition, folder_of, newest_checkpoint, steps_in
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.checkpoints.write_checkpoint import (
    CheckpointWriter,
    pieces_of_ranks,
    remove_parts,
    writers_of,
)
from partc.runtime.plan.boxes import take
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Plan
from tests.builders.plans.boxed_plans import LAYOUTS, SHAPE, boxed_momentum
from tests.builders.plans.linear_plans import linear_all_reduce


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two replicas of three ranks, which hold boxes."""
    return read_plan_folder(boxed_momentum(tmp_path / "out", LAYOUTS["grid"], 2)).plan


def values_at(plan: Plan, rank: int, step: int) -> Callable[[str], np.ndarray]:
    """Return a rank's values after a step: of a whole variable that differs from step to step."""
    held = {h.value: h for r in plan.ranks if r.rank == rank for h in r.pieces}

    def read(value: str) -> np.ndarray:
        variable = held[value].variable
        whole = np.array(step) if variable == "count" else whole_at(variable, step)
        return take(whole, held[value].box)

    return read


def whole_at(variable: str, step: int) -> np.ndarray:
    return np.arange(24.0).reshape(SHAPE) + step * (10 if variable == "w" else 100)


def write(plan: Plan, checkpoints: Path, step: int, keep: int = 3) -> list[CheckpointWriter]:
    """Let all ranks write, the first of them last."""
    job, pieces = checkpoints.parent, pieces_of_ranks(plan)
    writers = [
        CheckpointWriter(plan, rank.rank, checkpoints, keep, pieces, job) for rank in reversed(plan.ranks)
    ]
    for writer, rank in zip(writers, reversed(plan.ranks), strict=True):
        writer.begin(values_at(plan, rank.rank, step), TrainingPosition(step, 0, step, None, ""))
    succeeded = [writer.wait_for_own() for writer in writers]
    for writer in writers:
        writer.finish(is_given_up=not all(succeeded))
    return writers


def test_the_last_rank_is_not_surprised_by_the_commit_that_its_file_allows(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def replace_and_be_slow(path: Path, target: Path) -> Path:
        """Let the first rank commit as soon as it sees the last rank's file."""
        replaced = replace(path, target)
        if target.name == "rank-1.json":
            deadline_s = time.monotonic() + 10
            while not steps_in(tmp_path / "kept") and time.monotonic() < deadline_s:
                time.sleep(0.005)
        return replaced

    monkeypatch.setattr(Path, "replace", replace_and_be_slow)

    writers = write(plan, tmp_path / "kept", 1)

    assert [writer.fault for writer in writers] == [None] * len(plan.ranks)
    assert steps_in(tmp_path / "kept") == [1]


def test_every_part_is_written_once_and_the_oldest_go(plan: Plan, tmp_path: Path) -> None:
    for step in range(1, 6):
        write(plan, tmp_path / "kept", step, keep=2)

    assert steps_in(tmp_path / "kept") == [4, 5]
    newest, faults = newest_checkpoint(tmp_path / "kept")
    assert newest is not None
    assert not faults
    stored = StoredValues(newest)
    for variable in ("w", "v"):
        np.testing.assert_array_equal(stored.part(variable), whole_at(variable, 5))
    assert stored.part("count") == 5
    written = [piece for file in stored.manifest.files.values() for piece in file.pieces]
    assert len(written) == len(set(written)) == 7


def test_ranks_that_hold_copies_share_the_writing(tmp_path: Path) -> None:
    four = read_plan_folder(boxed_momentum(tmp_path / "out", LAYOUTS["whole"], 4)).plan

    owners = {name: owner.rank for name, (owner,) in writers_of(four).items()}

    assert len({owners["w"], owners["v"]}) == 2


class Ended(BaseException):
    """As if the process had ended here."""


@contextmanager
def ending_at(call: int) -> Iterator[list[int]]:
    """Let the process end at its `call`-th change of a disk; yields how many there were."""
    calls = [0]

    def ends(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] >= call:
                raise Ended
            return real(*given, **named)

        return change

    with (
        mock.patch.object(Path, "replace", ends(Path.replace)),
        mock.patch.object(Path, "rename", ends(Path.rename)),
        mock.patch.object(Path, "mkdir", ends(Path.mkdir)),
        mock.patch.object(Path, "write_bytes", ends(Path.write_bytes)),
        mock.patch.object(Path, "open", ends(Path.open)),
        mock.patch.object(os, "fsync", ends(os.fsync)),
        mock.patch.object(shutil, "rmtree", ends(shutil.rmtree)),
    ):
        yield calls


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_wherever_it_ends_the_earlier_one_stays_or_the_new_one_is_whole(tmp_path: Path) -> None:
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", 1)).plan
    found = set()
    for call in range(1, 40):
        checkpoints = tmp_path / str(call)

        def begin(step: int, folder: Path = checkpoints) -> None:
            writer = CheckpointWriter(plan, 0, folder, 1, pieces_of_ranks(plan), tmp_path)
            writer.begin(lambda _: np.full((3, 2), float(step)), TrainingPosition(step, 0, step, None, ""))
            writer.finish(is_given_up=False)

        begin(1)
        with ending_at(call) as calls:
            begin(2)
        remove_parts(checkpoints)
        newest, faults = newest_checkpoint(checkpoints)
        assert newest is not None, call
        step = StoredValues(newest).manifest.position.step
        np.testing.assert_array_equal(StoredValues(newest).part("W"), np.full((3, 2), float(step)))
        assert not faults
        found.add(step)
        if calls[0] < call:
            break
    assert found == {1, 2}
    assert calls[0] > 8


def test_a_rank_that_cannot_write_leaves_the_earlier_one(plan: Plan, tmp_path: Path) -> None:
    write(plan, tmp_path / "kept", 1)
    real = Path.open

    def full(path: Path, *given: Any, **named: Any) -> Any:
        if "rank-4" in path.name:
            raise OSError(28, "No space left on device")
        return real(path, *given, **named)

    with mock.patch.object(Path, "open", full):
        writers = write(plan, tmp_path / "kept", 2)

    told = [str(writer.fault) for writer in writers if writer.fault]
    assert len(told) == 1 and "No space left on device" in told[0] and "rank-4.safetensors" in told[0]
    assert newest_checkpoint(tmp_path / "kept") == (tmp_path / "kept" / folder_of(1), [])
    write(plan, tmp_path / "kept", 3)
    assert newest_checkpoint(tmp_path / "kept") == (tmp_path / "kept" / folder_of(3), [])


def test_who_outlives_its_job_commits_nothing(tmp_path: Path) -> None:
    """A rank that was stopped goes on when its successors have saved the same step."""
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", 1)).plan
    jobs = [tmp_path / name for name in (".run-first", ".run-second")]
    for job in jobs:
        job.mkdir()
    pieces = pieces_of_ranks(plan)
    first, second = (CheckpointWriter(plan, 0, tmp_path / "kept", 1, pieces, job) for job in jobs)
    position = TrainingPosition(2, 0, 2, None, "")

    second.begin(lambda _: np.full((3, 2), 2.0), position)
    assert second.finish(is_given_up=False)
    jobs[0].rmdir()
    first.begin(lambda _: np.full((3, 2), 1.0), position)

    assert not first.finish(is_given_up=False)
    np.testing.assert_array_equal(
        StoredValues(tmp_path / "kept" / folder_of(2)).part("W"), np.full((3, 2), 2.0)
    )
