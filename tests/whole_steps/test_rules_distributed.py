"""Two ranks train through plain ops as one device does: their gradients split along the batch."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

# Nodes that make y of h double[N, 6], N the batch.
BODIES = {
    "activations": "a = Tanh (h) b = Abs (a) c = Relu (h) d = Mod <fmod = 1> (c, h) y = Sum (a, b, c, d)",
    "extrema": "a = Neg (h) b = Max (h, a) c = Min (b, h) y = Sum (b, c, h)",
    "powers": "two = Constant <value = double {2}> () a = Pow (h, two) b = Sigmoid (h) y = Pow (b, a)",
    "product": "axes = Constant <value_ints = [1]> () y = ReduceProd (h, axes)",
    "norms": "axes = Constant <value_ints = [-1]> () a = ReduceL2 (h, axes) b = ReduceLogSumExp (h, axes) "
    "y = Mul (a, b)",
    "cumulative": "at = Constant <value_int = 1> () y = CumSum <reverse = 1> (h, at)",
    "tile": "n = Constant <value_ints = [1, 3]> () y = Tile (h, n)",
    "edge": 'p = Constant <value_ints = [0, 2, 0, 1]> () y = Pad <mode = "edge"> (h, p)',
    "strided": "s = Constant <value_ints = [5]> () e = Constant <value_ints = [-9]> () "
    "x1 = Constant <value_ints = [1]> () t = Constant <value_ints = [-2]> () y = Slice (h, s, e, x1, t)",
    "depth": "n = Constant <value_ints = [0, 1, 2, 3]> () a = Reshape (h, n) "
    "b = Concat <axis = 1> (a, a, a, a) y = DepthToSpace <blocksize = 2> (b)",
    "top": "k = Constant <value_ints = [2]> () y, i = TopK (h, k)",
    "einsum": 'y = Einsum <equation = "...i,...j->...ij"> (h, h)',
    "softmax": "y = LogSoftmax (h)",
    "resize": "n = Constant <value_ints = [0, 1, 2, 3]> () a = Reshape (h, n) "
    "s = Constant <value = float[4] {1, 1, 2, 2}> () b = Cast <to = 1> (a) "
    'c = Resize <mode = "linear"> (b, , s) y = Cast <to = 11> (c)',
}


def forward(body: str) -> onnx.ModelProto:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        step (double[N,4] x, double[4,6] W) => (double loss)
        {{ h = MatMul (x, W) {body} square = Mul (y, y) loss = ReduceMean <keepdims = 0> (square) }}"""
    model = onnx.parser.parse_model(text)
    weights = np.random.default_rng(5).normal(size=(4, 6))
    model.graph.initializer.append(numpy_helper.from_array(weights, "W"))
    del model.graph.input[1]
    return model


@pytest.mark.parametrize("body", BODIES)
def test_two_ranks_train_through_an_op_as_one_device(body: str, tmp_path: Path) -> None:
    train = build_training_graph(forward(BODIES[body]), loss="loss", optimizer=SGD(lr=0.01))
    training = import_training_graph(train)

    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", "global", sizes={"N": 8})

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
