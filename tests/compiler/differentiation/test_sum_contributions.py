from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.checks.training_steps import facts_of

RECURRENT = """
    h1 = MatMul (a, W) g1 = Tanh (h1) s2 = Add (g1, a)
    h2 = MatMul (s2, W) g2 = Tanh (h2)
    h = MatMul (g2, W)
"""
TIED = """
    i = Constant <value_ints = [3, 0, 3]> () r = Gather (W, i) z = Constant <value_ints = [0]> ()
    s = ReduceSum <keepdims = 0> (r, z) p = MatMul (a, W) h = Add (p, s)
"""
TRANSPOSED = "Wt = Transpose <perm = [1, 0]> (W) b = Tanh (a) h = MatMul (b, Wt)"


def step_of(body: str, batch: int | str = "N") -> onnx.ModelProto:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        step (double[{batch},4] x, double[4,4] V, double[4,4] W) => (double loss)
        {{ a = MatMul (x, V) {body} square = Mul (h, h) loss = ReduceMean <keepdims = 0> (square) }}"""
    model = parser.parse_model(text)
    for seed, name in enumerate("VW"):
        value = np.random.default_rng(seed).normal(scale=0.5, size=(4, 4))
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    del model.graph.input[1:]
    return build_training_graph(model, loss="loss", optimizer=SGD(0.1))


def count(model: onnx.ModelProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph.node)


def test_a_matrix_read_at_every_step_gets_one_product_over_all_steps() -> None:
    step = step_of(RECURRENT)

    weight = facts_of(step)["gradients"]["W"]["dense"]
    assert next(node.op_type for node in step.graph.node if weight in node.output) == "MatMul"
    assert count(step, "MatMul") == 4 + 3 + 2  # forward, data, weights


def test_products_of_many_rows_are_summed_as_they_are() -> None:
    step = step_of(RECURRENT, batch=64)

    weight = facts_of(step)["gradients"]["W"]["dense"]
    assert next(node.op_type for node in step.graph.node if weight in node.output) == "Sum"


def test_the_gradient_of_a_transposed_matrix_is_not_transposed() -> None:
    step = step_of(TRANSPOSED)

    nodes = {output: node for node in step.graph.node for output in node.output}
    weight = nodes[facts_of(step)["gradients"]["W"]["dense"]]
    assert weight.op_type == "MatMul"
    assert nodes[weight.input[0]].op_type == "Transpose"
    assert weight.input[1] == "b"
    data = [node for node in step.graph.node if node.op_type == "MatMul" and node.input[1] == "W"]
    assert len(data) == 1


def test_rows_are_added_to_the_product_of_a_table_that_is_also_multiplied() -> None:
    step = step_of(TIED)

    nodes = {output: node for node in step.graph.node for output in node.output}
    table = nodes[facts_of(step)["gradients"]["W"]["dense"]]
    assert table.op_type == "ScatterND"
    assert nodes[table.input[0]].op_type == "MatMul"
    assert not count(step, "ConstantOfShape")


@pytest.mark.parametrize("body", [RECURRENT, TRANSPOSED, TIED], ids=["recurrent", "transposed", "tied"])
@pytest.mark.parametrize("batch", ["global", "per-replica"])
def test_two_ranks_train_as_one_device_and_send_no_activations(body: str, batch: str, tmp_path: Path) -> None:
    training = import_training_graph(step_of(body))

    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", batch, sizes={"N": 8})

    assert not compiled.started("AllGather")
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
