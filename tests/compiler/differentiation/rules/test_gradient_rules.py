"""Every gradient rule against central differences of the forward graph."""

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.rules import window
from partc.compiler.differentiation.rules.table import RULES
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.builders.graphs import gradient_cases
from tests.checks.training_steps import EVERYTHING, session, train

# Inputs | nodes that make y. Every float input is a parameter, i is below 3, p is positive; `d` is
# double, `f` float, `s = [..]` a constant vector. First what ONNX Runtime has in float64:
DOUBLE = {
    "Relu": "d[3,4] a | y = Relu (a)",
    "Sigmoid": "d[3,4] a | y = Sigmoid (a)",
    "Tanh": "d[3,4] a | y = Tanh (a)",
    "Exp": "d[3,4] a | y = Exp (a)",
    "Log": "d[3,4] p | y = Log (p)",
    "Sqrt": "d[3,4] p | y = Sqrt (p)",
    "Neg": "d[3,4] a | y = Neg (a)",
    "Abs": "d[3,4] a | y = Abs (a)",
    "Sin": "d[3,4] a | y = Sin (a)",
    "Cos": "d[3,4] a | y = Cos (a)",
    "Reciprocal": "d[3,4] p | y = Reciprocal (p)",
    "Identity": "d[3,4] a | b = Identity (a) y = Mul (a, b)",
    "Cast": "d[3,4] a | b = Cast <to = 11> (a) y = Mul (a, b)",
    "CastLike": "d[3,4] a | b = CastLike (a, a) y = Mul (b, b)",
    "Clip": "d[3,4] a | "
    "l = Constant <value = double {-0.5}> () h = Constant <value = double {0.7}> () "
    "y = Clip (a, l, h)",
    "Clip_one_bound": "d[3,4] a | h = Constant <value = double {0.3}> () y = Clip (a, , h)",
    "Add": "d[2,3,4] a, d[3,1] b | y = Add (a, b)",
    "Add_both_broadcast": "d[3,1] a, d[2,1,4] b | y = Add (a, b)",
    "Sum": "d[3,4] a, d[4] b, d[3,1] c | y = Sum (a, b, c)",
    "Sub": "d[3,4] a, d[4] b | y = Sub (a, b)",
    "Mul": "d[3,4] a, d[3,1] b | y = Mul (a, b)",
    "Mul_square": "d[3,4] a | y = Mul (a, a)",
    "Div": "d[3,4] a, d[1,4] p | y = Div (a, p)",
    "Pow": "d[3,4] p, d[4] b | y = Pow (p, b)",
    "Pow_integer": "d[3,4] a | n = Constant <value_int = 3> () y = Pow (a, n)",
    "Where": "d[3,4] a, d[4] b | m = Greater (a, b) y = Where (m, a, b)",
    "Max": "d[3,4] a, d[4] b, d[3,1] c | y = Max (a, b, c)",
    "Min": "d[3,4] a, d[4] b | y = Min (a, b)",
    "Reshape": "d[3,4] a | s = [2,-1] b = Reshape (a, s) y = Mul (b, b)",
    "Flatten": "d[3,2,2] a | b = Flatten (a) y = Mul (b, b)",
    "Squeeze": "d[3,1,4] a | s = [-2] y = Squeeze (a, s)",
    "Squeeze_all": "d[3,1,4] a | y = Squeeze (a)",
    "Unsqueeze": "d[3,4] a | s = [-2] y = Unsqueeze (a, s)",
    "Transpose": "d[2,3,4] a | b = Transpose <perm = [2,0,1]> (a) y = Mul (b, b)",
    "Transpose_reverse": "d[2,3] a | y = Transpose (a)",
    "Expand": "d[3,1] a | s = [2,1,4] y = Expand (a, s)",
    "Concat": "d[3,1] a, d[3,2] b | c = Concat <axis = -1> (a, b) y = Mul (c, c)",
    "Split": "d[3,5] a | s = [1,2,2] b, c, e = Split <axis = -1> (a, s) y = Mul (c, e)",
    "Split_unused": "d[3,4] a | y, c = Split <axis = 1, num_outputs = 2> (a)",
    "Pad": "d[3,4] a | s = [1,0,1,2] y = Pad (a, s)",
    "Trilu": "d[4,4] a | y = Trilu <upper = 0> (a)",
    "Slice": "d[3,5] a | s = [1,1] e = [3,-1] y = Slice (a, s, e)",
    "Slice_stepped": "d[3,5] a | s = [4] x = [-1] e = [0] t = [-2] y = Slice (a, s, e, x, t)",
    "Gather_of_activation": "d[4,5] a, long[2,3] i | b = Neg (a) y = Gather (b, i)",
    "Gather_by_int32": "d[4,5] a, long[2,3] i | j = Cast <to = 6> (i) b = Neg (a) y = Gather (b, j)",
    "Gather_inner_axis": "d[2,4,5] a, long[2,3] i | b = Neg (a) y = Gather <axis = -2> (b, i)",
    "Gather_constant": "d[2,4] a | n = Constant <value_int = -2> () y = Gather <axis = 1> (a, n)",
    "GatherElements_one": "d[3,4] a, long[3,1] i | y = GatherElements <axis = 1> (a, i)",
    "GatherElements_inner": "d[3,4,2] a, long[3,1,2] i | y = GatherElements <axis = 1> (a, i)",
    "GatherElements": "d[3,4] a, long[3,2] i | y = GatherElements <axis = -1> (a, i)",
    "ReduceSum": "d[2,3,4] a | s = [-2] y = ReduceSum <keepdims = 0> (a, s)",
    "ReduceSum_nothing": "d[2,3] a | b = Mul (a, a) y = ReduceSum <noop_with_empty_axes = 1> (b)",
    "ReduceMean": "d[2,3,4] a | s = [0,2] y = ReduceMean (a, s)",
    "ReduceMean_all": "d[2,3] a | y = ReduceMean <keepdims = 0> (a)",
    "ReduceMax": "d[2,3,4] a | s = [2] y = ReduceMax <keepdims = 0> (a, s)",
    "ReduceMin": "d[2,3,4] a | s = [2] y = ReduceMin (a, s)",
    "ReduceSumSquare": "d[2,3] a | s = [1] y = ReduceSumSquare <keepdims = 0> (a, s)",
    "ReduceL1": "d[2,3] a | s = [1] y = ReduceL1 (a, s)",
    "ReduceL2": "d[2,3] a | s = [1] y = ReduceL2 <keepdims = 0> (a, s)",
    "ReduceLogSumExp": "d[2,3] a | s = [1] y = ReduceLogSumExp (a, s)",
    "ReduceLogSum": "d[2,3] p | s = [1] y = ReduceLogSum <keepdims = 0> (p, s)",
    "Softmax": "d[3,4] a | y = Softmax (a)",
    "Softmax_first_axis": "d[3,4] a | y = Softmax <axis = 0> (a)",
    "LogSoftmax": "d[3,4] a | y = LogSoftmax (a)",
    "MatMul": "d[3,4] a, d[4,2] b | y = MatMul (a, b)",
    "MatMul_batched_by_matrix": "d[2,3,4] a, d[4,2] b | y = MatMul (a, b)",
    "MatMul_matrix_by_batched": "d[3,4] a, d[2,4,2] b | y = MatMul (a, b)",
    "MatMul_batch_broadcast": "d[1,2,3,4] a, d[5,1,4,2] b | y = MatMul (a, b)",
    "MatMul_vector_right": "d[2,3,4] a, d[4] b | y = MatMul (a, b)",
    "MatMul_vector_left": "d[4] a, d[2,4,3] b | y = MatMul (a, b)",
    "MatMul_vectors": "d[4] a, d[4] b | y = MatMul (a, b)",
    "Gemm": "d[3,4] a, d[4,2] b, d[2] c | y = Gemm (a, b, c)",
    "Gemm_transposed_b": "d[3,4] a, d[2,4] b | y = Gemm <transB = 1, alpha = 0.5> (a, b)",
    "Gemm_transposed_a": "d[4,3] a, d[4,2] b, d[3,1] c | y = Gemm <transA = 1, beta = 0.5> (a, b, c)",
    "Gemm_transposed": "d[4,3] a, d[2,4] b | y = Gemm <transA = 1, transB = 1> (a, b)",
    "Einsum": 'd[2,3,4] a, d[2,4,5] b | y = Einsum <equation = "bij,bjk->bki"> (a, b)',
    "LayerNormalization_expanded": "d[3,4] a, d[4] b, d[4] c | "
    "y = LayerNormalization <stash_type = 11> (a, b, c)",
    "LayerNormalization_two_axes": "d[2,3,4] a, d[3,4] b | "
    "y = LayerNormalization <axis = 1, stash_type = 11> (a, b)",
    "BatchNormalization": "d[2,3,4] a, d[3] b, d[3] c, d[3] m, d[3] p | "
    "y = BatchNormalization (a, b, c, m, p)",
    "BatchNormalization_computed": "d[2,3,4] a, d[3] b, d[3] c, d[2,3] e | "
    "zero = Constant <value_ints = [0]> () m = ReduceMean <keepdims = 0> (e, zero) "
    "sq = Mul (a, a) ends = Constant <value_ints = [0, 2]> () p = ReduceMean <keepdims = 0> (sq, ends) "
    "y = BatchNormalization (a, b, c, m, p)",
    "BatchNormalization_training": "d[4,3,2] a, d[3] b, d[3] c, d[3] m, d[3] p | "
    "y, n, q = BatchNormalization <training_mode = 1> (a, b, c, m, p)",
}

