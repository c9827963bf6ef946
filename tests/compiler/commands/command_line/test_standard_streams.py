"""Commands whose stdout nobody reads, or cannot be written: each in a process of its own."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from partc.runtime.jobs.results import TRAINED_FILE
from tests.checks.command_line import PAIR, done, make_mlp

PARTC = (sys.executable, "-m", "partc")
STREAMS = "partc.compiler.commands.command_line.standard_streams"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny perceptron, compiled into out/."""
    folder = make_mlp(tmp_path_factory.mktemp("streams"))
    done("compile", folder / "train.onnx", "-c", PAIR, "-o", folder / "out")
    return folder


def ended(folder: Path, *words: str, stdout: int) -> tuple[int, str]:
    """Run a command there, and return its exit code and what it said on stderr."""
    process = subprocess.run(words, cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return process.returncode, process.stderr


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("ops --json", ""),
        (f"compile train.onnx -c {PAIR} -o new", "new/plan.json"),
        ("run out --steps 2 --save-every 1", f"out/{TRAINED_FILE}"),
    ],
)
def test_what_nobody_reads_any_more_is_dropped_and_the_work_finished(
    folder: Path, command: str, written: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(folder, *PARTC, *command.split(), stdout=writing) == (0, "")
    finally:
        os.close(writing)

    assert (folder / written).exists()


def test_a_closed_stdout_is_as_one_that_nobody_reads(folder: Path) -> None:
    closed = ("sh", "-c", 'exec "$@" >&- <&-', "sh", *PARTC)

    compiled = ended(
        folder, *closed, *f"compile train.onnx -c {PAIR} -o closed".split(), stdout=subprocess.DEVNULL
    )

    assert compiled == (0, "")
    assert json.loads((folder / "closed" / "plan.json").read_text())


@pytest.mark.parametrize("command", ["simulate out", "simulate out --json", "--version", "--help"])
def test_a_stdout_without_room_is_named_once(folder: Path, command: str) -> None:
    with open("/dev/full", "w") as full:
        code, error = ended(folder, *PARTC, *command.split(), stdout=full.fileno())

    assert code == 2
    assert error.startswith("partc: No space left on device\n  at:  standard output\n  fix: ")
    assert error.count("\n") == 3


def test_a_training_goes_on_where_its_stdout_has_no_room(folder: Path) -> None:
    done("compile", folder / "train.onnx", "-c", PAIR, "-o", folder / "full")

    with open("/dev/full", "w") as full:
        code, error = ended(folder, *PARTC, "run", "full", "--steps", "4", stdout=full.fileno())

    assert (code, error.count("at:  standard output")) == (2, 1)
    assert (folder / "full" / TRAINED_FILE).is_file()


def test_a_stderr_without_room_changes_no_exit_code(folder: Path) -> None:
    full = ("sh", "-c", 'exec "$@" 2>/dev/full', "sh", *PARTC)

    assert ended(folder, *full, "simulate", "nowhere", stdout=subprocess.DEVNULL) == (2, "")


def test_a_terminal_that_is_closed_ends_nothing() -> None:
    program = (
        f"import sys\nfrom {STREAMS} import outlast_readers\noutlast_readers()\n"
        "print('begun', flush=True)\ninput()\nprint('on', flush=True)\nprint('done', file=sys.stderr)"
    )
    terminal, shown = pty.openpty()
    process = subprocess.Popen(
        (sys.executable, "-c", program),
        stdin=subprocess.PIPE,
        stdout=shown,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(shown)
    assert os.read(terminal, 5) == b"begun"

    os.close(terminal)
    _, error = process.communicate("\n")

    assert (process.returncode, error) == (0, "done\n")
