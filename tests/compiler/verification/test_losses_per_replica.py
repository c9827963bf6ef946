"""How far replicas that average their gradients are off one device: the table of docs/training-graphs.md.

The gradient is measured, as what a step of plain gradient descent changes: of four ranks, and of the same
loss over the whole batch of 32 in plain ONNX Runtime. Off is |difference| / |gradient|, over all parameters.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.errors import UnsupportedModel
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.program import Aggregation
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import Batch, Compiled, compile_step
from tests.checks.training_steps import EVERYTHING, initial_variables, train

RANKS, SAMPLES, TOKENS = 4, 32, 6  # 32 samples in all
AS_ONE_DEVICE = 1e-6
CLASSES = "float[3] class_weights = {0.2, 1, 5}"

CLASSIFIER = """
forward (float[N,4] x, INPUTS) => (float loss)
<float[4,8] W1 = {0.3, -0.2, 0.5, 0.1, -0.4, 0.2, 0.6, -0.1, 0.2, 0.4, -0.3, 0.5, 0.1, -0.6, 0.3, 0.2,
  -0.5, 0.1, 0.4, -0.2, 0.3, 0.2, -0.1, 0.6, 0.1, -0.3, 0.2, 0.4, -0.2, 0.5, 0.1, -0.4},
 float[8,3] W2 = {0.5, -0.3, 0.2, 0.1, 0.4, -0.6, -0.2, 0.3, 0.1, 0.6, -0.1, 0.2, 0.3, -0.5, 0.4, -0.1,
  0.2, 0.5, 0.4, -0.2, -0.3, 0.1, 0.6, -0.4}, CONSTANTS> {
    h0 = MatMul (x, W1)
    h = Tanh (h0)
    scores = MatMul (h, W2)
    LOSS
}
"""
LABELS = "int64[N] labels"
LOSSES = {  # inputs, constants, the loss of the scores
    "mean": (LABELS, "int64[1] none = {0}", "loss = SoftmaxCrossEntropyLoss (scores, labels)"),
    "sample weights": (
        f"{LABELS}, float[N] weights",
        "int64[1] none = {0}",
        """each = SoftmaxCrossEntropyLoss <reduction = "none"> (scores, labels)
        weighted = Mul (each, weights)
        total = ReduceSum <keepdims = 0> (weighted)
        weight = ReduceSum <keepdims = 0> (weights)
        loss = Div (total, weight)""",
    ),
    "sum": (
        LABELS,
        "int64[1] none = {0}",
        'loss = SoftmaxCrossEntropyLoss <reduction = "sum"> (scores, labels)',
    ),
    "class weights": (LABELS, CLASSES, "loss = SoftmaxCrossEntropyLoss (scores, labels, class_weights)"),
    "valid tokens": (
        "int64[N,6] labels",
        "int64[3] tokens = {-1, 3, 1}, int64[3] often = {1, 1, 6}",
        """apart = Reshape (scores, tokens)
        spread = Tile (apart, often)
        loss = SoftmaxCrossEntropyLoss <ignore_index = -100> (spread, labels)""",
    ),
}
# Percent off one device under --batch per-replica; docs/training-graphs.md has the same.
PER_REPLICA = {"mean": 0, "sample weights": 62, "sum": 75, "class weights": 10, "valid tokens": 8}


def forward(loss: str, batch: int) -> onnx.ModelProto:
    inputs, constants, body = LOSSES[loss]
    text = CLASSIFIER.replace("INPUTS", inputs).replace("CONSTANTS", constants).replace("LOSS", body)
    model = parse(text.replace("[N", f"[{batch}"))
    return build_training_graph(model, loss="loss", optimizer=SGD(1.0), parameters=EVERYTHING)


def data_of(loss: str) -> Batch:
    """Return 32 samples whose weights, classes and lengths differ as they do in practice."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(SAMPLES, 4)).astype(np.float32)}
    batch["labels"] = rng.choice(3, SAMPLES, p=[0.6, 0.3, 0.1])
    if loss == "sample weights":
        batch["weights"] = np.exp(2 * rng.normal(size=SAMPLES)).astype(np.float32)
    if loss == "valid tokens":
        labels = rng.integers(0, 3, (SAMPLES, TOKENS))
        lengths = rng.integers(1, TOKENS + 1, (SAMPLES, 1))
        batch["labels"] = np.where(np.arange(TOKENS) < lengths, labels, -100)
    return batch


def off(loss: str, compiled: Compiled, samples: int = SAMPLES) -> float:
    whole = forward(loss, samples)
    data = {name: values[:samples] for name, values in data_of(loss).items()}
    start = initial_variables(whole)
    _, wanted = train(whole, [data])
    found = train_in_process(compiled.folder, [data]).variables
    gradient, distance = (
        np.concatenate([(one[name] - other[name]).reshape(-1) for name in ("W1", "W2")])
        for one, other in ((wanted, start), (wanted, found))
    )
    return float(np.linalg.norm(distance) / np.linalg.norm(gradient))


def compiled(loss: str, where: Path, batch: int, reading: str | None, **options: Aggregation) -> Compiled:
    training = import_training_graph(forward(loss, batch))
    return compile_step(training, where / "out", "2x2", "allreduce", reading, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", LOSSES)
def test_forced_per_replica_is_off_one_device_by_so_much(tmp_path: Path, loss: str) -> None:
    plan = compiled(loss, tmp_path, SAMPLES // RANKS, "per-replica")

    error = off(loss, plan)

    assert bool(plan.plan.departures) == (error > AS_ONE_DEVICE) == (loss != "mean")
    assert round(100 * error) == PER_REPLICA[loss]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_default_is_one_device(tmp_path: Path, loss: str) -> None:
    is_mean = loss == "mean"
    plan = compiled(loss, tmp_path, SAMPLES // RANKS if is_mean else SAMPLES, None)

    assert plan.plan.batch == ("per-replica" if is_mean else "global")
    assert off(loss, plan) < AS_ONE_DEVICE


@pytest.mark.parametrize("loss", LOSSES)
def test_a_global_batch_is_one_device(tmp_path: Path, loss: str) -> None:
    assert off(loss, compiled(loss, tmp_path, SAMPLES, "global")) < AS_ONE_DEVICE


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "mean"])
def test_an_uneven_share_is_one_device_too_where_it_is_no_mean(tmp_path: Path, loss: str) -> None:
    plan = compiled(loss, tmp_path, SAMPLES - 1, None)

    assert plan.plan.batch == "global"
    assert off(loss, plan, SAMPLES - 1) < AS_ONE_DEVICE


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "mean"])
def test_fewer_samples_than_replicas_are_refused_where_it_is_no_mean(tmp_path: Path, loss: str) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be divided") as refusal:
        compiled(loss, tmp_path, RANKS - 1, None)

    assert "--batch per-replica" in refusal.value.fix


def test_summed_gradients_of_a_sum_are_one_device(tmp_path: Path) -> None:
    summed = Aggregation(average_dense=False, average_sparse=False)
    plan = compiled("sum", tmp_path, SAMPLES // RANKS, None, aggregation=summed)

    assert plan.plan.batch == "per-replica"
    assert off("sum", plan) < AS_ONE_DEVICE
