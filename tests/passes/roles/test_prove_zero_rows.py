"""Which optimizers' sparse updates may be given rows of zero gradient: checked by proof, and by numbers."""

from pathlib import Path

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adam import Adam
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.roles.prove_zero_rows import ignores_zero_rows
from partc.runtime.errors import BadStrategy
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    forced,
    random_batches,
)


def lm_step(optimizer: Optimizer, clip: float | None = None) -> TrainingGraph:
    options = {"vocab": 40, "embedding": 4, "cells": 6, "projection": 4, "steps": 3, "samples": 5, "batch": 4}
    forward = build_model("lm", dtype="float64", **options)
    train = build_training_graph(forward, loss="loss", optimizer=optimizer, clip_global_norm=clip)
    return import_training_graph(train)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), Momentum(0.1), Adagrad(0.1), Adam(0.1)], ids=lambda o: type(o).__name__
)
def test_updates_that_equal_their_dense_form_may_be_all_reduced(
    optimizer: Optimizer, clip: float | None
) -> None:
    step = lm_step(optimizer, clip)

    assert [ignores_zero_rows(step, name) for name in ("embedding", "softmax.weight", "softmax.bias")] == [
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("optimizer", [Momentum(0.1, lazy=True), Adam(0.1, lazy=True)])
def test_updates_of_read_rows_alone_may_not(optimizer: Optimizer) -> None:
    assert not ignores_zero_rows(lm_step(optimizer), "embedding")


@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.long), "allreduce", "ps"])
def test_a_lazy_update_trains_as_on_one_device(strategy: str, tmp_path: Path) -> None:
    compiled = compile_step(lm_step(Momentum(0.1, lazy=True)), tmp_path / "out", "2x2", strategy, "global")

    assert compiled.methods["embedding"] in ("all_gather", "servers")
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))


def test_a_lazy_update_cannot_be_asked_to_be_all_reduced(tmp_path: Path) -> None:
    strategy = forced({"embedding": "all_reduce"}, {"embedding": 40}, 2, "global")

    with pytest.raises(BadStrategy, match="lazy"):
        compile_step(lm_step(Momentum(0.1, lazy=True)), tmp_path / "out", "2x2", strategy, "global")
