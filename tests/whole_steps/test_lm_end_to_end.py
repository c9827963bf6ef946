"""The paper's language model: at its full size through the compiler, small through training."""

import subprocess
import sys
from pathlib import Path

import pytest

from partc.cost.strategy import read_strategy
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.checks.command_line import EXAMPLES, PAIR, done

TABLES = {"embedding", "softmax.weight"}
UPDATE = ("--loss", "loss", "--optimizer", "adagrad", "--lr", "0.2", "--clip-global-norm", "10")
SMALL = {"vocab": 2000, "embedding": 32, "cells": 32, "projection": 32, "steps": 4, "samples": 32, "batch": 4}


# A process begins with the peak of the one that starts it, which for a test is pytest's: one more is between.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_bytes(*arguments: object) -> int:
    """Run `partc` in a process of its own, and return the most memory that it had."""
    partc = [sys.executable, "-m", "partc.compiler.commands.cli", *map(str, arguments)]
    said = subprocess.run([sys.executable, "-c", MEASURE, *partc], check=True, capture_output=True, text=True)
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux
    return int(said.stdout) * scale


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
def test_the_papers_size_compiles_for_48_gpus_in_little_memory_and_room(tmp_path: Path) -> None:
    forward, train, out = tmp_path / "lm.onnx", tmp_path / "train.onnx", tmp_path / "out"
    done("model", "lm", "-o", forward)
    graph = peak_bytes("grad", forward, *UPDATE, "-o", train)
    cluster = EXAMPLES / "cluster-8x6-titanxp.json"

    plan = peak_bytes(
        "compile", train, "-c", cluster, "--strategy", "hybrid", "--size", "batch=128", "-o", out
    )

    assert 1e8 < max(graph, plan) < 2e9
    assert folder_bytes(out) < 50e6
    chosen = read_strategy(out / "strategy.json").parameters
    assert {name for name, choice in chosen.items() if choice.method == "servers"} >= TABLES
    variables = {variable.name: variable.shape for variable in read_plan_folder(out).plan.variables}
    assert all(variables[table] == (800_000, 512) for table in TABLES)
    assert all(
        {shard.host for shard in chosen[table].shards} <= {f"host{h}" for h in range(8)} for table in TABLES
    )
    assert len(read_plan_folder(out).plan.ranks) == 8 * 6 + 8


@pytest.mark.parametrize("batch", ["per-replica", pytest.param("global", marks=pytest.mark.long)])
def test_a_small_one_trains_on_daemons_with_hybrid_communication(tmp_path: Path, batch: str) -> None:
    forward, train, out = tmp_path / "lm.onnx", tmp_path / "train.onnx", tmp_path / "out"
    options = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    done("model", "lm", *options, "-o", forward)
    done("grad", forward, *UPDATE, "-o", train)
    done("compile", train, "-c", PAIR, "--strategy", "hybrid", "--batch", batch, "-o", out)
    methods = {name: c.method for name, c in read_strategy(out / "strategy.json").parameters.items()}
    assert {name for name, method in methods.items() if method == "servers"} >= TABLES
    assert methods["lstm.input_weight"] == "all_reduce"

    done("run", out, "--steps", "5")

    assert "all 14 variables equal" in done("verify", out, "--steps", "3")
