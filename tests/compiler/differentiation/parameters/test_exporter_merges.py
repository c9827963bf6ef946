"""Parameters that an exporter merged, stored twice or dropped train as those of the module."""

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import BadUsage
from tests.builders.graphs.exported_models import as_exported, stored_model
from tests.checks.training_steps import train

RNG = np.random.default_rng(0)
X, TARGETS = RNG.normal(size=(6, 4)).astype(np.float32), RNG.normal(size=(6, 4)).astype(np.float32)
V, W = RNG.normal(size=(4, 4)).astype(np.float32), RNG.normal(size=(4, 4)).astype(np.float32)
ZEROS = np.zeros(4, np.float32)

# Two layers that begin equal, and a head.
APART = """
net (float[6,4] x) => (float[6,4] y) {
    h = MatMul (x, W1) a = Add (h, b1) r = Relu (a)
    k = MatMul (r, W2) c = Add (k, b2) y = MatMul (c, V)
}
"""


def after_two_steps(model: onnx.ModelProto) -> tuple[list[float], dict[str, np.ndarray]]:
    step = build_training_graph(model, loss="mse", optimizer=SGD(lr=0.5))
    losses, after = train(step, [{"x": X, "targets": TARGETS}] * 2)
    return [float(loss) for loss in losses], after


def assert_trains_as(model: onnx.ModelProto, text: str, values: Mapping[str, np.ndarray]) -> None:
    """Hold a model against the same without what the exporter did to it."""
    plain = as_exported(stored_model(text, values), parameters=tuple(values))
    expected, variables = after_two_steps(plain)

    losses, after = after_two_steps(model)

    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert len(after) == len(variables)
    flat = [np.sort(value, axis=None) for value in after.values()]
    for value in variables.values():
        assert any(
            np.allclose(np.sort(value, axis=None), other, atol=1e-6)
            for other in flat
            if other.size == value.size
        )


def test_parameters_that_were_equal_are_merged_no_longer() -> None:
    text = """
    net (float[6,4] x) => (float[6,4] y) {
        h = MatMul (x, val_0) a = Add (h, b1) r = Relu (a)
        k = MatMul (r, val_0) c = Add (k, b1) y = MatMul (c, V)
    }
    """
    linear = {
        "h": "%x, %p_W1, %p_b1", "a": "%x, %p_W1, %p_b1", "k": "%r, %p_W2, %p_b2", "c": "%r, %p_W2, %p_b2",
    }  # fmt: skip
    model = as_exported(
        stored_model(text, {"val_0": W, "b1": ZEROS, "V": V}),
        parameters=("b1", "V"),
        gone=("W1", "W2", "b2"),
        folded={"val_0": ("W1",)},
        operations=linear,
    )

    assert_trains_as(model, APART, {"W1": W, "W2": W, "b1": ZEROS, "b2": ZEROS, "V": V})


def test_a_layer_that_is_called_twice_stays_one() -> None:
    text = """
    net (float[6,4] x) => (float[6,4] y) {
        h = MatMul (x, val_0) a = Add (h, b1) r = Relu (a)
        k = MatMul (r, val_0) c = Add (k, b1) y = MatMul (c, V)
    }
    """
    linear = {
        "h": "%x, %p_W1, %p_b1",
        "a": "%x, %p_W1, %p_b1",
        "k": "%r, %p_W1, %p_b1",
        "c": "%r, %p_W1, %p_b1",
    }
    values = {"val_0": W, "b1": ZEROS, "V": V}
    model = as_exported(
        stored_model(text, values),
        parameters=("b1", "V"),
        gone=("W1",),
        folded={"val_0": ("W1",)},
        operations=linear,
    )

    assert_trains_as(model, text, values)


