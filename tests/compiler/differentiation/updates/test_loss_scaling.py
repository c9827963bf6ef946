"""Loss scaling, static and dynamic, and float32 masters of 16-bit parameters."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adam import Adam
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale, LossScale, StaticScale
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Optimizer
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.verify import launch_in_process, verify
from partc.runtime.errors import BadUsage
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.checks.optimizer_references import (
    LINEAR,
    LOOKUP,
    STEPS,
    assert_equals_reference,
    batches,
    step_of,
)
from tests.checks.training_steps import Arrays, facts_of, initial_variables, train

DYNAMIC = DynamicScale(1024.0, interval=2)


def with_overflow(text: str, at_step: int) -> list[Arrays]:
    """Return five batches, the targets of one step infinite."""
    found = batches(text)
    found[at_step] = found[at_step] | {"targets": np.full((4, 2), np.inf)}
    return found


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize("scale", [StaticScale(512.0), DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("text", [LINEAR, LOOKUP], ids=["dense", "sparse"])
def test_a_power_of_two_scales_loss_and_gradients_without_a_trace(text: str, scale: LossScale) -> None:
    _, after = train(step_of(text, Adam(0.1), update=UpdateOptions(loss_scale=scale)), batches(text))
    _, expected = train(step_of(text, Adam(0.1)), batches(text))

    for name, value in expected.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-13, err_msg=name)


def test_dynamic_scaling_skips_an_overflow_as_pytorchs_does() -> None:
    step = step_of(LINEAR, Adam(0.1), update=UpdateOptions(loss_scale=DYNAMIC))
    given, variables, scales = with_overflow(LINEAR, 2), None, []

    for batch in given:
        _, variables = train(step, [batch], variables)
        scales.append(variables["loss_scale"])

    assert_equals_reference("scaled", variables | {"scales": np.array(scales)})
    assert variables["step_count"] == STEPS - 1


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1), Adam(0.1), Adam(0.1, lazy=True)], ids=repr)
@pytest.mark.parametrize("text", [LINEAR, LOOKUP], ids=["dense", "sparse"])
def test_a_skipped_step_changes_no_parameter_and_no_slot(text: str, optimizer: Optimizer) -> None:
    step = step_of(text, optimizer, update=UpdateOptions(loss_scale=DYNAMIC, ema=0.9))

    _, before = train(step, with_overflow(text, 2)[:2])
    _, after = train(step, with_overflow(text, 2)[:3])

    changed = {name for name in after if not np.array_equal(after[name], before[name])}
    assert changed == {"loss_scale"}
    assert after["loss_scale"] == before["loss_scale"] / 2


def test_an_overflow_spoils_its_accumulation_and_no_other() -> None:
    options = UpdateOptions(loss_scale=DynamicScale(64.0, interval=100), accumulate=2)
    step = step_of(LINEAR, SGD(0.1), update=options)

    _, spoiled = train(step, with_overflow(LINEAR, 2)[:4])
    _, expected = train(step, batches(LINEAR)[:2])

    np.testing.assert_array_equal(spoiled["W"], expected["W"])
    assert spoiled["loss_scale"] == 32.0
    assert not spoiled["W.accumulated"].any()


def test_the_scale_grows_no_further_than_float32() -> None:
    options = UpdateOptions(loss_scale=DynamicScale(2.0**127, interval=1))

    _, after = train(step_of(LINEAR, SGD(0.1), update=options), batches(LINEAR)[:2])

    assert after["loss_scale"] == np.float32(2.0**127)


# ---------------------------------------------------------------- masters

HALF = """(float16[batch,3] x, int64[batch] ids) => (float16[batch,2] y) {
    h = MatMul (x, W) rows = Gather (E, ids) y = Add (h, rows) }"""
W = np.array([[1.0, 0.5], [0.25, 2.0], [0.125, 1.5]], np.float16)
E = np.arange(8, dtype=np.float16).reshape(4, 2)
BATCH = {
    "x": np.ones((2, 3), np.float16),
    "ids": np.array([1, 3]),
    "targets": np.zeros((2, 2), np.float16),
}


DENSE_HALF = "(float16[batch,3] x) => (float16[batch,2] y) { y = MatMul (x, W) }"


def half_step(rate: float, scale: LossScale | None, text: str = HALF) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> test {text}')
    model.graph.initializer.append(numpy_helper.from_array(W, "W"))
    if "Gather" in text:
        model.graph.initializer.append(numpy_helper.from_array(E, "E"))
    return build_training_graph(
        model, loss="mse", optimizer=SGD(rate), update=UpdateOptions(loss_scale=scale)
    )


def test_scaling_keeps_16_bit_parameters_in_float32() -> None:
    step = half_step(0.1, StaticScale(8.0))

    start = initial_variables(step)
    _, after = train(step, [BATCH])

    assert {value.dtype for value in start.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(start["W"], W.astype(np.float32))
    gradient = (BATCH["x"] @ W + E[BATCH["ids"]]).sum(axis=0) * 2 / 4
    np.testing.assert_allclose(after["W"], W - np.float32(0.1) * gradient.astype(np.float32), rtol=1e-6)
    assert set(facts_of(step)["gradients"]["E"]) == {"ids", "rows"}


def test_the_forward_pass_still_computes_in_16_bits() -> None:
    step = half_step(0.1, StaticScale(8.0))

    products = [node for node in step.graph.node if node.op_type == "MatMul"]
    types = {value.name: value.type.tensor_type.elem_type for value in step.graph.value_info}
    assert types[products[0].output[0]] == TensorProto.FLOAT16


def test_updates_too_small_for_16_bits_add_up() -> None:
    batch = {name: BATCH[name] for name in ("x", "targets")}
    (_, without), (_, with_masters) = (
        train(half_step(1e-5, scale, DENSE_HALF), [batch] * 8) for scale in (None, StaticScale(8.0))
    )

    np.testing.assert_array_equal(without["W"], W)
    assert (with_masters["W"] < W).all()


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_mixed_precision_trains_on_four_ranks_as_on_one_device(strategy: str, tmp_path: Path) -> None:
    training = import_training_graph(half_step(0.1, DYNAMIC, HALF.replace("batch", "8")))
    compiled = compile_step(training, tmp_path / "out", "2x2", strategy, "global")
    batches = random_batches(compiled.plan, 4, high=4)

    report = verify(compiled.folder, steps=4, data=batches, launcher=launch_in_process)

    assert report.passed, report.variables
    assert report.variables


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda: StaticScale(0.0), "--loss-scale"),
        (lambda: DynamicScale(growth=1.0), "--loss-scale, growth"),
        (lambda: DynamicScale(backoff=1.0), "--loss-scale, backoff"),
        (lambda: DynamicScale(interval=0), "--loss-scale, interval"),
    ],
)
def test_scales_that_mean_nothing_are_refused(make, at: str) -> None:
    with pytest.raises(BadUsage) as error:
        make()

    assert error.value.at == at
