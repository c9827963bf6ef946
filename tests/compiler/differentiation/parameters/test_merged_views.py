"""Equal views that the exporter stored as one tensor train as the parameters that they are of."""

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import BadUsage
from tests.builders.graphs.exported_models import as_exported, stored_model
from tests.checks.training_steps import train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W = RNG.normal(size=(4, 4)).astype(np.float32)
ONES, ZEROS = np.ones(4, np.float32), np.zeros(4, np.float32)

TWO_SCALES = """net (float[6,4] x) => (float loss) {
    h = Mul (x, unsqueeze) k = MatMul (h, w) y = Mul (k, SECOND)
    t = Tanh (y) loss = ReduceMean <keepdims = 0> (t) }"""
TWO_BIASES = """net (float[6,4] x) => (float loss) {
    h = Add (x, slice_1) k = MatMul (h, w) y = Add (k, slice_1)
    t = Tanh (y) loss = ReduceMean <keepdims = 0> (t) }"""


def exported(values: Mapping[str, np.ndarray], gone: tuple[str, ...], second: str) -> onnx.ModelProto:
    """Return two scales that are one tensor; the second operation read `second`."""
    return as_exported(
        stored_model(TWO_SCALES.replace("SECOND", "unsqueeze"), values),
        parameters=("w",),
        gone=gone,
        folded={"unsqueeze": (gone[0], "val_1")},
        operations={"h": "%x, %unsqueeze", "k": "%h, %p_w", "y": f"%k, %{second}"},
    )


def after_two_steps(model: onnx.ModelProto) -> tuple[list[float], dict[str, np.ndarray]]:
    step = build_training_graph(model, loss="loss", optimizer=SGD(lr=0.5))
    return train(step, [{"x": X}] * 2)


def test_equal_scales_are_two_parameters() -> None:
    model = exported({"unsqueeze": ONES[None], "w": W}, ("p", "q"), "unsqueeze_1")

    losses, after = after_two_steps(model)

    plain = stored_model(
        TWO_SCALES.replace("SECOND", "q"), {"unsqueeze": ONES[None], "q": ONES[None], "w": W}
    )
    expected_losses, expected = after_two_steps(as_exported(plain, parameters=("unsqueeze", "q", "w")))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert after.keys() == {"unsqueeze", "unsqueeze_1", "w"}
    np.testing.assert_allclose(after["unsqueeze_1"], expected["q"], rtol=1e-6)


def test_the_module_of_an_operation_tells_which_parameter_is_its_own() -> None:
    model = exported({"unsqueeze": ONES[None], "w": W}, ("a.g", "b.g", "c.g"), "unsqueeze_1")
    node = next(node for node in model.graph.node if node.output[0] == "y")
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'b', 'mul_1']")

    _, after = after_two_steps(model)

    assert after.keys() == {"unsqueeze", "unsqueeze_1", "w"}


@pytest.mark.parametrize("gone", [("p",), ("p", "q", "r")])
def test_what_may_be_one_parameter_or_several_is_asked_for(gone: tuple[str, ...]) -> None:
    model = exported({"unsqueeze": ONES[None], "w": W}, gone, "unsqueeze_1")

    with pytest.raises(BadUsage, match=r"parts of one, that were equal: .*: unsqueeze \(of p\)"):
        after_two_steps(model)


def test_a_module_with_two_views_and_two_parameters_has_one_each() -> None:
    text = TWO_SCALES.replace("y =", "z = Mul (k, unsqueeze) y =").replace("(k, SECOND)", "(z, unsqueeze)")
    model = as_exported(
        stored_model(text, {"unsqueeze": ONES[None], "w": W}),
        parameters=("w",),
        gone=("p", "q", "r"),
        folded={"unsqueeze": ("p",)},
        operations={"h": "%x, %unsqueeze", "z": "%k, %unsqueeze_1", "y": "%z, %unsqueeze_2"},
    )

    _, after = after_two_steps(model)

    assert after.keys() == {"unsqueeze", "unsqueeze_1", "unsqueeze_2", "w"}


def test_equal_parts_of_a_parameter_are_asked_for() -> None:
    model = as_exported(
        stored_model(TWO_BIASES, {"slice_1": ZEROS, "w": W}),
        parameters=("w",),
        gone=("b",),
        folded={"slice_1": ("b", "val_1")},
        operations={"h": "%x, %slice_1", "k": "%h, %p_w", "y": "%k, %slice_2"},
    )

    with pytest.raises(BadUsage, match=r"parts of one, that were equal: .*: slice_1 \(of b\)"):
        after_two_steps(model)


@pytest.mark.parametrize("gone", [("p",), ("p", "unused")])
@pytest.mark.parametrize("second", ["unsqueeze_1", "dropout"])
def test_values_that_differ_are_one_view_that_is_read_twice(second: str, gone: tuple[str, ...]) -> None:
    model = exported({"unsqueeze": W[:1], "w": W}, gone, second)

    _, after = after_two_steps(model)

    assert after.keys() == {"unsqueeze", "w"}
