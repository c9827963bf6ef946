"""Old models in a newer opset compute what they did: a layer that normalised by its batch still does."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.model_files.convert_opset import convert_opset
from partc.compiler.model_files.model_file import onnx_transforming
from partc.runtime.errors import UnsupportedModel
from tests.checks.training_steps import EVERYTHING, initial_variables, session, train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype(np.float32)
W = RNG.normal(size=(3, 3)).astype(np.float32)
ALL_OUTPUTS = "n, m2, v2, saved_m, saved_v"
STATE = ", float[3] m2, float[3] v2"


def model_of(outputs: str, opset: int = 13, results: str = "") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 7, opset_import: ["" : {opset}]> net (float[6,3] x) => (float loss {results})
        <float[3] s = {{1, 2, 3}}, float[3] b = {{0, 1, 2}},
         float[3] m = {{0, 1, 2}}, float[3] v = {{1, 2, 3}}>
        {{
            h = MatMul (x, W) {outputs} = BatchNormalization <momentum = 0.8> (h, s, b, m, v)
            t = Tanh (n) loss = ReduceMean <keepdims = 0> (t)
        }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(W, "W"))
    return model


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("outputs", ["n", "n, m2, v2", ALL_OUTPUTS])
def test_a_normalisation_keeps_its_mode(outputs: str, opset: int) -> None:
    is_training = "," in outputs
    model = model_of(outputs, opset, ", float[3] m2, float[3] v2" if is_training else "")
    # onnxruntime takes the five outputs or one.
    original = model_of(
        ALL_OUTPUTS if is_training else outputs, opset, ", float[3] m2, float[3] v2" * is_training
    )
    expected = session(original).run(None, {"x": X})

    converted = convert_opset(model, opset, 21)

    for actual, value in zip(session(converted).run(None, {"x": X}), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5)


def test_a_layer_that_trains_in_opset_13_is_differentiated_through_its_batch() -> None:
    model = model_of(ALL_OUTPUTS)
    # Where nobody reads them, onnxruntime fuses the layer into the MatMul as if it did not train.
    shown = model_of(ALL_OUTPUTS, results=STATE)
    loss, mean, variance = session(shown).run(None, {"x": X})

    step = build_training_graph(model, loss="loss", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    losses, after = train(step, [{"x": X}])

    np.testing.assert_allclose(losses, [loss], rtol=1e-5)
    np.testing.assert_allclose(after["m"], mean, rtol=1e-5)
    np.testing.assert_allclose(after["v"], variance, rtol=1e-5)
    start = initial_variables(step)
    for place in np.ndindex(W.shape):
        slope = 0.0
        for sign in (1, -1):
            moved = model_of(ALL_OUTPUTS, results=STATE)
            values = W.copy()
            values[place] += sign * 0.03125
            moved.graph.initializer[-1].CopyFrom(numpy_helper.from_array(values, "W"))
            slope += sign * float(session(moved).run(["loss"], {"x": X})[0]) / 0.0625
        np.testing.assert_allclose(start["W"][place] - after["W"][place], slope, atol=2e-3)


def test_saved_statistics_that_are_read_are_refused() -> None:
    model = model_of(ALL_OUTPUTS, results=", float[3] saved_v")

    with pytest.raises(UnsupportedModel, match="saved statistics 'saved_v' are read") as error:
        convert_opset(model, 13, 21)

    assert "opset 14 or higher" in error.value.fix


def test_a_normalisation_within_a_body_keeps_its_mode() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 7, opset_import: ["" : 13]> net (float[6,3] x, bool c) => (float[6,3] y)
        <float[3] s = {1, 2, 3}, float[3] b = {0, 1, 2}, float[3] m = {0, 1, 2}, float[3] v = {1, 2, 3}>
        {
            y = If (c) <then_branch = f () => (float[6,3] n) {
                    n, m2, v2, saved_m, saved_v = BatchNormalization (x, s, b, m, v) },
                else_branch = g () => (float[6,3] k) { k = Identity (x) }>
        }"""
    )

    converted = convert_opset(model, 13, 21)

    branch = helper.get_attribute_value(converted.graph.node[0].attribute[0])
    assert [len(node.output) for node in branch.node] == [3]
    feeds = {"x": X, "c": np.array(True)}
    np.testing.assert_allclose(
        session(converted).run(None, feeds)[0], session(model).run(None, feeds)[0], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "/x/onnx/adapters/pad.h:31: adapt_pad: Assertion `value > 0` failed: a pad is negative",
            "no: a pad is negative",
        ),
        ("/x/onnx/adapters/pad.h:31: adapt_pad: Assertion `value > 0` failed.", "no: not value > 0"),
        ("something else", "no: something else"),
    ],
)
def test_assertions_of_the_converter_are_told_without_its_sources(text: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel) as error, onnx_transforming(model_of("n"), "no", "fix"):
        raise RuntimeError(text)

    assert error.value.what == reason
