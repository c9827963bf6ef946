"""Which float types a change passes through, and that what verify allows follows from them."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Optimizer
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.bindings import read_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.passed_types import passed_types
from partc.compiler.verification.verify import launch_in_process, verify
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.training_models import MODELS, training_model
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches
from tests.checks.training_steps import EVERYTHING


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
