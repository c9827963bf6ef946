"""A sample of `make fuzz`, and its own judgement: what breaks a promise is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.cases import Case
from tests.fuzz.run_case import run_case

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
