"""README's section on PyTorch, run as it is written."""

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
SECTION = "## From PyTorch in ten lines"


def blocks() -> list[str]:
    """Return the indented blocks of the section: net.py, the shell's lines, what they print."""
    text = (ROOT / "README.md").read_text().split(f"{SECTION}\n")[1].split("\n## ")[0]
    parts = groupby(text.splitlines(), key=lambda line: line.startswith("    "))
    return ["\n".join(line[4:] for line in lines) for is_indented, lines in parts if is_indented]


def test_ten_lines_take_pytorch_to_a_trained_model(tmp_path: Path) -> None:
    program, commands, printed = blocks()
    assert len(program.splitlines()) + len(commands.splitlines()) == 10
    (tmp_path / "net.py").write_text(program)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "all 13 variables equal" in printed.splitlines()[-1]
    assert "all 13 variables equal" in done.stdout.splitlines()[-1]
    for line in printed.splitlines()[:4]:
        assert line in done.stdout
    with np.load(tmp_path / "data.npz") as data:
        session = onnxruntime.InferenceSession(tmp_path / "net" / "trained.onnx")
        (logits,) = session.run(None, {"x": data["x"][:32]})
        assert (logits.argmax(axis=1) == data["labels"][:32]).mean() > 0.9
