"""Ops written as others: what they compute, in every form that onnxruntime knows, and their gradients."""

import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import EVERYTHING, Arrays, facts_of, session

LSTM = "float[5,3,4] a, float[D,12,4] b, float[D,12,3] c, float[D,24] e"
GRU = "float[5,3,4] a, float[D,9,4] b, float[D,9,3] c, float[D,18] e"
RNN = "float[5,3,4] a, float[D,3,4] b, float[D,3,3] c, float[D,6] e"
STATE = "float[D,3,3] h"
CELL = f"{STATE}, float[D,3,3] k, float[D,9] p"
LENGTHS = "l = Constant <value = int32[3] {5, 2, 3}> ()"
BOTH = 'direction = "bidirectional"'

# Inputs (float; D is the number of directions) | nodes. The results are y, and the last states u and v.
RECURRENT = {
    "LSTM": f"{LSTM}, {CELL} | y, u, v = LSTM <hidden_size = 3> (a, b, c, e, , h, k, p)",
    "LSTM_lengths": f"{LSTM}, {CELL} | {LENGTHS} y, u, v = LSTM <hidden_size = 3> (a, b, c, e, l, h, k, p)",
    "LSTM_lengths_backwards": f"{LSTM} | {LENGTHS} "
    'y, u, v = LSTM <hidden_size = 3, direction = "reverse"> (a, b, c, e, l)',
    "LSTM_both": f"{LSTM}, {CELL} | {LENGTHS} "
    f"y, u, v = LSTM <hidden_size = 3, {BOTH}> (a, b, c, e, l, h, k, p)",
    "LSTM_clipped": f"{LSTM} | y, u, v = LSTM <hidden_size = 3, clip = 0.4> (a, b, c, e)",
    "LSTM_coupled": f"{LSTM}, {CELL} | "
    "y, u, v = LSTM <hidden_size = 3, input_forget = 1> (a, b, c, e, , h, k, p)",
    "LSTM_activations": f"{LSTM} | y, u, v = LSTM <hidden_size = 3, {BOTH}, "
    'activations = ["HardSigmoid", "Affine", "Tanh", "Sigmoid", "ScaledTanh", "Relu"], '
    "activation_alpha = [0.3, 0.9, 1.2], activation_beta = [0.4, 0.1, 0.7]> (a, b, c, e)",
    "LSTM_last_state": f"{LSTM} | , u, v = LSTM <hidden_size = 3> (a, b, c, e)",
    "GRU": f"{GRU}, {STATE} | y, u = GRU <hidden_size = 3> (a, b, c, e, , h)",
    "GRU_linear": f"{GRU}, {STATE} | y, u = GRU <hidden_size = 3, linear_before_reset = 1> (a, b, c, e, , h)",
    "GRU_both": f"{GRU} | {LENGTHS} "
    f"y, u = GRU <hidden_size = 3, {BOTH}, linear_before_reset = 1> (a, b, c, e, l)",
    "GRU_clipped": f'{GRU} | y, u = GRU <hidden_size = 3, direction = "reverse", clip = 0.3> (a, b, c, e)',
    "RNN": f"{RNN}, {STATE} | {LENGTHS} y, u = RNN <hidden_size = 3, {BOTH}> (a, b, c, e, l, h)",
    "RNN_relu": f'{RNN} | y, u = RNN <hidden_size = 3, activations = ["Relu"]> (a, b, c, e)',
    "RNN_affine": f'{RNN} | y, u = RNN <hidden_size = 3, activations = ["Affine"], '
    "activation_alpha = [0.5], activation_beta = [0.1]> (a, b, c, e)",
}
OTHERS = {
    "GroupNormalization_twice": "float[2,4,3,2] a, float[4] b, float[4] c | "
    "g = GroupNormalization <num_groups = 2> (a, b, c) t = Tanh (g) "
    "y = GroupNormalization <num_groups = 4> (t, c, b)",
    "MeanVarianceNormalization": "float[2,3,4,2] a | g = MeanVarianceNormalization (a) y = Mul (g, a)",
    "GridSample": "float[2,3,4,4] a, float[2,3,3,2] b | y = GridSample <align_corners = 1> (a, b)",
}
CASES = {**RECURRENT, **OTHERS}


