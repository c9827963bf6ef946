"""Nodes whose inputs are of several float types compute, and are differentiated, in the widest."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import facts_of, initial_variables, train

TRAINED = ParameterChoice(train=("[!mv]",))
RNG = np.random.default_rng(0)

# (x, parameters and running statistics; nodes that make y), and the same with casts by hand.
NORMALISED = {
    "inference, float scale": (
        "double[6,3] x",
        "float[3] s = {1, 2, 3}, float[3] b = {0, 1, 2}, double[3] m = {0, 1, 2}, double[3] v = {1, 2, 3}",
        "y = BatchNormalization (h, s, b, m, v)",
        "S = Cast <to = 11> (s) B = Cast <to = 11> (b) y = BatchNormalization (h, S, B, m, v)",
    ),
    "inference, float statistics": (
        "double[6,3] x",
        "double[3] s = {1, 2, 3}, double[3] b = {0, 1, 2}, float[3] m = {0, 1, 2}, float[3] v = {1, 2, 3}",
        "y = BatchNormalization (h, s, b, m, v)",
        "M = Cast <to = 11> (m) V = Cast <to = 11> (v) y = BatchNormalization (h, s, b, M, V)",
    ),
    "training, float statistics": (
        "double[6,3] x",
        "double[3] s = {1, 2, 3}, double[3] b = {0, 1, 2}, float[3] m = {0, 1, 2}, float[3] v = {1, 2, 3}",
        "y, m_next, v_next = BatchNormalization <training_mode = 1> (h, s, b, m, v)",
        """M = Cast <to = 11> (m) V = Cast <to = 11> (v)
        y, M2, V2 = BatchNormalization <training_mode = 1> (h, s, b, M, V)
        m_next = Cast <to = 1> (M2) v_next = Cast <to = 1> (V2)""",
    ),
    "training, all else float beside float16": (
        "float16[6,3] x",
        "float[3] s = {1, 2, 3}, float[3] b = {0, 1, 2}, float[3] m = {0, 1, 2}, float[3] v = {1, 2, 3}",
        "y, m_next, v_next = BatchNormalization <training_mode = 1> (h, s, b, m, v)",
        """H = Cast <to = 1> (h) Y, m_next, v_next = BatchNormalization <training_mode = 1> (H, s, b, m, v)
        y = Cast <to = 10> (Y)""",
    ),
}


def model_of(x: str, values: str, body: str) -> onnx.ModelProto:
    element = x.split("[")[0]
    state = "m_next" in body
    outputs = "double loss" + (", float[3] m_next, float[3] v_next" if state else "")
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> net ({x}) => ({outputs})
        <{values}>
        {{
            h = Mul (x, a) {body}
            wide = Cast <to = 11> (y) t = Tanh (wide) loss = ReduceMean <keepdims = 0> (t)
        }}"""
    )
    dtype = np.float16 if element == "float16" else np.float64
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, -1], dtype), "a"))
    return model


@pytest.mark.parametrize(("x", "values", "mixed", "cast"), NORMALISED.values(), ids=NORMALISED)
def test_a_batch_normalisation_of_several_types_trains_as_with_casts(
    x: str, values: str, mixed: str, cast: str
) -> None:
    batch = {"x": RNG.normal(size=(6, 3)).astype(np.float16 if "float16" in x else np.float64)}
    step = build_training_graph(
        model_of(x, values, mixed), loss="loss", optimizer=SGD(0.5), parameters=TRAINED
    )
    by_hand = model_of(x, values, cast)
    if "m_next" in cast:
        by_hand.metadata_props.add(key="partc.forward", value='{"state": {"m": "m_next", "v": "v_next"}}')

    losses, after = train(step, [batch] * 2)

    expected_losses, expected = train(
        build_training_graph(by_hand, loss="loss", optimizer=SGD(0.5), parameters=TRAINED), [batch] * 2
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert after.keys() >= {"a", "s", "b"} | ({"m", "v"} if "m_next" in mixed else set())
    for name, value in after.items():
        assert value.dtype == expected[name].dtype
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7)


def test_the_gradient_is_that_of_central_differences() -> None:
    x, values, body, _ = NORMALISED["inference, float scale"]
    batch = {"x": RNG.normal(size=(6, 3))}
    step = build_training_graph(
        model_of(x, values, body), loss="loss", optimizer=SGD(1.0), parameters=TRAINED
    )
    start = initial_variables(step)

    _, after = train(step, [batch])

    for name in ("a", "s", "b"):
        for place in range(3):
            slope = 0.0
            for sign in (1, -1):
                moved = {key: value.copy() for key, value in start.items()}
                moved[name][place] += sign * 0.015625
                slope += sign * train(step, [batch], moved)[0][0] / 0.03125
            np.testing.assert_allclose(start[name][place] - after[name][place], slope, atol=2e-3)


def test_statistics_that_are_cast_are_drawn_anew_as_statistics() -> None:
    x, values, body, _ = NORMALISED["training, float statistics"]

    step = build_training_graph(
        model_of(x, values, body), loss="loss", optimizer=SGD(1.0), parameters=TRAINED, reinit=0
    )

    start = initial_variables(step)
    np.testing.assert_array_equal(start["m"], np.zeros(3, np.float32))
    np.testing.assert_array_equal(start["v"], np.ones(3, np.float32))
    assert facts_of(step)["state"]["m"] == "m_next"


def test_a_grid_of_another_type_is_widened() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (double[1,1,4,4] x, float[1,2,2,2] g) => (double loss)
    <double[4] a = {1, 2, 3, 4}, float[2] w = {1, 0.5}>
    {
        h = Mul (x, a) k = Mul (g, w) BODY
        loss = ReduceMean <keepdims = 0> (y)
    }"""
    mixed = text.replace("BODY", "y = GridSample (h, k)")
    cast = text.replace("BODY", "K = Cast <to = 11> (k) y = GridSample (h, K)")
    batch = {
        "x": RNG.normal(size=(1, 1, 4, 4)),
        "g": RNG.uniform(-0.9, 0.9, (1, 2, 2, 2)).astype(np.float32),
    }

    (losses, after), (expected_losses, expected) = (
        train(
            build_training_graph(
                onnx.parser.parse_model(model), loss="loss", optimizer=SGD(0.5), parameters=TRAINED
            ),
            [batch],
        )
        for model in (mixed, cast)
    )

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    for name, value in after.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)
