"""A sample of `make fuzz`, and its own judgement: what breaks a promise is told."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest

from partc.compiler.verification.verify import VerifyReport
from partc.cost.strategy import MESH_STRATEGY_FORMAT
from tests.builders.graphs.foreign_steps import SGD
from tests.fuzz import run_case as run_module
from tests.fuzz.bases import CLUSTER, step_with_zeros
from tests.fuzz.cases import Case
from tests.fuzz.run_case import DIFFERS, run_case

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_damaged_files_are_refused_or_answered() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "300", "--seed", "12"]

    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert run.returncode == 0, run.stdout + run.stderr


def test_what_is_left_behind_and_who_is_not_named_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "case"
    folder.mkdir()

    refused = run_case(Case("model", ("inspect", "gone.onnx"), "gone.onnx"), folder, tmp_path / "log")
    unnamed = run_case(Case("model", ("inspect", "gone.onnx"), "other.onnx"), folder, tmp_path / "log")

    assert (refused.code, refused.failures) == (2, ())
    assert unnamed.failures[0].startswith("the file is not named: partc: no such file")


def test_a_plan_that_trains_otherwise_than_one_device_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    onnx.save(step_with_zeros(SGD, "W"), folder / "m.onnx")
    strategy = {"format": MESH_STRATEGY_FORMAT, "batch": "global", "parameters": {}, "mesh": {"tensor": 4}}
    (folder / "s.json").write_text(json.dumps(strategy))
    arguments = ("compile", "m.onnx", "-c", str(CLUSTER), "-o", "out", "--strategy", "s.json")
    case = Case("mesh", arguments, "s.json", verified=True)

    right = run_case(case, folder, tmp_path / "log")
    shutil.rmtree(folder / "out")
    monkeypatch.setattr(run_module, "verify", partial(_with_copies_that_differ, run_module.verify))
    wrong = run_case(case, folder, tmp_path / "log")

    assert (right.code, right.failures) == (0, ())
    assert wrong.code == DIFFERS
    (failure,) = wrong.failures
    assert failure.startswith("trained otherwise than on one device: ")


def _with_copies_that_differ(
    verify: Callable[..., VerifyReport], *arguments: Any, **options: Any
) -> VerifyReport:
    return replace(verify(*arguments, **options), disagreeing=("W",))