# ... and what it has in float32 only:
FLOAT = {
    "LeakyRelu": "f[3,4] a | y = LeakyRelu <alpha = 0.2> (a)",
    "Mean": "f[3,4] a, f[4] b, f[3,1] c | y = Mean (a, b, c)",
    "PRelu": "f[3,4] a, f[4] b | y = PRelu (a, b)",
    "Erf": "f[3,4] a | y = Erf (a)",
    "Gelu": "f[3,4] a | y = Gelu (a)",
    "Gelu_tanh": 'f[3,4] a | y = Gelu <approximate = "tanh"> (a)',
    "Softplus": "f[3,4] a | y = Softplus (a)",
    "LRN": "f[2,7,3,2] a | y = LRN <size = 5, alpha = 0.9, beta = 0.6, bias = 1.2> (a)",
    "Conv": "f[2,5,6,5] a, f[4,5,3,3] b, f[4] c | y = Conv (a, b, c)",
    "Conv_1x1": "f[2,5,4,3] a, f[4,5,1,1] b | y = Conv (a, b)",
    "Conv_1x1_wide": "f[2,9,2,1] a, f[8,9,1,1] b | y = Conv (a, b)",
    "Conv_wide": "f[2,9,3,3] a, f[8,9,2,3] b | y = Conv <pads = [0,1,0,0]> (a, b)",
    "Conv_1x1_strided": "f[2,5,5,4] a, f[4,5,1,1] b | y = Conv <strides = [2,2]> (a, b)",
    "Conv_strided": "f[2,5,8,7] a, f[4,5,3,2] b | y = Conv <strides = [2,3], pads = [1,0,1,1]> (a, b)",
    "Conv_few_channels": "f[2,3,8,8] a, f[4,3,3,3] b | y = Conv <strides = [3,3], pads = [1,1,1,1]> (a, b)",
    "Conv_few_unpadded": "f[2,3,9,8] a, f[4,3,2,2] b | y = Conv <strides = [3,3]> (a, b)",
    "Conv_dilated": "f[1,5,7,7] a, f[2,5,3,3] b | y = Conv <dilations = [2,2]> (a, b)",
    "Conv_grouped": "f[2,4,5,5] a, f[6,2,3,3] b | y = Conv <group = 2, pads = [1,1,1,1]> (a, b)",
    "Conv_depthwise": "f[2,4,5,5] a, f[4,1,3,3] b | y = Conv <group = 4, pads = [1,1,1,1]> (a, b)",
    "Conv_same": 'f[1,5,6,6] a, f[2,5,3,3] b | y = Conv <auto_pad = "SAME_UPPER", strides = [2,2]> (a, b)',
    "Conv_1d": "f[2,5,8] a, f[4,5,3] b | y = Conv (a, b)",
    "Conv_3d": "f[1,5,4,4,3] a, f[2,5,2,2,2] b | y = Conv (a, b)",
    "MaxPool": "f[2,3,6,5] a | y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a)",
    "MaxPool_overlapping": "f[2,3,7,6] a | "
    "y = MaxPool <kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]> (a)",
    "MaxPool_ceil": "f[2,3,6,6] a | y = MaxPool <kernel_shape = [3,3], strides = [2,2], ceil_mode = 1> (a)",
    "MaxPool_dilated": "f[1,2,7] a | y = MaxPool <kernel_shape = [3], dilations = [2]> (a)",
    "MaxPool_wide_kernel": "f[1,2,3,2] a | y = MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]> (a)",
    "AveragePool": "f[2,3,6,5] a | y = AveragePool <kernel_shape = [2,2], strides = [2,2]> (a)",
    "AveragePool_padded": "f[2,3,6,6] a | y = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]> (a)",
    "AveragePool_counting": "f[2,3,6,6] a | "
    "y = AveragePool <kernel_shape = [3,3], pads = [0,1,2,1], count_include_pad = 1> (a)",
    "AveragePool_ceil_counting": "f[1,2,6,5] a | y = AveragePool "
    "<kernel_shape = [3,3], strides = [2,2], pads = [0,1,0,1], ceil_mode = 1, count_include_pad = 1> (a)",
    "AveragePool_ceil": "f[1,2,6,6] a | "
    "y = AveragePool <kernel_shape = [3,3], strides = [2,2], ceil_mode = 1> (a)",
    "GlobalAveragePool": "f[2,3,4,5] a | y = GlobalAveragePool (a)",
    "GlobalMaxPool": "f[2,3,4,5] a | y = GlobalMaxPool (a)",
    "LayerNormalization": "f[3,4] a, f[4] b, f[4] c | y = LayerNormalization (a, b, c)",
}
DOUBLE |= gradient_cases.DOUBLE
CASES = {**DOUBLE, **FLOAT, **gradient_cases.FLOAT}
NEVER_ALONE = {"Dropout"}  # random: tested in test_build_training_graph.py


