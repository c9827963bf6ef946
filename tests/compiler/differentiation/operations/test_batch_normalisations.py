"""Batch normalisations of modules in training, which the exporter writes as ones in evaluation."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.operations.follow_operations import follow_operations
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.bindings import read_bindings
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.exported_models import call, with_operations
from tests.builders.graphs.foreign_steps import parse

TENSORS = "%x, %p_scale, %p_bias, %b_mean, %b_var"
IN_TRAINING = call("_native_batch_norm_legit_functional.default", f"{TENSORS}, True, 0.3, 1e-05")
UNDECOMPOSED = call("batch_norm.default", f"{TENSORS}, True, 0.3, 1e-05, False")
IN_EVALUATION = (
    call("_native_batch_norm_legit_no_training.default", f"{TENSORS}, 0.3, 1e-05"),
    call("batch_norm.default", f"{TENSORS}, False, 0.3, 1e-05, True"),
    call("_native_batch_norm_legit.no_stats", "%x, %p_scale, %p_bias, True, 0.3, 1e-05"),
    "",
)
NORMALISED = """
net (float[6, 3] x, float[6, 3] t) => (float loss) {{
    {results} = BatchNormalization {attributes} (x, scale, bias, mean, var)
    d = Sub (y, t)
    q = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (q)
}}
"""
AS_EXPORTED = NORMALISED.format(results="y", attributes="<epsilon = 1e-05>")
AS_MEANT = NORMALISED.format(
    results="y, mean_next, var_next", attributes="<epsilon = 1e-05, momentum = 0.7, training_mode = 1>"
)


def model_of(text: str, operations: dict[str, str] | None = None) -> onnx.ModelProto:
    """`operations`: of the nodes that make these results."""
    model, rng = parse(text), np.random.default_rng(1)
    for name in ("scale", "bias", "mean", "var"):
        value = rng.uniform(0.5, 1.5, 3).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return with_operations(model, operations or {})


def next_values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return what a step of the model's SGD makes of each variable."""
    step = build_training_graph(model, loss="loss", optimizer=SGD(0.1))
    state, rng = read_bindings(step, None).state, np.random.default_rng(2)
    feeds = {name: rng.normal(size=(6, 3)).astype(np.float32) for name in ("x", "t")}
    return dict(zip(state, ReferenceEvaluator(step).run(list(state.values()), feeds), strict=True))


@pytest.mark.parametrize("operation", [IN_TRAINING, UNDECOMPOSED])
def test_a_normalisation_in_training_is_one(operation: str) -> None:
    found, expected = next_values(model_of(AS_EXPORTED, {"y": operation})), next_values(model_of(AS_MEANT))

    assert found.keys() == expected.keys() == {"scale", "bias", "mean", "var"}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


@pytest.mark.parametrize("operation", IN_EVALUATION)
def test_other_normalisations_stay_as_they_are(operation: str) -> None:
    model = model_of(AS_EXPORTED, {"y": operation})

    assert follow_operations(model) is model


def test_a_normalisation_that_was_folded_away_is_refused() -> None:
    text = """net (float[6, 3] x) => (float loss) {
        y = Gemm (x, W, bias) loss = ReduceMean <keepdims = 0> (y) }"""

    with pytest.raises(UnsupportedModel, match="folded a batch normalisation") as refusal:
        follow_operations(model_of(text, {"y": IN_TRAINING}))

    assert "optimize=False" in refusal.value.fix


def test_statistics_that_two_normalisations_share_are_refused() -> None:
    twice = AS_EXPORTED.replace(
        "d = Sub (y, t)", "z = BatchNormalization (y, scale, bias, mean, var) d = Sub (z, t)"
    )

    with pytest.raises(UnsupportedModel, match="have the running statistics 'mean'"):
        follow_operations(model_of(twice, {"y": IN_TRAINING, "z": IN_TRAINING.replace("%x", "%y")}))
