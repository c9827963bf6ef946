"""The mixture of experts, held against words that visit their experts one by one."""

from pathlib import Path

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.models.catalogue import ModelRequestError, ParameterCount, build_model, count_parameters
from partc.runtime.plan.boxes import local_shape
from tests.builders.graphs.forward_models import run_with_parameters
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.models.test_flexflow_rnns import cross_entropy, embedded, lstm, softmax

BATCH, STEPS, CELLS, EXPERTS, CHOSEN = 3, 4, 6, 5, 2
SMALL = {
    "vocab": 20, "cells": CELLS, "steps": STEPS, "experts": EXPERTS, "chosen": CHOSEN, "expert_cells": 7,
    "dtype": "float64", "batch": BATCH,
}  # fmt: skip


def routed(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Send every word of x [n, H] to its experts alone, and add what they answer, [n, H]."""
    mixed = np.zeros_like(x)
    for number, word in enumerate(x):
        logits = word @ w["gate.weight"]
        best = np.argsort(-logits)[:CHOSEN]
        for expert, gate in zip(best, softmax(logits[best]), strict=True):
            hidden = word @ w["experts.input_weight"][expert] + w["experts.input_bias"][expert, 0]
            answer = np.maximum(hidden, 0) @ w["experts.output_weight"][expert]
            mixed[number] += gate * (answer + w["experts.output_bias"][expert, 0])
    return mixed


def imbalance(w: dict[str, np.ndarray], x: np.ndarray) -> float:
    logits = x @ w["gate.weight"]
    chosen = np.zeros_like(logits)
    np.put_along_axis(chosen, np.argsort(-logits, axis=1)[:, :CHOSEN], 1, axis=1)
    return EXPERTS / CHOSEN * float((chosen.mean(axis=0) * softmax(logits).mean(axis=0)).sum())


@pytest.mark.parametrize("balance", [1, 100])
def test_the_loss_is_that_of_words_sent_to_their_experts(balance: int) -> None:
    model = build_model("moe", **SMALL, balance=balance)
    x, y = (np.random.default_rng(seed).integers(0, 20, (BATCH, STEPS)) for seed in (0, 1))

    loss, w = run_with_parameters(model, "loss", {"x": x, "y": y})

    first = (np.zeros((BATCH, CELLS)), np.zeros((BATCH, CELLS)))
    below, _ = lstm(w, "below", embedded(w["embedding"], x), first)
    above, _ = lstm(w, "above", [h + routed(w, h) for h in below], first)
    of_words = cross_entropy([h @ w["output.weight"] + w["output.bias"] for h in above], y)
    expected = of_words + imbalance(w, np.concatenate(below)) / balance
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


def test_parameters_number_as_the_sizes_say() -> None:
    """10,000 words, two LSTMs of 512 that read 512, 32 experts of 1,024, a gate, and the output."""
    experts = 32 * (2 * 512 * 1024 + 1024 + 512)
    dense = 2 * 4 * 512 * (512 + 512 + 1) + 512 * 32 + experts + 512 * 10_000 + 10_000

    assert count_parameters(build_model("moe")) == ParameterCount(dense=dense, sparse=10_000 * 512)


def test_a_word_cannot_have_more_experts_than_there_are() -> None:
    with pytest.raises(ModelRequestError, match="5 experts chosen of 4"):
        build_model("moe", experts=4, chosen=5)


def test_experts_may_live_on_devices_of_their_own(tmp_path: Path) -> None:
    """Two replicas of two workers, each worker keeping, computing and updating half of the experts."""
    forward = build_model("moe", **{**SMALL, "experts": 4, "batch": 4})
    step = build_training_graph(forward, loss="loss", optimizer=SGD(0.5))
    kinds = [f"experts.{side}_{kind}" for side in ("input", "output") for kind in ("weight", "bias")]
    strategy = Strategy(
        STRATEGY_FORMAT,
        "global",
        {},
        mesh={"data": 2, "experts": 2},
        variables={name: {"experts": AxisSplit(0)} for name in kinds},
        ops=tuple(
            OpConfig(f"MatMul:experts.{side}", {"out:0": "experts", "out:1": "data"})
            for side in ("hidden", "output")
        ),
    )

    done = compile_step(import_training_graph(step), tmp_path / "out", "2x2", strategy, "global")

    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=20))
    kept = [piece for rank in done.plan.ranks for piece in rank.pieces if piece.variable == kinds[0]]
    assert [local_shape((4, CELLS, 7), piece.box) for piece in kept] == [(2, CELLS, 7)] * 4
