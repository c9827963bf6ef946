"""The tutorial does what it says: its commands in order, and the figures that no machine has a part in."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT, commands, script, table

PAGE = ROOT / "docs" / "tutorial.md"
FOLDERS = {"data=4": "out-data", "tensor=4": "out-tensor", "pipeline=2,data=2,microbatches=4": "out-pipeline"}


def call(folder: Path, *arguments: str) -> str:
    """Run partc in a folder, and return what it printed. Fails where the command does."""
    done = subprocess.run(
        [sys.executable, "-m", "partc", *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def written(folder: Path, batch: int) -> None:
    """Write the tutorial's network with a batch of this size."""
    net = script(PAGE).replace("batch, sizes = 64,", f"batch, sizes = {batch},")
    subprocess.run([sys.executable, "-c", net], cwd=folder, check=True, timeout=120)


def predicted_ms(printed: str) -> float:
    """Return the step that compile says it predicts."""
    found = re.search(r"([\d.,]+) ms/step predicted", printed)
    assert found, printed
    return float(found[1].replace(",", ""))


@pytest.mark.long
def test_the_tutorial_runs_as_printed_and_predicts_what_it_says(tmp_path: Path) -> None:
    written(tmp_path, 64)
    said = {row[0]: float(row[2].removesuffix(" ms")) for row in table(PAGE, "predicted, a step")}
    losses = {row[0]: float(row[1]) for row in table(PAGE, "loss after 100 steps")}

    for command in commands(PAGE):
        printed = call(tmp_path, *command.arguments)
        folder = command.arguments[-1]
        if command.arguments[0] == "compile":
            assert predicted_ms(printed) == pytest.approx(said[folder], rel=0.01)
        if command.arguments[0] == "run":
            reached = (tmp_path / command.arguments[1] / "metrics.jsonl").read_text().splitlines()[-1]
            loss = re.search(r'"loss":([\d.]+)', reached)
            assert loss and float(loss[1]) == pytest.approx(losses[command.arguments[1]], abs=0.02)

    assert (tmp_path / "found.json").is_file()


@pytest.mark.long
@pytest.mark.parametrize("batch", [64, 512, 4096])
def test_the_batch_decides_as_the_tutorial_says(batch: int, tmp_path: Path) -> None:
    head = ["data=4", "tensor=4", "pipeline=2,data=2,microbatches=4"]
    row = next(row for row in table(PAGE, "batch") if row[0] == f"{batch:,}")
    said = [float(cell.strip("*").removesuffix(" ms").replace(",", "")) for cell in row[1:]]
    written(tmp_path, batch)
    call(
        tmp_path,
        "grad",
        "net.onnx",
        "--loss",
        "softmax_cross_entropy",
        "--optimizer",
        "adamw",
        "-o",
        "train.onnx",
    )

    for strategy, step_ms in zip(head, said, strict=True):
        printed = call(
            tmp_path, "compile", "train.onnx", "-c", str(ROOT / "examples" / "cluster-2x2.json"),
            "--batch", "global", "--strategy", strategy, "-o", FOLDERS[strategy],
        )  # fmt: skip
        assert predicted_ms(printed) == pytest.approx(step_ms, rel=0.02)
