"""The reference against itself and against plain numpy: it must not share a mistake with the plan."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Optimizer
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.bindings import Bindings, GradientTensors, read_bindings, write_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.reference import Reference, make_reference, passed_types
from partc.compiler.verification.verify import launch_in_process, verify
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.program import PLAN_FORMAT, Plan
from partc.runtime.plan.variables import DataInput
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.training_models import MODELS, training_model
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches
from tests.checks.training_steps import EVERYTHING

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


def passed(text: str) -> dict[str, str]:
    model = parse(text)
    found = passed_types(model, [info.name for info in model.graph.output], ["x", "u"])
    return {name: dtype.name for name, dtype in found.items()}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("r = Mul (x, W) next = Sub (W, r)", "float32"),
        ("h = Cast <to = 10> (x) g = Mul (h, h) r = Cast <to = 1> (g) next = Sub (W, r)", "float16"),
        # Where half the numbers are stored so, moved, and read, nothing is rounded.
        ("m = Reshape (u, shape) r = Cast <to = 1> (m) next = Sub (W, r)", "float32"),
        # What does not follow from samples is one number on both sides.
        ("h = Cast <to = 10> (W) c = Cast <to = 1> (h) r = Mul (c, x) next = Sub (W, r)", "float32"),
        # What decides is not rounded, but may be what is decided about.
        ("h = Cast <to = 10> (x) b = Greater (h, u) next = Where (b, x, W)", None),
        ("h = Cast <to = 10> (x) b = IsNaN (W) c = Cast <to = 1> (h) next = Where (b, c, W)", "float16"),
    ],
)
def test_the_narrowest_type_that_samples_pass_on_the_way_is_found(nodes: str, expected: str | None) -> None:
    head = "step (float[4] x, float16[4] u, float[4] W) => (float[4] next) <int64[1] shape = {-1}>"
    text = f"{head} {{ {nodes} }}"

    assert passed(text) == ({} if expected is None else {"next": expected})


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_step_in_one_type_passes_no_other(name: str) -> None:
    model = onnx.load_from_string(training_model(name))
    bindings = read_bindings(model, Path(name))
    samples = [info.name for info in model.graph.input if info.name not in bindings.state]
    types = {info.name: info.type.tensor_type.elem_type for info in model.graph.input}

    found = passed_types(model, bindings.state.values(), samples)

    names = {output: variable for variable, output in bindings.state.items()}
    assert found
    for output, dtype in found.items():
        assert dtype == onnx.helper.tensor_dtype_to_np_dtype(types[names[output]]), output


# ---------------------------------------------------------------- float16 gradients of float32 masters

SQUARES = """
squares (float16[8,10] x, float16[8,3] y) => (float16 loss) {
    h = MatMul (x, w)
    d = Sub (h, y)
    e = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (e)
}
"""

# Each sample's mean is taken away: the gradient of `b`, which all its entries share, is zero in theory.
SHIFTED = """
shifted (float16[16,32] x) => (float16 loss) <int64[1] entries = {1}> {
    h = Add (x, b)
    mean = ReduceMean (h, entries)
    centred = Sub (h, mean)
    y = Mul (centred, w)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""
PARAMETERS = {SQUARES: {"w": (10, 3)}, SHIFTED: {"w": (32,), "b": (1,)}}


def compiled(text: str, optimizer: Optimizer, batch: str, out: Path) -> Compiled:
    model, rng = parse(text), np.random.default_rng(0)
    for name, shape in PARAMETERS[text].items():
        values = rng.normal(0, 0.3, shape).astype(np.float16)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    step = build_training_graph(
        model,
        loss="loss",
        optimizer=optimizer,
        parameters=EVERYTHING,
        update=UpdateOptions(loss_scale=DynamicScale(1024.0)),
    )
    return compile_step(import_training_graph(step), out, "2x2", "allreduce", batch)


@pytest.mark.parametrize("batch", ["per-replica", "global"])
@pytest.mark.parametrize(
    ("text", "optimizer"), [(SQUARES, SGD(0.1)), (SHIFTED, Adam(0.01))], ids=["SGD", "Adam"]
)
def test_float16_gradients_of_float32_masters_verify(
    text: str, optimizer: Optimizer, batch: str, tmp_path: Path
) -> None:
    plan = compiled(text, optimizer, batch, tmp_path)

    report = verify(plan.folder, steps=6, data=random_batches(plan.plan, 6), launcher=launch_in_process)

    assert report.passed, report.variables
    assert {variable.dtype for variable in plan.plan.variables} == {"float32", "int64"}


def test_float16_gradients_of_half_the_samples_are_no_rounding(tmp_path: Path) -> None:
    plan = compiled(SQUARES, SGD(0.1), "global", tmp_path)
    whole = random_batches(plan.plan, 2)
    halves = [{name: np.concatenate([array[:4]] * 2) for name, array in batch.items()} for batch in whole]

    report = verify(
        plan.folder,
        steps=2,
        data=whole,
        launcher=lambda folder, _data, steps, seed: launch_in_process(folder, halves, steps, seed),
    )

    assert {check.name: check.verdict for check in report.variables}["w"] == "differs"
