"""The translation model: its graph, its gradients, and its training on 2 x 2."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

SMALL = {
    "source_vocab": 30, "target_vocab": 26, "embedding": 6, "cells": 5,
    "source_steps": 4, "target_steps": 3, "dtype": "float64", "batch": 4,
}  # fmt: skip


def step(optimizer: SGD | Adagrad, **options: object) -> onnx.ModelProto:
    forward = build_model("nmt", **{**SMALL, **options})
    return build_training_graph(forward, loss="loss", optimizer=optimizer)


@pytest.mark.parametrize(
    ("strategy", "batch"),
    [
        ("hybrid", "per-replica"),
        pytest.param("auto", "global", marks=pytest.mark.long),
        pytest.param("hybrid", "global", marks=pytest.mark.long),
        pytest.param("auto", "per-replica", marks=pytest.mark.long),
    ],
)
def test_it_trains_on_four_ranks_as_on_one_device(strategy: str, batch: str, tmp_path: Path) -> None:
    training = import_training_graph(step(Adagrad(0.5)))

    done = compile_step(training, tmp_path / "out", "2x2", strategy, batch)

    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=20))


def test_both_tables_are_sparse_and_go_to_the_servers(tmp_path: Path) -> None:
    done = compile_step(import_training_graph(step(Adagrad(0.5))), tmp_path / "out", "2x2", "hybrid")

    served = {name for name, method in done.methods.items() if method == "servers"}
    assert served == {
        f"{side}.embedding{slot}" for side in ("source", "target") for slot in ("", ".accumulator")
    }


@pytest.mark.parametrize("name", ["attention.weight", "decoder0.context_weight", "encoder.backwards1.bias"])
def test_a_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """W_next = W - dW at a rate of 1; central differences of the loss along a random direction."""
    model = step(SGD(1.0))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {info.name: _values(info, rng) for info in session.get_inputs()}
    outputs = [output.name for output in session.get_outputs()]

    def run(value: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(outputs, session.run(outputs, {**feeds, name: value}), strict=True))

    direction = rng.normal(size=feeds[name].shape)
    following = next(output for output in outputs if output.startswith(name) and output != name)
    gradient = feeds[name] - run(feeds[name])[following]
    losses = [float(run(feeds[name] + side * 1e-5 * direction)["loss"]) for side in (1, -1)]

    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(float(np.sum(gradient * direction)), rel=1e-6)


def _values(info: ort.NodeArg, rng: np.random.Generator) -> np.ndarray:
    if info.type == "tensor(int64)":
        return rng.integers(0, 20, info.shape)
    return rng.uniform(-0.5, 0.5, info.shape)


def test_its_loss_falls() -> None:
    forward = build_model("nmt", **{**SMALL, "dtype": "float32", "batch": 8})
    model = build_training_graph(forward, loss="loss", optimizer=Adagrad(0.3))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    source = rng.integers(0, 20, (8, 4))
    data = {"source": source, "target": source[:, :3], "labels": source[:, 1:]}
    variables = {
        info.name: rng.uniform(-0.1, 0.1, info.shape).astype(np.float32)
        if "accumulator" not in info.name
        else np.full(info.shape, 0.1, np.float32)
        for info in session.get_inputs()
        if info.name not in data
    }
    state = {name: _next_of(name, session) for name in variables}
    losses = []
    for _ in range(40):
        found = session.run(["loss", *state.values()], {**data, **variables})
        losses.append(float(found[0]))
        variables = dict(zip(state, found[1:], strict=True))

    assert losses[-1] < 0.85 * losses[0]


def _next_of(name: str, session: ort.InferenceSession) -> str:
    return next(output.name for output in session.get_outputs() if output.name == f"{name}_next")