def test_a_bias_that_was_dropped_for_its_zeros_is_trained() -> None:
    text = """
    net (float[6,4] x) => (float[6,4] y) {
        h = Gemm (x, W) r = Relu (h) y = Gemm <transB = 1> (r, V, c)
    }
    """
    model = as_exported(
        stored_model(text, {"W": W, "V": V, "c": ZEROS}),
        parameters=("W", "V", "c"),
        gone=("b",),
        operations={"h": "%x, %p_W, %p_b", "y": "%r, %p_V, %p_c"},
    )

    whole = text.replace("Gemm (x, W)", "Gemm (x, W, b)")
    assert_trains_as(model, whole, {"W": W, "b": ZEROS, "V": V, "c": ZEROS})


TIED = "net (float[6,4] x) => (float[6,4] y) { h = MatMul (x, W) r = Relu (h) y = MatMul (r, NAME) }"
TIED_BY_HAND = TIED.replace("y =", "t = Transpose <perm = [1, 0]> (W) y =").replace("NAME", "t")


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_tied_matrix_that_is_stored_twice_trains_as_one(exporter: str) -> None:
    name = "val_3" if exporter == "dynamo" else "t2"
    model = stored_model(TIED.replace("NAME", name), {"W": W, name: np.ascontiguousarray(W.T)})
    if exporter == "dynamo":
        as_exported(model, parameters=("W",), folded={name: ("W",)}, operations={"y": "%r, %p_W"})
    else:
        as_torchscript(model, {"t2": "onnx::MatMul_3"})

    assert_trains_as(model, TIED_BY_HAND, {"W": W})


@pytest.mark.parametrize("names", [("val_3",), ("W", "val_3")])
def test_a_copy_is_called_by_the_name_that_the_file_has_for_it(names: tuple[str, ...]) -> None:
    model = stored_model(TIED.replace("NAME", "val_3"), {"W": W, "val_3": np.ascontiguousarray(W.T)})
    as_exported(model, parameters=("W",), folded={"val_3": ("W",)}, operations={"y": "%r, %p_W"})

    chosen = build_training_graph(
        model, loss="mse", optimizer=SGD(lr=0.5), parameters=ParameterChoice(train=names)
    )

    assert chosen == build_training_graph(model, loss="mse", optimizer=SGD(lr=0.5))
    with pytest.raises(BadUsage, match="every parameter is frozen"):
        build_training_graph(
            model, loss="mse", optimizer=SGD(lr=0.5), parameters=ParameterChoice(freeze=names)
        )


def as_torchscript(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Rename tensors, and let nodes be named as TorchScript's exporter does: by module and call."""
    model.producer_name = "pytorch"
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def test_torchscripts_identities_of_equal_parameters_are_separate_parameters() -> None:
    model = stored_model(
        APART.replace("h =", "W2 = Identity (W1) b2 = Identity (b1) h =", 1), {"W1": W, "b1": ZEROS, "V": V}
    )

    assert_trains_as(as_torchscript(model, {}), APART, {"W1": W, "W2": W, "b1": ZEROS, "b2": ZEROS, "V": V})


@pytest.mark.parametrize("second", ["/layer_1/MatMul", "/other/MatMul"])
def test_torchscripts_folded_weights_are_one_where_the_same_module_reads_them(second: str) -> None:
    model = stored_model(
        APART.replace("h =", "W2 = Identity (W1) h =", 1), {"W1": W, "b1": ZEROS, "b2": ZEROS + 1, "V": V}
    )
    for node in model.graph.node:
        node.name = {"h": "/layer/MatMul", "k": second}.get(node.output[0], "")
    as_torchscript(model, {"W1": "onnx::MatMul_1", "W2": "onnx::MatMul_2"})

    values = {"W1": W, "W2": W, "b1": ZEROS, "b2": ZEROS + 1, "V": V}
    if second == "/layer_1/MatMul":
        assert_trains_as(model, APART.replace("W2", "W1"), {n: v for n, v in values.items() if n != "W2"})
    else:
        assert_trains_as(model, APART, values)
