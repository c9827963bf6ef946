"""Layers and optimizers whose shapes tempt a split: a mesh of workers trains them as one device."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adafactor import Adafactor
from partc.compiler.differentiation.updates.optimizers import SGD, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import STRATEGY_FORMAT, AxisSplit, Strategy
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.checks.training_steps import EVERYTHING

# x, of which axis 0 holds the samples, and parameters | nodes that make y.
CASES = {
    "grouped_convolutions": "float[4,8,6,6] x, float[8,2,3,3] a, float[8,2,3,3] b | "
    "h = Conv <group = 4, pads = [1,1,1,1]> (x, a) t = Tanh (h) y = Conv <group = 4> (t, b)",
    "depthwise": "float[4,8,6,6] x, float[8,1,3,3] a, float[4,8,1,1] b | "
    "h = Conv <group = 8> (x, a) t = Tanh (h) y = Conv (t, b)",
    "average_pool": "float[4,3,6,6] x, float[8,3,3,3] a, float[4,8,1,1] b | h = Conv (x, a) "
    "p = AveragePool <kernel_shape = [2,2]> (h) t = Tanh (p) y = Conv (t, b)",
    "lp_pool": "float[4,3,6,6] x, float[8,3,3,3] a, float[4,8,1,1] b | h = Conv (x, a) "
    "p = LpPool <kernel_shape = [2,2]> (h) y = Conv (p, b)",
    "max_pool": "float[4,3,6,6] x, float[8,3,3,3] a, float[4,8,1,1] b | h = Conv (x, a) "
    "p = MaxPool <kernel_shape = [2,2]> (h) t = Tanh (p) y = Conv (t, b)",
    "response": "float[4,3,6,6] x, float[8,3,3,3] a, float[4,8,1,1] b | h = Conv (x, a) "
    "p = LRN <size = 3> (h) t = Tanh (p) y = Conv (t, b)",
    "perceptron": "double[4,6] x, double[6,8] a, double[5,8] b | h = MatMul (x, a) t = Tanh (h) "
    "y = Gemm <transB = 1> (t, b)",
}
MESHES = (("1x2", "tensor=2"), ("2x2", "fsdp"), ("2x2", "fsdp=2,tensor=2"))


def train_graph(case: str, optimizer: Optimizer) -> onnx.ModelProto:
    inputs, nodes = case.split("|")
    element = inputs.split("[")[0]
    text = f"""<ir_version: 10, opset_import: ["": 18]> test ({inputs}) => ({element} loss) {{
        {nodes} square = Mul (y, y) loss = ReduceMean <keepdims = 0> (square) }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(2)
    for value in model.graph.input[1:]:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        stored = rng.normal(scale=0.5, size=shape).astype(np.float64 if element == "double" else np.float32)
        model.graph.initializer.append(numpy_helper.from_array(stored, value.name))
    del model.graph.input[1:]
    return build_training_graph(model, loss="loss", optimizer=optimizer, parameters=EVERYTHING)


LAYERS = list(product(CASES, MESHES))


@pytest.mark.parametrize(("case", "mesh"), LAYERS[::4])
def test_a_layer_is_trained_as_on_one_device(case: str, mesh: tuple[str, str], tmp_path: Path) -> None:
    check(case, mesh, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("case", "mesh"), LAYERS)
def test_every_layer_is_trained_as_on_one_device(case: str, mesh: tuple[str, str], tmp_path: Path) -> None:
    check(case, mesh, tmp_path)


def check(case: str, mesh: tuple[str, str], tmp_path: Path) -> None:
    training = import_training_graph(train_graph(CASES[case], SGD(lr=0.1)))

    compiled = compile_step(training, tmp_path / "out", *mesh, "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


@pytest.mark.parametrize("batch", ["global", "per-replica"])
@pytest.mark.parametrize("mesh", MESHES, ids="-".join)
def test_means_of_rows_are_split_where_they_have_the_rows(
    mesh: tuple[str, str], batch: str, tmp_path: Path
) -> None:
    training = import_training_graph(train_graph(CASES["perceptron"], Adafactor(lr=0.1)))

    compiled = compile_step(training, tmp_path / "out", *mesh, batch)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def test_gradients_are_made_in_the_parts_in_which_their_weights_are_kept(tmp_path: Path) -> None:
    """Both operands of a weight's gradient are divided; gathering one of them leaves it where it is kept."""
    layers = (
        "double[4,6] x, double[6,32] a, double[32,32] b, double[32,32] c | h = MatMul (x, a) t = Tanh (h) "
    )
    training = import_training_graph(
        train_graph(layers + "g = MatMul (t, b) u = Tanh (g) y = MatMul (u, c)", SGD(lr=0.1))
    )
    columns = {"tensor": AxisSplit(1)}
    strategy = Strategy(
        STRATEGY_FORMAT, "global", {}, mesh={"data": 1, "tensor": 2}, variables=dict.fromkeys("abc", columns)
    )

    compiled = compile_step(training, tmp_path / "out", "1x2", strategy, "global")

    weight_bytes = 32 * 32 * 8
    sent = [i.payload_bytes for i in compiled.plan.instructions if isinstance(i, Start)]
    assert sent and max(sent) < weight_bytes / 2
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
