"""What `partc grad` refuses, and what it tells the reader to do."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import BadModel, BadUsage, InputError, UnsupportedModel
from tests.checks.training_steps import EVERYTHING


def grad(text: str, loss: str = "mse", **options: Any) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> test {text}')
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 2), np.float32), "W"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 1, 1), np.float32), "V"))
    return build_training_graph(model, loss=loss, optimizer=SGD(), **options)


DENSE = "(float[batch,3] x) => (float[batch,2] y) { y = MatMul (x, W) }"
SCALAR = "(float[batch,3] x) => (float y) { z = MatMul (x, W) y = ReduceMean <keepdims=0> (z) }"


def test_a_batch_without_samples_is_refused_as_such_unless_it_is_rewritten() -> None:
    empty = DENSE.replace("batch", "0")

    with pytest.raises(BadModel, match="the batch is empty: data input 'x'") as error:
        grad(empty)

    assert "--batch-size" in error.value.fix
    assert grad(empty, batch_size=4).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4


def test_an_op_without_rule_is_named_with_the_way_to_it() -> None:
    text = """(float[batch,2,4,3] x, float[boxes,5] rois) => (float[boxes,2,1,1] y) {
        [first] a = MatMul (x, W) [second] b = Relu (a)
        [third] y = MaxRoiPool <pooled_shape = [1, 1]> (b, rois) }"""

    with pytest.raises(UnsupportedModel) as error:
        grad(text)

    assert "MaxRoiPool" in error.value.what
    assert "opset 21" in error.value.what
    assert "'W' -> first -> second -> third" in error.value.at
    assert "rules/table.py" in error.value.fix


@pytest.mark.parametrize(
    ("text", "loss", "options", "kind", "fix"),
    [
        (DENSE, "hinge", {}, BadUsage, "softmax_cross_entropy"),
        (DENSE, "y", {}, BadUsage, "reduce it to a scalar"),
        (SCALAR, "softmax_cross_entropy", {}, BadUsage, "--loss y"),
        (SCALAR, "mse", {}, BadUsage, "--loss y"),
        (DENSE, "mse", {"batch_size": 0}, BadUsage, "size of at least 1"),
        (DENSE, "mse", {"clip_global_norm": -1.0}, BadUsage, "positive number"),
        (DENSE, "mse", {"reinit": 2**24}, BadUsage, "a seed from"),
        ("(float[batch,3] x) => (float[batch,3] y) { y = Neg (x) }", "mse", {}, UnsupportedModel, "Constant"),
        (
            "(float[batch,3] x) => (float[batch,2] y, float[batch,2] z) { y = MatMul (x, W) z = Neg (y) }",
            "mse",
            {},
            BadUsage,
            "scalar output",
        ),
        (
            "(float[batch,3] x) => (float[batch,2] y) { z = MatMul (x, W) y = Softmax <axis = 0> (z) }",
            "softmax_cross_entropy",
            {},
            UnsupportedModel,
            "transpose",
        ),
        ("(float[4,5] x) => (float[4,2] y) { y = MatMul (x, W) }", "mse", {}, BadModel, "mend the node"),
        (
            "(float[batch,3,h,h] x) => (float[batch,3,k,k] y) {"
            " z = Mul (x, V) y = MaxPool <kernel_shape = [2,2]> (z) }",
            "mse",
            {"parameters": EVERYTHING},
            UnsupportedModel,
            "these sizes fixed",
        ),
    ],
)
def test_refusals_tell_the_repair(
    text: str, loss: str, options: dict[str, float], kind: type[InputError], fix: str
) -> None:
    with pytest.raises(kind) as error:
        grad(text, loss, **options)
    assert fix in error.value.fix