def parse(case: str, opset: int = 21) -> onnx.ModelProto:
    """Read a case; every graph input becomes an initializer."""
    inputs, body = case.split("|")
    inputs = inputs.replace("long[", "int64[").replace("d[", "double[").replace("f[", "float[")
    body = re.sub(
        r"\b([a-z]) = (\[.*?\])", r"\1 = Constant <value_ints = \2> ()", body.replace("long[", "int64[")
    )
    text = f'<ir_version: 10, opset_import: ["": {opset}]> test ({inputs}) => (y) {{ {body} }}'
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True)
    rng = np.random.default_rng(7)
    for value in model.graph.input:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        element = value.type.tensor_type.elem_type
        if element == TensorProto.INT64:
            array = rng.integers(0, 3, shape)
        else:
            array = rng.normal(size=shape).astype(helper.tensor_dtype_to_np_dtype(element))
        array = np.abs(array) + 0.5 if value.name == "p" else array
        model.graph.initializer.append(numpy_helper.from_array(array.astype(array.dtype), value.name))
    del model.graph.input[:]
    return model


def with_weighted_sum(model: onnx.ModelProto) -> onnx.ModelProto:
    """Append loss = sum of w y, with random constant w: no gradient is symmetric by luck."""
    y = model.graph.output[0]
    shape = [size.dim_value for size in y.type.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(y.type.tensor_type.elem_type)
    weights = numpy_helper.from_array(np.random.default_rng(8).normal(size=shape).astype(dtype))
    model.graph.node.extend(
        [
            helper.make_node("Constant", [], ["loss_weights"], value=weights),
            helper.make_node("Mul", ["y", "loss_weights"], ["weighted"]),
            helper.make_node("ReduceSum", ["weighted"], ["total"], keepdims=0),
        ]
    )
    model.graph.output.append(helper.make_tensor_value_info("total", y.type.tensor_type.elem_type, []))
    return model


def central_differences(model: onnx.ModelProto, name: str, step: float) -> np.ndarray:
    """Return d total / d name."""
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    free = onnx.ModelProto()
    free.CopyFrom(model)
    del free.graph.initializer[:]
    for key, value in values.items():
        element = helper.np_dtype_to_tensor_dtype(value.dtype)
        free.graph.input.append(helper.make_tensor_value_info(key, element, value.shape))
    forward = session(free)

    def total(moved: np.ndarray) -> float:
        return float(forward.run(["total"], {**values, name: moved.astype(values[name].dtype)})[0])

    slopes = np.zeros(values[name].shape)
    for position in np.ndindex(slopes.shape):
        shift = np.zeros(slopes.shape)
        shift[position] = step
        slopes[position] = (total(values[name] + shift) - total(values[name] - shift)) / (2 * step)
    return slopes


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_central_differences(case: str) -> None:
    model = with_weighted_sum(parse(CASES[case]))
    step, tolerance = (1e-6, 1e-7) if case in DOUBLE else (1e-3, 2e-2)

    trained = build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    start = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    _, after = train(trained, [{}])

    floats = {name for name, value in start.items() if value.dtype.kind == "f"}
    statistics = {"m", "p"} if case.startswith("BatchNormalization") else set()
    assert after.keys() - statistics == floats - statistics
    for name in floats - statistics:
        expected = central_differences(model, name, step)
        np.testing.assert_allclose(
            start[name] - after[name], expected, rtol=tolerance, atol=tolerance, err_msg=name
        )


def test_every_rule_has_a_case() -> None:
    elsewhere = window.RULES.keys() | NEVER_ALONE
    assert {case.split("_")[0] for case in CASES} >= RULES.keys() - elsewhere
