"""Windows in every number of axes and every way of padding: gradients against central differences."""

import numpy as np
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import EVERYTHING, facts_of, train
from tests.compiler.differentiation.rules.test_gradient_rules import (
    central_differences,
    parse,
    with_weighted_sum,
)

# In the notation of test_gradient_rules.py.
CASES = {
    "Conv_1d_valid": 'f[2,3,7] a, f[4,3,2] b | y = Conv <auto_pad = "VALID", strides = [2]> (a, b)',
    "Conv_1d_same_lower": 'f[2,3,6] a, f[4,3,4] b | y = Conv <auto_pad = "SAME_LOWER", strides = [2]> (a, b)',
    "Conv_3d_grouped": "f[1,4,4,3,4] a, f[4,2,2,2,2] b, f[4] c | "
    "y = Conv <group = 2, strides = [1,2,1], pads = [1,0,0,0,1,1]> (a, b, c)",
    "Conv_3d_dilated": "f[1,2,5,4,5] a, f[3,2,2,2,2] b | "
    "y = Conv <pads = [1,0,1,0,0,2], dilations = [2,1,2]> (a, b)",
    "ConvTranspose_same_upper": "f[1,2,4,3] a, f[2,3,3,4] b | "
    'y = ConvTranspose <auto_pad = "SAME_UPPER", strides = [2,3]> (a, b)',
    "ConvTranspose_same_lower": "f[1,2,4,3] a, f[2,3,4,2] b | "
    'y = ConvTranspose <auto_pad = "SAME_LOWER", strides = [3,1]> (a, b)',
    "ConvTranspose_valid": "f[1,2,4] a, f[2,3,3] b | "
    'y = ConvTranspose <auto_pad = "VALID", strides = [2]> (a, b)',
    "ConvTranspose_output_shape": "f[1,2,4,3] a, f[2,3,3,3] b, f[3] c | "
    "y = ConvTranspose <output_shape = [8,6], strides = [2,2]> (a, b, c)",
    "ConvTranspose_output_shape_lower": "f[1,2,5] a, f[2,3,4] b | "
    'y = ConvTranspose <output_shape = [9], auto_pad = "SAME_LOWER", strides = [2]> (a, b)',
    "ConvTranspose_grouped_dilated": "f[1,4,3,3] a, f[4,3,2,2] b | y = ConvTranspose "
    "<group = 2, dilations = [2,1], strides = [2,3], output_padding = [1,2], pads = [1,0,0,1]> (a, b)",
    "ConvTranspose_3d": "f[1,2,2,3,2] a, f[2,2,2,2,3] b | y = ConvTranspose "
    "<strides = [2,1,2], output_padding = [1,0,1]> (a, b)",
    "MaxPool_same_lower": 'f[1,2,5,6] a | y = MaxPool <kernel_shape = [2,3], auto_pad = "SAME_LOWER"> (a)',
    "MaxPool_3d_dilated": "f[1,2,5,4,5] a | y = MaxPool <kernel_shape = [2,2,2], dilations = [2,1,2]> (a)",
    "MaxPool_1d_ceil": "f[1,2,8] a | y = MaxPool <kernel_shape = [3], strides = [2], ceil_mode = 1> (a)",
    "AveragePool_dilated": "f[1,2,7,6] a | y = AveragePool "
    "<kernel_shape = [3,2], dilations = [2,2], pads = [1,1,1,1], strides = [2,1]> (a)",
    "AveragePool_3d": "f[1,2,4,5,4] a | y = AveragePool "
    "<kernel_shape = [2,3,2], pads = [0,1,1,1,1,0], count_include_pad = 1, strides = [2,1,2]> (a)",
    "AveragePool_same_upper": "f[1,2,5,6] a | "
    'y = AveragePool <kernel_shape = [2,3], auto_pad = "SAME_UPPER", strides = [2,2]> (a)',
    "LpPool_1d": "f[1,2,7] a | y = LpPool <kernel_shape = [3], strides = [2], pads = [1,1], p = 1> (a)",
    "LpPool_cubed": "f[1,2,5,5] a | "
    "y = LpPool <kernel_shape = [2,2], ceil_mode = 1, strides = [2,2], p = 3> (a)",
    "GlobalLpPool": "f[2,3,4,3] a | y = GlobalLpPool (a)",
    "GlobalLpPool_of_1": "f[2,3,4] a | y = GlobalLpPool <p = 1> (a)",
    "GlobalLpPool_cubed": "f[2,3,4,2,2] a | y = GlobalLpPool <p = 3> (a)",
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_windows_equals_central_differences(case: str) -> None:
    model = with_weighted_sum(parse(CASES[case]))

    built = build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    start = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    _, after = train(built, [{}])

    assert facts_of(built)["gradients"].keys() == start.keys()
    for name, value in start.items():
        expected = central_differences(model, name, 1e-3)
        np.testing.assert_allclose(value - after[name], expected, rtol=2e-2, atol=2e-2, err_msg=name)
