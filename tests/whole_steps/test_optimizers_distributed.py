"""Every optimizer, and all that surrounds one, trains on N ranks as on one device.

In float64, four ranks on two hosts, under every strategy and both readings of the batch. The language model's
table has a sparse gradient.
"""

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adafactor import Adafactor
from partc.compiler.differentiation.updates.adam import LAMB, Adam, AdamW, RMSProp
from partc.compiler.differentiation.updates.clipping import Clipping
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum, Optimizer
from partc.compiler.differentiation.updates.schedules import CosineDecay, Warmup
from partc.compiler.differentiation.updates.update_options import ParameterGroup, UpdateOptions
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.runtime.execution.in_process import train_in_process
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches, verified
from tests.checks.training_steps import EVERYTHING
from tests.sampling import sampled

SAMPLES, STEPS = 8, 4
# Positions, as vision transformers have them: one row for all samples; and a number.
POSITIONS = """
positions (double[8,3,2] x) => (double loss)
<double[1,3,2] P = {0.1, -0.2, 0.3, 0.4, -0.5, 0.6}, double[1] b = {0.7}> {
    z = Add (x, P)
    t = Tanh (z)
    y = Mul (t, b)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""
MODELS = {
    "mlp": {"dtype": "float64", "sizes": [6, 8, 5], "batch": SAMPLES},
    "lm": {
        "dtype": "float64",
        "batch": SAMPLES,
        "vocab": 40,
        "embedding": 6,
        "cells": 6,
        "projection": 6,
        "steps": 2,
        "samples": 8,
    },
}
PLAIN = UpdateOptions()
SURROUNDED = UpdateOptions(
    clipping=Clipping(value=0.05, norm=0.04, global_norm=0.05),
    schedule=CosineDecay(6, floor=0.1),
    warmup=Warmup(2, start=0.5),
    groups=(ParameterGroup(("*b*",), weight_decay=0.0),),
    ema=0.9,
)
COUNTED = UpdateOptions(accumulate=2, loss_scale=DynamicScale(1024.0, interval=1), ema=0.9)
UPDATES: dict[str, tuple[Optimizer, UpdateOptions]] = {
    "sgd, decayed": (SGD(0.1, 0.1), PLAIN),
    "nesterov, decayed": (Momentum(0.1, nesterov=True, weight_decay=0.1), PLAIN),
    "rmsprop": (RMSProp(0.1, centered=True), PLAIN),
    "rmsprop, momentum": (RMSProp(0.1, momentum=0.5), PLAIN),
    "adam": (Adam(0.1, epsilon=1e-3), PLAIN),
    "adam, lazy": (Adam(0.1, epsilon=1e-3, weight_decay=0.1, lazy=True), PLAIN),
    "adamw": (AdamW(0.1, epsilon=1e-3), PLAIN),
    "lamb": (LAMB(0.1, epsilon=1e-3), PLAIN),
    "adafactor": (Adafactor(0.1, epsilon1=1e-3), PLAIN),
    "adamw, surrounded": (AdamW(0.1, epsilon=1e-3), SURROUNDED),
    "adagrad, surrounded": (Adagrad(0.1), SURROUNDED),
    "adagrad, dynamic scale": (Adagrad(0.1), UpdateOptions(loss_scale=DynamicScale(1024.0, interval=1))),
    "adam, lazy, dynamic scale": (
        Adam(0.1, epsilon=1e-3, lazy=True),
        UpdateOptions(loss_scale=DynamicScale(1024.0, interval=1)),
    ),
    "adam, counted": (Adam(0.1, epsilon=1e-3), COUNTED),
}


@cache
def training_step(model: str, update: str) -> bytes:
    optimizer, options = UPDATES[update]
    loss = "softmax_cross_entropy" if model == "mlp" else "loss"
    forward = parse(POSITIONS) if model == "positions" else build_model(model, **MODELS[model])
    step = build_training_graph(
        forward, loss=loss, optimizer=optimizer, update=options, parameters=EVERYTHING
    )
    return bytes(step.SerializeToString())


def compiled(model: str, update: str, strategy: str, batch: str, folder: Path) -> Compiled:
    training = import_training_graph(onnx.ModelProto.FromString(training_step(model, update)))
    return compile_step(training, folder, "2x2", strategy, batch)


def check(model: str, update: str, strategy: str, batch: str, folder: Path) -> None:
    plan = compiled(model, update, strategy, batch, folder / "out")

    report = verified(plan, random_batches(plan.plan, STEPS, high=7))

    assert report.passed, f"{report.summary()}\n{report.variables}\n{report.losses}"
    moved = {check.name for check in report.variables if check.max_change > 0}
    assert moved >= set(plan.compilation.strategy.parameters)


ADVERSARIES = """
adversaries (double[8,3] x) => (double loss)
<double[3,2] G = {0.1, -0.2, 0.3, 0.4, -0.5, 0.6}, double[2,1] D = {0.7, -0.8}> {
    made = MatMul (x, G)
    score = MatMul (made, D)
    squares = Mul (score, score)
    loss = ReduceMean <keepdims = 0> (squares)
}
"""


def test_two_plans_train_by_turns_what_the_other_one_holds_still(tmp_path: Path) -> None:
    plans = {}
    for trained, held in ("GD", "DG"):
        model = build_training_graph(
            parse(ADVERSARIES),
            loss="loss",
            optimizer=SGD(0.1, weight_decay=0.01),
            update=UpdateOptions(groups=(ParameterGroup((held,), lr=0.0),)),
            parameters=EVERYTHING,
        )
        training = import_training_graph(model)
        plans[trained] = compile_step(training, tmp_path / trained, "2x2", "allreduce", "global")
    batches = random_batches(plans["G"].plan, 6)

    shared: dict[str, np.ndarray] = {}
    for turn, batch in enumerate(batches):
        folder = plans["GD"[turn % 2]].folder
        shared = train_in_process(folder, [batch], shared or None).variables

    expected = parse(ADVERSARIES).graph.initializer
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in expected}
    for turn, batch in enumerate(batches):
        x, g, d = batch["x"], weights["G"], weights["D"]
        d_score = 2 * x @ g @ d / len(x)
        trained, gradient = ("D", (x @ g).T @ d_score) if turn % 2 else ("G", x.T @ d_score @ d.T)
        weights[trained] = weights[trained] - 0.1 * (gradient + 0.01 * weights[trained])
    for name, value in weights.items():
        np.testing.assert_allclose(shared[name], value, rtol=1e-12)


CHOICES = list(product(("allreduce", "ps", "hybrid"), ("per-replica", "global")))
NAMES = (*MODELS, "positions")
EVERY = list(product(NAMES, UPDATES, CHOICES))
# Every update with all models, the choices in turn.
SOME = [(NAMES[i % len(NAMES)], update, CHOICES[i % 6]) for i, update in enumerate(UPDATES)]


@pytest.mark.parametrize(("model", "update", "choice"), SOME, ids=str)
def test_four_steps_match_one_device(
    model: str, update: str, choice: tuple[str, str], tmp_path: Path
) -> None:
    check(model, update, *choice, tmp_path)


@pytest.mark.parametrize("strategy", ["ps", pytest.param("hybrid", marks=pytest.mark.long)])
def test_means_over_the_rows_of_all_replicas_have_a_shape_to_travel_in(strategy: str, tmp_path: Path) -> None:
    """Adafactor's column means come from servers' rows: float[1, columns], however many rows there are."""
    check("lm", "adafactor", strategy, "per-replica", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("model", "update", "choice"), EVERY, ids=str)
def test_four_steps_match_one_device_in_every_combination(
    model: str, update: str, choice: tuple[str, str], tmp_path: Path
) -> None:
    check(model, update, *choice, tmp_path)


@pytest.mark.parametrize("update", sampled(UPDATES, range(0, len(UPDATES), 2)))
def test_every_update_can_run_where_the_rows_are(update: str, tmp_path: Path) -> None:
    plan = compiled("lm", update, "ps", "per-replica", tmp_path / "out")

    assert {choice.method for choice in plan.compilation.strategy.parameters.values()} == {"servers"}


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_an_overflow_on_one_replica_skips_the_step_on_all(strategy: str, tmp_path: Path) -> None:
    plan = compiled("mlp", "adagrad, dynamic scale", strategy, "per-replica", tmp_path / "out")
    batches = random_batches(plan.plan, 3)
    batches[1]["x"][0] = np.inf

    trained = train_in_process(plan.folder, batches, stop_when_diverged=False)
    without = train_in_process(plan.folder, [batches[0], batches[2]])

    assert trained.variables.pop("loss_scale") == 2048.0  # doubled, halved, doubled
    assert without.variables.pop("loss_scale") == 4096.0
    for name, value in without.variables.items():
        np.testing.assert_allclose(trained.variables[name], value, rtol=1e-12, err_msg=name)
