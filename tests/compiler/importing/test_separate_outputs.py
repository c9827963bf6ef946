"""Outputs that a step is given: a variable, a data input, a constant."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.output.deploy import write_trained_model
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.results import TRAINED_FILE
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)

# Of a foreign step nothing but what goes in and out is declared.
FOREIGN = """
step (float[8,4] x, float[4,3] W) => (float loss, float[4,3] W_next, OUTPUTS)
<float rate = {0.1}, float[3] kept = {1, 2, 3}> {
    y = MatMul (x, W)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    scaled = Mul (y, rate)
    dW = MatMul (xt, scaled)
    W_next = Sub (W, dW)
    squares = Mul (x, x)
}
"""

FORWARD = """
forward (float[8,4] x) => (float loss, float[4,3] W)
<float[4,3] W = {0.1, 0.7, -0.3, 0.2, 0.5, -0.6, 0.4, 0.9, -0.8, 0.3, 0.2, 0.1}> {
    y = MatMul (x, W)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""


def compiled_forward(out: Path, strategy: str, batch: str) -> Compiled:
    step = build_training_graph(parse(FORWARD), loss="loss", optimizer=SGD(0.1))
    return compile_step(import_training_graph(step), out, "2x2", strategy, batch)


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_a_parameter_that_is_an_output_trains_and_is_told_as_it_was(
    tmp_path: Path, strategy: str, batch: str
) -> None:
    plan = compiled_forward(tmp_path, strategy, batch)
    batches = random_batches(plan.plan, 3)

    result = train_in_process(plan.folder, batches, read_after=(1, 2))

    assert_trains_as_one_device(plan, batches)
    told = [outputs["W/value"] for outputs in result.outputs]
    np.testing.assert_array_equal(told[0], onnx.numpy_helper.to_array(parse(FORWARD).graph.initializer[0]))
    np.testing.assert_array_equal(told[1], result.variables_after[1]["W"])
    np.testing.assert_array_equal(told[2], result.variables_after[2]["W"])


def test_a_trained_model_returns_the_trained_parameter(tmp_path: Path) -> None:
    plan = compiled_forward(tmp_path, "allreduce", "per-replica")
    trained = train_in_process(plan.folder, random_batches(plan.plan, 2)).variables
    write_arrays(tmp_path / TRAINED_FILE, trained)

    path = write_trained_model(plan.folder)

    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["W/value"]
    np.testing.assert_array_equal(session.run(None, {})[0], trained["W"])


@pytest.mark.parametrize("output", ["float[4,3] W", "float[8,4] x, float[8,4] squares", "float[3] kept"])
def test_what_a_foreign_step_is_given_may_be_an_output(tmp_path: Path, output: str) -> None:
    plan = compile_step(
        import_text(FOREIGN.replace("OUTPUTS", output)), tmp_path, "2x2", "allreduce", "global"
    )

    assert_trains_as_one_device(plan, random_batches(plan.plan, 2))
