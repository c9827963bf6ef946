"""A language model learns the text of Python's own documentation: on N ranks as on one, to the same loss.

benchmarks/convergence.py does it at length, over MPI, and on images too.
"""

import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.runtime.execution.in_process import train_in_process
from tests.builders.plans.compiled_steps import compile_step

VOCAB, STEPS, BATCH, UPDATES = 60, 6, 8, 40


@pytest.fixture(scope="module")
def batches() -> list[dict[str, np.ndarray]]:
    words = re.findall(r"[a-z]+", topics["assignment"].lower())
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(VOCAB - 1), 1)}
    ids = np.array([known.get(word, 0) for word in words])
    starts = np.random.default_rng(0).integers(0, len(ids) - STEPS - 1, (UPDATES, BATCH, 1))
    places = starts + np.arange(STEPS)
    return [{"x": ids[place], "y": ids[place + 1]} for place in places]


def losses(batches: list[dict[str, np.ndarray]], cluster: str, strategy: str, folder: Path) -> np.ndarray:
    sizes = {"vocab": VOCAB, "embedding": 8, "cells": 16, "layers": 2, "steps": STEPS}
    forward = build_model("rnnlm", **sizes, batch=BATCH, dtype="float64")
    step = build_training_graph(forward, loss="loss", optimizer=Adagrad(0.2))
    done = compile_step(import_training_graph(step), folder / "out", cluster, strategy, "global")
    found = train_in_process(done.folder, batches).outputs
    return np.array([float(outputs["loss"]) for outputs in found])


@pytest.fixture(scope="module")
def alone(batches: list[dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return losses(batches, "1x1", "hybrid", tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [
        ("2x1", "hybrid"),
        pytest.param("2x2", "data=2,tensor=2", marks=pytest.mark.long),
        pytest.param("2x2", "hybrid", marks=pytest.mark.long),
    ],
)
def test_ranks_reach_the_loss_of_one_device(
    batches: list[dict[str, np.ndarray]], alone: np.ndarray, cluster: str, strategy: str, tmp_path: Path
) -> None:
    together = losses(batches, cluster, strategy, tmp_path)

    np.testing.assert_allclose(together, alone, rtol=1e-9)
    assert together[-5:].mean() < 0.8 * together[0]
