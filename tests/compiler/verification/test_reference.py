"""The reference against itself and against plain numpy: it must not share a mistake with the plan."""

from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.verification.reference import Reference, make_reference
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.program import PLAN_FORMAT, Plan
from partc.runtime.plan.variables import DataInput
from tests.builders.graphs.foreign_steps import parse

# A clipped table, a running mean, a counter and a learning rate; dE as indexed slices.
STEP = """
step (int64[n] ids, double[n,2] t, double lr, double[5,2] E, double[2] mean, int64 count)
    => (double loss, double[5,2] E_next, double[2] mean_next, int64 count_next)
<int64[1] zero = {0}, int64[1] last = {-1}, int64 one = {1}, double kept = {0.9}, double new = {0.1}> {
    e = Gather (E, ids)
    d = Sub (e, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    rows = Identity (d)
    squares = Mul (rows, rows)
    norm = ReduceSum <keepdims = 0> (squares)
    rate = Div (lr, norm)
    step = Mul (rows, rate)
    down = Neg (step)
    positions = Unsqueeze (ids, last)
    E_next = ScatterND <reduction = "add"> (E, positions, down)
    batch_mean = ReduceMean <keepdims = 0> (t, zero)
    mean_kept = Mul (mean, kept)
    mean_new = Mul (batch_mean, new)
    mean_next = Add (mean_kept, mean_new)
    count_next = Add (count, one)
}
"""
INPUTS = (
    DataInput("ids", "int64", ("n",), 0, high=5),
    DataInput("t", "float64", ("n", 2), 0),
    DataInput("lr", "float64", (), None),
)
START = {"E": np.arange(10.0).reshape(5, 2), "mean": np.zeros(2), "count": np.array(3)}
BATCH = {
    "ids": np.array([0, 4, 4, 1]),
    "t": np.random.default_rng(0).normal(size=(4, 2)),
    "lr": np.array(0.5),
}


def reference(folder: Path, batch: str, text: str = STEP, ids: str = "ids") -> Reference:
    model = parse(text)
    bindings = Bindings(
        state={name: f"{name}_next" for name in START},
        loss="loss",
        gradients={"E": GradientTensors(ids=ids, rows="rows")},
    )
    write_bindings(model, bindings)
    (folder / "train.onnx").write_bytes(model.SerializeToString())
    return make_reference(plan(batch, replicas=2), folder / "train.onnx")


def plan(batch: str, replicas: int) -> Plan:
    lists = ((), {}, (), (), (), (), INPUTS, ())
    return Plan(PLAN_FORMAT, "train.onnx", batch, replicas, {}, "loss", *lists, 0.0, "", {})  # type: ignore[arg-type]


def test_gradients_are_averaged_before_anything_nonlinear(tmp_path: Path) -> None:
    variables, outputs = reference(tmp_path, "per-replica").step(START, BATCH)

    d = START["E"][BATCH["ids"]] - BATCH["t"]
    rows = d / 2
    expected = START["E"].copy()
    np.add.at(expected, BATCH["ids"], -rows * 0.5 / (rows * rows).sum())
    np.testing.assert_allclose(variables["E"], expected, rtol=1e-12)
    np.testing.assert_allclose(outputs["loss"], (d * d).mean(), rtol=1e-12)


def test_statistics_are_averaged_and_counters_count_once(tmp_path: Path) -> None:
    variables = reference(tmp_path, "per-replica").step(START, BATCH).variables

    np.testing.assert_allclose(variables["mean"], 0.1 * BATCH["t"].mean(axis=0), rtol=1e-12)
    assert variables["count"] == 4


def test_a_global_batch_runs_whole(tmp_path: Path) -> None:
    variables = reference(tmp_path, "global").step(START, BATCH).variables

    rows = START["E"][BATCH["ids"]] - BATCH["t"]
    expected = START["E"].copy()
    np.add.at(expected, BATCH["ids"], -rows * 0.5 / (rows * rows).sum())
    np.testing.assert_allclose(variables["E"], expected, rtol=1e-12)


def test_an_update_that_reads_samples_besides_its_gradient_is_refused(tmp_path: Path) -> None:
    text = STEP.replace(
        "rate = Div (lr, norm)", "peak = ReduceMax <keepdims = 0> (t)\n rate = Div (lr, peak)"
    )

    with pytest.raises(UnsupportedModel, match="fix: compile with --batch global"):
        reference(tmp_path, "per-replica", text)


def test_an_integer_that_depends_on_each_replicas_samples_has_no_average(tmp_path: Path) -> None:
    text = STEP.replace("Unsqueeze (ids, last)", "Unsqueeze (own, last)")
    text = text.replace("rows = Identity (d)", "own = Identity (ids)\n rows = Identity (d)")
    text = text.replace("Add (count, one)", "ReduceMin <keepdims = 0> (ids)")
    made = reference(tmp_path, "per-replica", text, ids="own")

    with pytest.raises(UnsupportedModel, match="fix: compile with --batch global"):
        made.step(START, BATCH)
