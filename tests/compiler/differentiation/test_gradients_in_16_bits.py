"""Gradients in float16 against exact ones, wherever ONNX Runtime has the kernels.

Of bfloat16 its CPU provider (1.31.1) has none that any case could run on.
"""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    RuntimeException,
)
from onnxruntime.capi.onnxruntime_pybind11_state import (
    NotImplemented as NoKernel,
)

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import UnsupportedModel
from tests.checks.training_steps import EVERYTHING, train
from tests.compiler.differentiation.rules.test_gradient_rules import CASES, parse, with_weighted_sum

HALF = np.dtype(np.float16)
TOLERANCE = 0.02  # 11 bits are left of a number, and a gradient may pass some ten roundings
NO_KERNEL = (NoKernel, InvalidArgument, InvalidGraph, RuntimeException, Fail, UnsupportedModel)


def in_16_bits(case: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a case with its floats in 16 bits, and the case itself with the same, rounded values."""
    exact = with_weighted_sum(parse(CASES[case]))
    for tensor in exact.graph.initializer:
        tensor.CopyFrom(_converted(_converted(tensor, HALF), _dtype(tensor)))
    short = onnx.ModelProto()
    short.CopyFrom(exact)
    del short.graph.value_info[:]
    wide = {TensorProto.FLOAT, TensorProto.DOUBLE}
    scales = {operand for node in short.graph.node if node.op_type == "Resize" for operand in node.input[1:]}
    for tensor in short.graph.initializer:
        tensor.CopyFrom(_converted(tensor, HALF))
    for node in short.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i in wide:
                attribute.i = TensorProto.FLOAT16
            if attribute.name == "value" and attribute.t.data_type in wide and node.output[0] not in scales:
                attribute.t.CopyFrom(_converted(attribute.t, HALF))
    for output in short.graph.output:
        output.type.tensor_type.elem_type = TensorProto.FLOAT16
    return short, exact


def _dtype(tensor: TensorProto) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(tensor.data_type)


def _converted(tensor: TensorProto, dtype: np.dtype) -> TensorProto:
    """Return a tensor of floats in another type, one of integers as it is."""
    array = numpy_helper.to_array(tensor)
    return tensor if array.dtype.kind in "iub" else numpy_helper.from_array(array.astype(dtype), tensor.name)


def gradients(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return each parameter's gradient: what a step of rate 1 takes away."""
    trained = build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    start = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    _, after = train(trained, [{}])
    return {name: start[name] - value.astype(np.float64) for name, value in after.items()}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_gradient_in_16_bits_is_the_exact_one_rounded(case: str) -> None:
    try:
        short, exact = in_16_bits(case)
        found = gradients(short)
    except NO_KERNEL as error:
        pytest.skip(f"no kernel: {str(error)[:80]}")
    expected = gradients(exact)

    statistics = {"m", "p"} if case.startswith("BatchNormalization") else set()
    assert found.keys() == expected.keys()
    for parameter in expected.keys() - statistics:
        limit = TOLERANCE * max(1.0, np.max(np.abs(expected[parameter]), initial=0.0))
        np.testing.assert_allclose(found[parameter], expected[parameter], atol=limit, err_msg=parameter)
