"""The demonstration: a language model's whole road, command by command.

Every step is a command that the reader could type; it is printed, then executed. `make demo` runs
this from the repository's root.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from partc.runtime.jobs.results import TRAINED_FILE

FOLDER = Path("demo")
CLUSTER = Path("examples") / "cluster-2x2.json"

# The paper's model, small enough for a laptop. The vocabulary stays large next to a step's words:
# that is what makes its tables sparse.
MODEL_OPTIONS = {
    "vocab": 50_000,
    "embedding": 64,
    "cells": 128,
    "projection": 64,
    "steps": 8,
    "samples": 256,
    "batch": 16,
}


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One command of `partc`, and what it is for."""

    narration: str
    arguments: tuple[str, ...]

    @property
    def command_line(self) -> str:
        """Return the command as a reader would type it."""
        return " ".join(["partc", *self.arguments])


def steps(folder: Path) -> tuple[DemoStep, ...]:
    """List the demonstration's commands, which write below `folder`."""
    forward, train, out = (str(folder / name) for name in ("forward.onnx", "train.onnx", "out"))
    options = [part for key, value in MODEL_OPTIONS.items() for part in ("--set", f"{key}={value}")]
    # Adagrad that starts from little: steps are then far larger than rounding, and so is the proof.
    update: tuple[str, ...] = ("--optimizer", "adagrad", "--set-optimizer", "initial_accumulator=1e-6")
    again = ("--force",) if (folder / "out" / TRAINED_FILE).exists() else ()
    update += ("--lr", "0.01", "--clip-global-norm", "10")
    return (
        DemoStep(
            "A language model's forward pass, as an ONNX graph: two big tables and an LSTM.",
            ("model", "lm", *options, "-o", forward),
        ),
        DemoStep(
            "One training step on one device: the forward pass, its gradients, clipping, the update.",
            ("grad", forward, "--loss", "loss", *update, "-o", train),
        ),
        DemoStep(
            "What is in it: a step touches few rows of the tables, so their gradients are sparse.",
            ("inspect", train),
        ),
        DemoStep(
            "Spread it over 2 hosts of 2 workers: each variable's way such that the whole step is quickest.",
            ("compile", train, "-c", str(CLUSTER), "-o", out, *again),
        ),
        DemoStep(
            "Train on random words: mpiexec starts a daemon per device, each runs its own ONNX segments.",
            ("run", out, "--data", "synthetic", "--steps", "20"),
        ),
        DemoStep(
            "The proof: each step on one device, in plain ONNX Runtime, ends in the same variables.",
            ("verify", out, "--steps", "5"),
        ),
    )


def demonstrate(execute: Callable[[DemoStep], int], folder: Path = FOLDER) -> int:
    """Narrate and execute every step; stop at the first that fails, and return its exit code."""
    console = Console(highlight=False, soft_wrap=True)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    todo = steps(folder)
    for number, step in enumerate(todo, start=1):
        console.print(f"\n[bold]{number}/{len(todo)}[/bold]  {step.narration}")
        console.print(f"[dim]$ {step.command_line}[/dim]")
        if code := execute(step):
            console.print(f"The demonstration stopped: `partc {step.arguments[0]}` ended with code {code}.")
            return code
    console.print(f"\nDone in {time.monotonic() - started:.0f} s. Where everything went, and why:")
    console.print(str(folder / "out" / "report.html"))
    return 0


def execute_command(step: DemoStep) -> int:
    """Run a step's command with the `partc` of this Python environment, and return its exit code."""
    program = Path(sys.executable).with_name("partc")
    return subprocess.run([program, *step.arguments], check=False).returncode


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demonstration into the folder given, or into demo/."""
    folder = Path(arguments[0]) if arguments else FOLDER
    return demonstrate(execute_command, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
