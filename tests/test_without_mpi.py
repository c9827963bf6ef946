"""Only what trains needs MPI: loading it opens a port, and there may be none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import CLUSTER, make_wrong_files

WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # importing it fails
from partc.compiler.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wrong_files(tmp_path_factory.mktemp("without_mpi"))


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "grad forward.onnx --loss mse -o again.onnx",
        "inspect train.onnx",
        f"compile train.onnx -c {CLUSTER} -o new",
        "simulate out",
        "seal out",
    ],
)
def test_a_command_that_trains_nothing_needs_no_mpi(folder: Path, command: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_MPI, *command.split()], cwd=folder, capture_output=True, text=True
    )

    assert run.returncode == 0, run.stderr
