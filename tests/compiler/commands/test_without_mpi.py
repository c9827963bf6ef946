"""Only what trains needs MPI: loading it opens a port, and there may be none."""

import subprocess
import sys
from pathlib import Path

from tests.checks.command_line import CLUSTER, make_wrong_files

# One process runs all commands: none of them may import MPI.
WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # importing it fails
from partc.compiler.commands.cli import main
for command in sys.argv[1:]:
    try:
        status = main(command.split())
    except SystemExit as left:  # argparse's, behind --help
        status = left.code
    if status:
        sys.exit(f"{command}: {status}")
    print("done:", command)
"""
COMMANDS = (
    "grad forward.onnx --loss mse -o again.onnx",
    "inspect train.onnx",
    f"compile train.onnx -c {CLUSTER} -o new",
    "simulate out",
    "seal out",
    "--help",
)


def test_commands_that_train_nothing_need_no_mpi(tmp_path: Path) -> None:
    folder = make_wrong_files(tmp_path)

    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_MPI, *COMMANDS], cwd=folder, capture_output=True, text=True
    )

    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line.startswith("done:")] == [
        f"done: {command}" for command in COMMANDS
    ]
