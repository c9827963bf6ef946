"""Layers split on the batch: two ranks train as one device, and nothing but sums is communicated."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.find_parameters import FORWARD_KEY
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.checks.training_steps import EVERYTHING

# Data x, of which axis 0 (in a sequence 1) holds the samples, and parameters | nodes that make y.
CASES = {
    "Conv_1d": "float[4,4,9] x, float[6,2,3] a | y = Conv <group = 2, strides = [2], pads = [1,1]> (x, a)",
    "Conv_3d": "float[4,5,4,4,3] x, float[2,5,2,2,2] a | p = Tanh (x) y = Conv (p, a)",
    "ConvTranspose_1d": "float[4,4,5] x, float[4,3,3] a, float[3] b | "
    "y = ConvTranspose <strides = [2], output_padding = [1]> (x, a, b)",
    "ConvTranspose_2d": "float[4,4,5,4] x, float[4,3,3,2] a, float[4,3,3,3] b | "
    "h = ConvTranspose <group = 2> (x, a) s = Conv <group = 2> (h, b) y = Tanh (s)",
    "ConvTranspose_3d": "float[4,2,3,2,3] x, float[2,5,2,2,2] a | y = ConvTranspose (x, a)",
    "Pools": "float[4,3,9,8] x, float[3,1,1] a | p = Mul (x, a) "
    "m = MaxPool <kernel_shape = [2,2], strides = [2,2], ceil_mode = 1> (p) "
    "l = LpPool <kernel_shape = [2,2]> (m) y = AveragePool <kernel_shape = [2,2], pads = [1,0,0,1]> (l)",
    "Pool_3d": "float[4,3,5,4,4] x, float[3,1,1,1] a | p = Mul (x, a) "
    "m = MaxPool <kernel_shape = [2,2,2]> (p) y = GlobalLpPool (m)",
    "Pool_1d": "float[4,3,9] x, float[3,1] a | p = Mul (x, a) "
    "m = AveragePool <kernel_shape = [2]> (p) y = GlobalMaxPool (m)",
    "GroupNormalization": "float[4,4,3,2] x, float[4] a, float[4] b | "
    "y = GroupNormalization <num_groups = 2> (x, a, b)",
    "InstanceNormalization": "float[4,3,5] x, float[3] a, float[3] b | y = InstanceNormalization (x, a, b)",
    "RMSNormalization": "double[4,3,6] x, double[6] a | y = RMSNormalization (x, a)",
    "Attention": "double[4,3,8] x, double[8,8] a, double[8,4] b, double[8,4] c | "
    "q = MatMul (x, a) k = MatMul (x, b) v = MatMul (x, c) "
    "y = Attention <q_num_heads = 4, kv_num_heads = 2, is_causal = 1> (q, k, v)",
    "LSTM": "double[3,4,5] x, double[2,12,5] a, double[2,12,3] b, double[2,24] c | "
    'y = LSTM <hidden_size = 3, direction = "bidirectional"> (x, a, b, c)',
    "GRU": "double[3,4,5] x, double[1,9,5] a, double[1,9,3] b | y = GRU <hidden_size = 3> (x, a, b)",
    "Resize": "float[4,2,3,3] x, float[2,1,1] a | p = Mul (x, a) s = Constant <value_ints = [4,2,6,5]> () "
    'm = Resize <mode = "linear"> (p, , , s) t = Constant <value_floats = [1.0, 1.0, 0.5, 1.0]> () '
    "y = Resize (m, , t)",
    "Fourier": "float[4,6,1] x, float[1,6,1] a | p = Mul (x, a) s = DFT (p) y = DFT <inverse = 1> (s)",
    "Sequence": "float[4,2,4,4] x, float[2,1,1] a | p = Mul (x, a) s = SplitToSequence <axis = 1> (p) "
    "z = Constant <value_int = 0> () q = SequenceAt (s, z) y = ConcatFromSequence <axis = 1> (s)",
    "GridSample": "float[4,3,5,5] x, float[1,2,2,2] a | s = Shape <start = 0, end = 1> (x) "
    "o = Constant <value_ints = [1,1,1]> () t = Concat <axis = 0> (s, o) g = Expand (a, t) "
    "y = GridSample (x, g)",
}


def forward(case: str) -> onnx.ModelProto:
    inputs, nodes = case.split("|")
    element = inputs.split("[")[0]
    text = f"""<ir_version: 10, opset_import: ["": 23]> test ({inputs}) => ({element} loss) {{
        {nodes} square = Mul (y, y) loss = ReduceMean <keepdims = 0> (square) }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(2)
    for value in model.graph.input[1:]:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        array = rng.normal(scale=0.5, size=shape)
        stored = array.astype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        model.graph.initializer.append(numpy_helper.from_array(stored, value.name))
    del model.graph.input[1:]
    axis = int("LSTM" in nodes or "GRU" in nodes)
    helper.set_model_props(model, {FORWARD_KEY: f'{{"sample_axes": {{"x": {axis}}}}}'})
    return model


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_a_layer_as_one_device(case: str, tmp_path: Path) -> None:
    model = build_training_graph(
        forward(CASES[case]), loss="loss", optimizer=SGD(lr=0.1), parameters=EVERYTHING
    )

    compiled = compile_step(import_training_graph(model), tmp_path / "out", "1x2", "allreduce", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
    starts = [step for step in compiled.plan.instructions if isinstance(step, Start)]
    assert {start.kind for start in starts} == {"all_reduce"}