def model_of(case: str, element: str = "float", opset: int = 21) -> onnx.ModelProto:
    """Read a case; inputs become initializers, `total` is the sum of all results' squares."""
    inputs, nodes = case.split("|")
    inputs = inputs.replace("D", "2" if "bidirectional" in nodes else "1").replace("float", element)
    results = [name for name in ("y", "u", "v") if re.search(rf"(^|[ ,]){name}( =|,)", nodes)]
    sums = " ".join(f"{r}q = Mul ({r}, {r}) {r}s = ReduceSum <keepdims = 0> ({r}q)" for r in results)
    totals = ", ".join(f"{result}s" for result in results)
    outputs = ", ".join(f"{element} {name}" for name in ("total", *results))
    header = f'<ir_version: 10, opset_import: ["": {opset}]> test ({inputs}) => ({outputs})'
    model = onnx.parser.parse_model(f"{header} {{ {nodes} {sums} total = Sum ({totals}) }}")
    for value in model.graph.output[1:]:
        value.type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(7)
    for value in model.graph.input:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        array = rng.normal(scale=0.7, size=shape).astype(np.float32 if element == "float" else np.float64)
        model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    del model.graph.input[:]
    return model


def built(model: onnx.ModelProto) -> onnx.ModelProto:
    return build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)


def stored(model: onnx.ModelProto) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("case", CASES)
def test_an_expansion_computes_what_onnxruntime_does(case: str) -> None:
    model = model_of(CASES[case])
    names = [output.name for output in model.graph.output]

    expected = session(model).run(names, {})
    trained = built(model)
    actual = session(trained).run(
        names, {n: v for n, v in stored(model).items() if n in facts_of(trained)["state"]}
    )

    for name, one, other in zip(names, actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_an_expansion_equals_differences_of_it(case: str) -> None:
    model = model_of(CASES[case], "double")
    trained = built(model)
    state, start = facts_of(trained)["state"], stored(model)
    start = {name: value for name, value in start.items() if name in state}
    run = session(trained)

    after = dict(zip(start, run.run([state[name] for name in start], start), strict=True))

    for name, value in start.items():
        way = np.random.default_rng(3).normal(size=value.shape)
        ends = [run.run(["total"], {**start, name: value + step * way})[0] for step in (1e-6, -1e-6)]
        slope = float(ends[0] - ends[1]) / 2e-6
        assert ((value - after[name]) * way).sum() == pytest.approx(slope, rel=1e-6, abs=1e-6), name


def test_an_unrolled_cell_is_few_nodes() -> None:
    model = model_of(f"{LSTM} | y, u, v = LSTM <hidden_size = 3> (a, b, c, e)")
    one, two = (model_of_steps(model, steps) for steps in (5, 6))

    assert len(two.graph.node) - len(one.graph.node) <= 50  # forward, backward and the weights' gradients


def model_of_steps(model: onnx.ModelProto, steps: int) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = next(t for t in copy.graph.initializer if t.name == "a")
    tensor.CopyFrom(numpy_helper.from_array(np.ones((steps, 3, 4), np.float32), "a"))
    return built(copy)


def test_a_model_of_the_newest_opset_is_written_in_ours() -> None:
    text = """float[2,3,8,4] a, float[4] w | p = GlobalMaxPool (a) q = Swish (p)
        r = RMSNormalization (a, w) s = Add (q, r) y = Softplus (s)"""

    trained = built(model_of(text, opset=26))

    assert {o.version for o in trained.opset_import if not o.domain} == {21}
    assert {"a", "w"} == facts_of(trained)["state"].keys()


def test_angles_are_no_parameters() -> None:
    text = """float[2,3,4] a, float[5,2] c, float[5,2] s |
        i = Constant <value = int64[2,3] {0, 1, 2, 2, 3, 4}> ()
        y = RotaryEmbedding <num_heads = 1> (a, c, s, i)"""

    assert facts_of(built(model_of(text, opset=23)))["state"].keys() == {"a"}


def test_a_group_normalization_of_opset_18_scales_groups() -> None:
    text = """float[2,4,3,2] a, float[2] b, float[2] c |
        g = GroupNormalization <num_groups = 2> (a, b, c) y = Mul (g, a)"""
    model = model_of(text, opset=18)

    actual = session(built(model)).run(["y"], stored(model))[0]

    np.testing.assert_allclose(actual, session(model).run(["y"], {})[0], rtol=1e-4, atol=1e-6)
