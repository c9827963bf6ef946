"""Which float tensors `partc grad` trains: --train and --freeze."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.forward.rebatch import BatchSize
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice, check_fit
from partc.compiler.differentiation.updates.loss_scaling import StaticScale
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.runtime.errors import BadUsage
from tests.checks import training_steps as one_device
from tests.checks.command_line import done, refused

MASKED = """
<ir_version: 10, opset_import: ["" : 21]>
masked (float[4,3] x) => (float[4,2] y) {
    h = Mul (x, mask)
    z = MatMul (h, head_weight)
    scaled = Mul (z, scale)
    y = Add (scaled, head_bias)
}
"""
VALUES = {
    "mask": np.array([[1, 0, 1]], np.float32),
    "head_weight": np.ones((3, 2), np.float32),
    "head_bias": np.zeros(2, np.float32),
    "scale": np.array(2.0, np.float32),
    "unread": np.ones(3, np.float32),
}


def masked(declared: str = "") -> onnx.ModelProto:
    model = onnx.parser.parse_model(MASKED)
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in VALUES.items())
    if declared:
        model.metadata_props.add(key="partc.forward", value=declared)
    return model


def trained(choice: ParameterChoice, declared: str = "") -> set[str]:
    step = build_training_graph(masked(declared), loss="mse", optimizer=SGD(), parameters=choice)
    assert set(VALUES) >= {tensor.name for tensor in step.graph.initializer} & set(VALUES)
    return {value.name for value in step.graph.input} - {"x", "targets"}


DECLARED = '{"parameters": ["head_weight"]}'


@pytest.mark.parametrize(
    ("choice", "declared", "expected"),
    [
        (ParameterChoice(train=("*",)), "", {"mask", "head_weight", "head_bias"}),
        (ParameterChoice(train=("*", "scale"), freeze=("mask",)), "", {"head_weight", "head_bias", "scale"}),
        (ParameterChoice(freeze=("mask",)), "", {"head_weight", "head_bias"}),
        (ParameterChoice(freeze=("m*", "*_bias")), "", {"head_weight"}),
        (ParameterChoice(train=("head_*",)), "", {"head_weight", "head_bias"}),
        (ParameterChoice(train=("*",), freeze=("*_bias",)), "", None),
        (ParameterChoice(train=("head_*",), freeze=("*_bias",)), "", {"head_weight"}),
        (ParameterChoice(train=("scale",)), "", {"scale"}),
        (ParameterChoice(), DECLARED, {"head_weight"}),
        (ParameterChoice(freeze=("mask",)), DECLARED, {"head_weight"}),
        (ParameterChoice(train=("head_*",)), DECLARED, {"head_weight", "head_bias"}),
    ],
)
def test_patterns_choose_what_is_trained(
    choice: ParameterChoice, declared: str, expected: set[str] | None
) -> None:
    assert trained(choice, declared) == (expected or {"mask", "head_weight"})


def test_what_is_frozen_has_no_gradient_and_no_slot() -> None:
    choice = ParameterChoice(freeze=("mask",))

    step = build_training_graph(masked(), loss="mse", optimizer=Momentum(), parameters=choice)

    names = {name for node in step.graph.node for name in node.output}
    assert not [name for name in names if "mask" in name]
    (kept,) = (tensor for tensor in step.graph.initializer if tensor.name == "mask")
    np.testing.assert_array_equal(numpy_helper.to_array(kept), VALUES["mask"])


def test_what_is_frozen_keeps_its_16_bits() -> None:
    model = onnx.parser.parse_model(MASKED.replace("float[", "float16["))
    halves = {name: value.astype(np.float16) for name, value in VALUES.items()}
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in halves.items())
    choice, update = ParameterChoice(freeze=("mask",)), UpdateOptions(loss_scale=StaticScale(8.0))

    step = build_training_graph(model, loss="mse", optimizer=SGD(), update=update, parameters=choice)

    elements = {tensor.name: tensor.data_type for tensor in step.graph.initializer}
    assert elements["mask"] == onnx.TensorProto.FLOAT16
    assert elements["head_weight"] == onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("choice", "what", "at", "fix"),
    [
        (ParameterChoice(freeze=("mask", "rotary*")), "'rotary*'", "--freeze", "head_bias"),
        (ParameterChoice(train=("tail_*",)), "'tail_*'", "--train", "head_bias"),
        (ParameterChoice(train=("mask", "unread")), "the loss depends on", "--train", "'mask', 'scale'"),
        (
            ParameterChoice(train=("head_*", "s*")),
            "fits constants alone: scale",
            "without axes",
            "--train scale",
        ),
        (ParameterChoice(freeze=("*",)), "every parameter is frozen", "--freeze", "head_bias"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(
    choice: ParameterChoice, what: str, at: str, fix: str
) -> None:
    with pytest.raises(BadUsage) as error:
        trained(choice)
    assert what in error.value.what
    assert at in error.value.at
    assert fix in error.value.fix


def test_the_patterns_that_a_refusal_offers_fit_names_with_commas() -> None:
    with pytest.raises(BadUsage) as error:
        check_fit("--train", ("w", "1"), ["w,1", "v[0]"])

    assert error.value.fix == "use patterns for some of 'v[[]0]', 'w?1'"
    check_fit("--train", ("v[[]0]", "w?1"), ["w,1", "v[0]"])


def test_a_loss_of_constants_alone_is_told_how_to_train_one() -> None:
    text = "(float[4] x) => (float y) <float w = {2.0}> { h = Mul (x, w) y = ReduceSum <keepdims = 0> (h) }"
    forward = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> numbers {text}')

    with pytest.raises(BadUsage, match=r"numbers without axes: w\n  fix: .*--train w,"):
        build_training_graph(forward, loss="y", optimizer=SGD())
    step = build_training_graph(forward, loss="y", optimizer=SGD(), parameters=ParameterChoice(train=("w",)))

    assert "w" in {value.name for value in step.graph.input}


def test_a_tensor_that_would_be_drawn_anew_cannot_be_frozen() -> None:
    drawn = MASKED.replace("h = Mul", "mask = RandomNormal <shape = [1,3], seed = 1.0> () h = Mul")
    model = onnx.parser.parse_model(drawn)
    stored = {name: value for name, value in VALUES.items() if name != "mask"}
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in stored.items())

    with pytest.raises(BadUsage, match="fix: train it too"):
        build_training_graph(model, loss="mse", optimizer=SGD(), parameters=ParameterChoice(freeze=("mask",)))


def test_the_command_line_takes_patterns(tmp_path: Path) -> None:
    forward, out = tmp_path / "forward.onnx", tmp_path / "train.onnx"
    onnx.save(masked(), forward)
    arguments = ("grad", forward, "--loss", "mse", "-o", out)

    done(*arguments, "--train", "head_*,mask", "--freeze", "mask")

    assert {value.name for value in onnx.load(out).graph.input} == {
        "x",
        "targets",
        "head_weight",
        "head_bias",
    }
    refused(*arguments, "--freeze", "nothing*", what="'nothing*'", at="--freeze", fix="use patterns")


RECURRENCE = """
<ir_version: 10, opset_import: ["" : 21]>
steps (float[8,3,2] x) => (float loss) {
    batch = Shape <start = 0, end = 1> (x)
    width = Constant <value_ints = [4]> ()
    sizes = Concat <axis = 0> (batch, width)
    h0 = ConstantOfShape (sizes)
    xt = Transpose <perm = [1, 0, 2]> (x)
    last, all = Scan (h0, xt) <num_scan_inputs = 1, body = step (float[b,4] h, float[b,2] xi)
        => (float[b,4] next, float[b,4] copy) {
            a = MatMul (xi, W) r = MatMul (h, V) s = Add (a, r) next = Tanh (s) copy = Identity (next) }>
    squares = Mul (last, last)
    loss = ReduceMean <keepdims = 0> (squares)
}
"""


def recurrence_loss(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> float:
    h = np.zeros((len(x), 4))
    for step in range(x.shape[1]):
        h = np.tanh(x[:, step] @ w + h @ v)
    return float((h**2).mean())


@pytest.mark.parametrize("batch", [None, 12, "dynamic"])
@pytest.mark.parametrize("train", [None, ("*",)])
def test_a_first_state_of_the_batchs_size_is_no_parameter(
    batch: BatchSize | None, train: tuple[str, ...] | None
) -> None:
    """Its size is folded, or its batch is rewritten: it stays what nodes make of an input."""
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(2, 4)), rng.normal(size=(4, 4))
    model = onnx.parser.parse_model(RECURRENCE)
    for name, value in (("W", w), ("V", v)):
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    step = build_training_graph(
        model, loss="loss", optimizer=SGD(1.0), batch_size=batch, parameters=ParameterChoice(train=train)
    )
    x = rng.normal(size=(12 if batch else 8, 3, 2))

    (loss,), after = one_device.train(step, [{"x": x.astype(np.float32)}])

    assert loss == pytest.approx(recurrence_loss(x, w, v), rel=1e-5)
    assert after.keys() == {"W", "V"}
    slope = np.zeros_like(v)
    for place in np.ndindex(*v.shape):
        nudge = np.zeros_like(v)
        nudge[place] = 1e-5
        slope[place] = (recurrence_loss(x, w, v + nudge) - recurrence_loss(x, w, v - nudge)) / 2e-5
    np.testing.assert_allclose(v - after["V"], slope, rtol=1e-3, atol=1e-6)
