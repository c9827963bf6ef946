"""Dropouts of modules in training, which the exporter writes as ones in evaluation, or leaves out."""

import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.operations.follow_operations import follow_operations
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.exported_models import call, with_operations
from tests.builders.graphs.foreign_steps import parse

ATTENTION = call("scaled_dot_product_attention.default", "%q, %k, %v, None, 0.4")
BY_NAME = call("scaled_dot_product_attention.default", "%q, %k, %v", "dropout_p: 0.4, scale: 0.3")
UNDROPPED = call("scaled_dot_product_attention.default", "%q, %k, %v, None, 0.0, True", "scale: 0.3")
DROPPED = """net (float[6, 3] x) => (float loss) <float ratio = {0.4}, bool yes = {1}, bool no = {0}> {
    s = Softmax (x) y = Dropout (s, ratio) loss = ReduceMean <keepdims = 0> (y) }"""
LEFT_OUT = """net (float[6, 3] x) => (float loss) {
    y = Softmax (x) loss = ReduceMean <keepdims = 0> (y) }"""


def by_pytorch(text: str, operations: dict[str, str]) -> onnx.ModelProto:
    model = with_operations(parse(text), operations)
    model.producer_name = "pytorch"
    return model


def dropouts_of(model: onnx.ModelProto) -> list[tuple[str, float]]:
    """Return what each Dropout in training reads, and its ratio."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values |= {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant"
    }
    nodes = [node for node in model.graph.node if node.op_type == "Dropout" and values[node.input[2]]]
    return [(node.input[0], pytest.approx(float(values[node.input[1]]))) for node in nodes]


@pytest.mark.parametrize("operation", [ATTENTION, ""])
def test_a_dropout_of_pytorchs_drops(operation: str) -> None:
    followed = follow_operations(by_pytorch(DROPPED, {"s": operation, "y": operation}))

    assert dropouts_of(followed) == [("s", 0.4)]


@pytest.mark.parametrize("told", ["yes", "no"])
def test_what_is_told_stays(told: str) -> None:
    model = by_pytorch(DROPPED.replace("(s, ratio)", f"(s, ratio, {told})"), {})

    assert follow_operations(model) is model


def test_of_others_a_dropout_does_nothing() -> None:
    model = parse(DROPPED)

    assert follow_operations(model) is model


@pytest.mark.parametrize("operation", [ATTENTION, BY_NAME])
def test_attention_whose_dropout_was_left_out_is_refused(operation: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"left out the dropout of attention weights, of 0\.4"):
        follow_operations(by_pytorch(LEFT_OUT, {"y": operation}))


def test_attention_that_drops_nothing_is_fine() -> None:
    model = by_pytorch(LEFT_OUT, {"y": UNDROPPED})

    assert follow_operations(model) is model
