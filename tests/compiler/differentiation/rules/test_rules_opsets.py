"""Gradients of models of every opset from 13 to the newest that onnxruntime runs, and of 16-bit floats."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.model_files.run_checker import newest_opset
from tests.builders.graphs.onnx_cases import (
    anyhow,
    gradients,
    in_onnxruntime,
    onnx_cases,
    problem,
    why_unusable,
)
from tests.checks.training_steps import EVERYTHING

# Attributes and inputs as opset 13 has them: since then, axes became inputs, Split got num_outputs.
REDUCTIONS = "L1 L2 LogSumExp Max Mean Min Prod SumSquare".split()
EVERY_OPSET = """
    b = Softmax <axis = 1> (a)
    c = Relu (b)
    axes = Constant <value = int64[1] {1}> ()
    sizes = Constant <value = int64[2] {1, 3}> ()
    d, e = Split <axis = 1> (c, sizes)
    f = Squeeze (d, axes)
    g = Unsqueeze (f, axes)
    h = Mul (g, e)
    i = Pow (h, h)
    total = ReduceSum <keepdims = 0> (i)
"""


def model_of(opset: int, body: str) -> onnx.ModelProto:
    text = f'<ir_version: 7, opset_import: ["": {opset}]> test (double[3,4] a) => (double total) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    del model.graph.input[:]
    values = np.random.default_rng(1).normal(size=(3, 4))
    model.graph.initializer.append(numpy_helper.from_array(values, "a"))
    return model


def slope_along(model: onnx.ModelProto, direction: np.ndarray) -> float:
    """Return the central difference of `total` along a direction."""
    free = onnx.ModelProto()
    free.CopyFrom(model)
    del free.graph.initializer[:]
    free.graph.input.append(helper.make_tensor_value_info("a", TensorProto.DOUBLE, [3, 4]))
    start = numpy_helper.to_array(model.graph.initializer[0])
    run = in_onnxruntime(free)
    behind, ahead = (float(run(["total"], {"a": start + h * direction})[0]) for h in (-1e-6, 1e-6))
    return (ahead - behind) / 2e-6


def check(model: onnx.ModelProto) -> None:
    direction = np.random.default_rng(2).normal(size=(3, 4))
    found = gradients(model, in_onnxruntime, EVERYTHING)["a"]
    assert np.sum(found * direction) == pytest.approx(slope_along(model, direction), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("opset", range(13, newest_opset() + 1))
def test_a_model_of_any_opset_has_its_gradient(opset: int) -> None:
    check(model_of(opset, EVERY_OPSET))


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_axes_may_be_an_attribute(kind: str) -> None:
    body = f"b = Reduce{kind} <axes = [-1], keepdims = 0> (a) total = ReduceSumSquare <keepdims = 0> (b)"
    check(model_of(13, body))


def test_a_product_along_an_axis_of_opset_26() -> None:
    body = """
        axis = Constant <value = int64 {1}> ()
        b = CumProd <exclusive = 1, reverse = 1> (a, axis)
        total = ReduceSumSquare <keepdims = 0> (b)
    """
    model = model_of(26, body)
    direction = np.ones((3, 4))
    values = numpy_helper.to_array(model.graph.initializer[0])

    def total(shift: float) -> float:
        reversed_ = (values + shift)[:, ::-1]
        exclusive = np.concatenate([np.ones((3, 1)), np.cumprod(reversed_, 1)[:, :-1]], 1)
        return float(np.sum(exclusive**2))

    found = gradients(model, in_onnxruntime, EVERYTHING)["a"]

    expected = (total(1e-6) - total(-1e-6)) / 2e-6
    assert np.sum(found * direction) == pytest.approx(expected, rel=1e-6)


SIXTEEN_BITS = """
    test_relu test_elu_example test_gelu_tanh_1 test_softmax_example test_logsoftmax_axis_0
    test_gather_0 test_gather_elements_0 test_gathernd_example_float32 test_compress_0 test_top_k
    test_matmul_2d test_gemm_all_attributes test_einsum_batch_matmul test_prelu_broadcast
    test_reduce_l2_keep_dims_random test_cumsum_1d test_constant_pad test_slice_negative_axes
    test_transpose_all_permutations_0 test_where_example
""".split()


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_a_float16_gradient_runs_in_onnxruntime(name: str) -> None:
    model, inputs = onnx_cases()[name]
    assert why_unusable(model, inputs) is None
    expected = gradients(problem(model, inputs, TensorProto.DOUBLE).model, anyhow)

    found = gradients(problem(model, inputs, TensorProto.FLOAT16).model, in_onnxruntime)

    for parameter, gradient in found.items():
        assert gradient.dtype == np.float16
        limit = 2e-2 * (1 + np.abs(expected[parameter]).max())
        np.testing.assert_allclose(gradient, expected[parameter], atol=limit, err_msg=parameter)
