"""float16 is float16 within a segment too: against numpy, which rounds every result."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.import_training import import_training_graph
from partc.passes.cpu_kernels.round_halves import has_halves, round_halves
from partc.runtime.execution.in_process import RanksInProcess
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import compile_step, random_batches, verified

# What overflows is multiplied by little behind; x is rounded where it is cast.
CHAIN = """
chain (float16[4] x, float[4] w, float16[1] small) => (float[4] z) {
    half = Cast <to = 10> (w)
    product = Mul (x, half)
    moved = Reshape (product, shape)
    little = Mul (moved, small)
    z = Cast <to = 1> (little)
}
"""


def chain() -> onnx.ModelProto:
    model = parse(CHAIN)
    model.graph.initializer.append(numpy_helper.from_array(np.array([4], np.int64), "shape"))
    return model


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    return np.asarray(result)


def test_what_overflows_float16_does_so_between_two_nodes() -> None:
    model = chain()
    rounded = round_halves(model, onnx.shape_inference.infer_shapes(model))
    onnx.checker.check_model(model, full_check=True)
    x, small = np.array([1000, 1, 3, 200], np.float16), np.array([1e-3], np.float16)
    w = np.array([1000, 1.0001, 1 / 3, 300], np.float32)

    found = run(model, {"x": x, "w": w, "small": small})

    with np.errstate(over="ignore"):
        expected = x * w.astype(np.float16) * small
    assert rounded == 3
    assert np.isposinf(found[0])
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_a_model_without_float16_stays_as_it_is() -> None:
    model = parse("step (float[4] x) => (float[4] y) { y = Exp (x) }")

    assert not has_halves(model)
    assert round_halves(model, onnx.shape_inference.infer_shapes(model)) == 0
    assert has_halves(chain())


SCALED = """
scored (float16[12, 6] x, int64[12] labels) => (float loss) <float often = {30}> {
    a = MatMul (x, W1)
    h = Relu (a)
    scores16 = MatMul (h, W2)
    scores = Cast <to = 1> (scores16)
    mean = SoftmaxCrossEntropyLoss <reduction = "mean"> (scores, labels)
    loss = Mul (mean, often)
}
"""


def scaled_step() -> onnx.ModelProto:
    """Return a step whose first gradients overflow at the scale that it begins with."""
    forward, rng = parse(SCALED), np.random.default_rng(0)
    for name, shape in (("W1", (6, 8)), ("W2", (8, 5))):
        forward.graph.initializer.append(
            numpy_helper.from_array(rng.normal(size=shape).astype(np.float16), name)
        )
    update = UpdateOptions(loss_scale=DynamicScale(2.0**17))
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.01), update=update)


@pytest.mark.parametrize("strategy", ["workers=1", "data", "tensor=2", "pipeline=2", "fsdp"])
def test_a_loss_scale_follows_from_the_step_and_from_no_plan(strategy: str, tmp_path: Path) -> None:
    compiled = compile_step(
        import_training_graph(scaled_step()), tmp_path / "out", "1x2", strategy, batch="global"
    )
    batches = random_batches(compiled.plan, 3, high=5)
    ranks = RanksInProcess(compiled.folder)
    for batch in batches:
        ranks.step(batch)

    assert ranks.variables()["loss_scale"] == 2.0**14  # every step so far had infinite gradients
    assert verified(compiled, batches).passed
