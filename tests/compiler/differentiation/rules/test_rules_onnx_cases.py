"""Every gradient rule of plain ops against central differences of ONNX's own cases for the op."""

import numpy as np
import pytest
from onnx import TensorProto

from partc.compiler.differentiation.rules import (
    activations,
    einsum,
    elementwise,
    indexing,
    product,
    reduction,
    resizing,
    scattering,
    shape,
    slicing,
)
from tests.builders.graphs.onnx_cases import (
    Problem,
    anyhow,
    gradients,
    in_onnxruntime,
    onnx_cases,
    problem,
    slopes,
    why_unusable,
)

MODULES = (
    activations,
    einsum,
    elementwise,
    indexing,
    product,
    reduction,
    resizing,
    scattering,
    shape,
    slicing,
    activations,
)
EXPANDED = {"CumProd", "Swish"}  # newer than our opset
OPS = sorted(EXPANDED.union(*(module.RULES for module in MODULES)))

# Prefix of a case's name: why its gradient is not compared.
SKIPPED = {
    "test_training_dropout": "draws at random; tested in test_build_training_graph.py",
    "test_celu": "a Celu of opset 28 in float64 has no form in our opset",
    "test_mod_float64_mixed_sign_fmod_0": "a float Mod without fmod came with opset 28: onnxruntime lacks it",
    "test_mod_float32_mixed_sign_fmod_0": "a float Mod without fmod",
    "test_mod_float16_mixed_sign_fmod_0": "a float Mod without fmod",
    "test_mod_float_edge_cases_fmod_0": "a float Mod without fmod",
    "test_spacetodepth_crd": "mode CRD came with opset 28: onnxruntime lacks it",
    "test_resize_downsample_sizes_nearest_not_smaller": "refused: test_rules_refusals.py",
    "test_pow_types_float32_uint": "onnxruntime has no Pow with unsigned exponents",
    "test_gelu_default": "within Gelu, ONNX's reference rounds Erf to float32",
    "test_resize_downsample_scales_linear_align_corners": "onnxruntime rounds the length, ONNX does not",
    "test_resize_downsample_scales_cubic_align_corners": "onnxruntime rounds the length, ONNX does not",
}
NO_CASES = {"Celu": "see above", "Trilu": "its cases are of integers"}  # test_gradient_rules.py has some


def problems_of(op_type: str) -> dict[str, tuple[Problem, Problem]]:
    """Return a case's problem in float64 and in float32."""
    problems = {}
    for name, (model, inputs) in onnx_cases().items():
        if model.graph.node[0].op_type != op_type or why_unusable(model, inputs):
            continue
        if not name.startswith(tuple(SKIPPED)):
            problems[name] = tuple(problem(model, inputs, e) for e in (TensorProto.DOUBLE, TensorProto.FLOAT))
    return problems


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the reference divides by zero, as the cases want
@pytest.mark.parametrize("op_type", OPS)
def test_gradients_of_onnx_cases_equal_central_differences(op_type: str) -> None:
    problems = problems_of(op_type)
    assert problems or op_type in NO_CASES
    for name, (double, single) in problems.items():
        found = gradients(double.model, anyhow)
        assert found.keys() == double.parameters.keys(), name
        for parameter, gradient in found.items():
            assert gradient.shape == double.parameters[parameter].shape
            for position, slope in slopes(double, parameter):
                assert gradient[position] == pytest.approx(slope, rel=1e-4, abs=1e-5), (name, parameter)
        in_float32 = gradients(single.model, in_onnxruntime)
        for parameter, gradient in in_float32.items():
            np.testing.assert_allclose(
                gradient, found[parameter], rtol=1e-2, atol=1e-3, err_msg=f"{name} {parameter} in float32"
            )


def test_every_skipped_case_exists() -> None:
    assert all(any(name.startswith(prefix) for name in onnx_cases()) for prefix in SKIPPED)
