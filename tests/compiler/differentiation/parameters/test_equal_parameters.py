"""An initializer that stands for parameters of several modules is not trained as one."""

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.exported_models import as_exported, stored_model

SCOPES = "pkg.torch.onnx.name_scopes"
RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 4)).astype(np.float32)
ZEROS, ONES = np.zeros(4, np.float32), np.ones(4, np.float32)
DRAWN = RNG.normal(size=4).astype(np.float32)
ALL = ParameterChoice(train=("*",))

SPLIT = """
net (float[6,4] x) => (float[6,2] y) {
    w = MatMul (x, W) h = Add (w, bias)
    s, t = Split <axis = 0, num_outputs = 2> (bias)
    v = MatMul (h, V) k = Add (v, s) y = Add (k, t)
}
"""
NORMALISED = (
    "net (float[6,4] x) => (float[6,4] y) { h = Mul (x, add_1) k = MatMul (h, W) y = Mul (k, add_1) }"
)


def within(model: onnx.ModelProto, modules: dict[str, str]) -> onnx.ModelProto:
    """Return the model, whose nodes that make these results now tell the modules that they came from."""
    for node in model.graph.node:
        if module := modules.get(node.output[0]):
            node.metadata_props.add(key=SCOPES, value=repr(["", module, node.output[0]]))
    return model


def halves(gone: str, bias: np.ndarray = ZEROS) -> onnx.ModelProto:
    """Return k = v + b.bias[:2] and y = k + b.bias[2:] of module b: nothing tells of the Split."""
    model = as_exported(
        stored_model(SPLIT, {"W": W, "V": W[:, :2], "bias": bias}),
        parameters=("W", "V", "bias"),
        gone=(gone,),
        operations={
            "w": "%x, %p_W, %p_bias",
            "h": "%x, %p_W, %p_bias",
            "v": "%h, %p_V",
            "k": "%v, %getitem",
            "y": "%k, %getitem_1",
        },
    )
    return within(model, {"k": "b", "y": "b"})


def normalised(scale: np.ndarray, read: str = "add_3") -> onnx.ModelProto:
    """Return h = x (1 + a.weight) and y = k (1 + b.weight), or what else of that name module b reads."""
    model = as_exported(
        stored_model(NORMALISED, {"W": W, "add_1": scale}),
        parameters=("W",),
        gone=("a.weight", "b.weight"),
        folded={"add_1": ("a.weight", "val_6")},
        operations={"h": "%x, %add_1", "k": "%h, %p_W", "y": f"%k, %{read}"},
    )
    return within(model, {"h": "a", "y": "b"})


def told(model: onnx.ModelProto, choice: ParameterChoice = ParameterChoice()) -> list[str]:  # noqa: B008
    lines: list[str] = []
    build_training_graph(model, loss="mse", optimizer=SGD(), parameters=choice, tell=lines.append)
    return lines


def test_a_split_bias_of_zeros_that_stands_for_another_modules_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="would be tied") as refusal:
        told(halves("b.bias"))

    assert refusal.value.at == "bias: also b.bias"
    assert "optimize=False); or add --freeze bias" in refusal.value.fix


@pytest.mark.parametrize(("gone", "bias"), [("c.bias", ZEROS), ("b.other", ZEROS), ("b.bias", DRAWN)])
def test_a_split_bias_of_which_there_is_one_is_trained(gone: str, bias: np.ndarray) -> None:
    """No other that its reader's module has is missing, or values that were drawn do not meet by chance."""
    assert told(halves(gone, bias))[0].startswith("trained: 3 parameters")


@pytest.mark.parametrize("choice", [ParameterChoice(), ALL, ParameterChoice(freeze=("b.weight",))])
def test_a_scale_that_was_computed_of_equals_is_refused_whatever_is_chosen(choice: ParameterChoice) -> None:
    with pytest.raises(UnsupportedModel, match=r"add_1: also b\.weight"):
        told(normalised(ONES), choice)


def test_what_is_frozen_may_stand_for_several() -> None:
    lines = told(normalised(ONES), ParameterChoice(freeze=("add_1", "b.weight")))

    assert "  1 frozen by --freeze: add_1" in lines


@pytest.mark.parametrize(("scale", "read"), [(ONES, "add_1"), (DRAWN, "add_3")])
def test_a_scale_that_two_modules_share_is_trained(scale: np.ndarray, read: str) -> None:
    assert any("add_1 (of a.weight)" in line for line in told(normalised(scale, read), ALL))
