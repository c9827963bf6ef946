"""Dropouts of modules in training, which the exporter writes as ones in evaluation, or leaves out."""

import numpy as np
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
LAYERS = """net (float[5, 2, 3] x) => (float loss) <int64[1] axis = {{1}}> {{
    y1 = {op} <hidden_size = 3> (x, w, r)
    h1 = Squeeze (y1, axis)
    y2 = {op} <hidden_size = 3> (h1, w, r)
    h2 = Squeeze (y2, axis)
    y3 = {op} <hidden_size = 3> (h2, w, r)
    loss = ReduceMean <keepdims = 0> (y3) }}"""
GATES = {"LSTM": 4, "GRU": 3}


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


def layers_of(op: str, arguments: str) -> onnx.ModelProto:
    operation = call(f"{op.lower()}.input", f"%x, [%h, %c], [%w, %r], {arguments}")
    model = by_pytorch(LAYERS.format(op=op), dict.fromkeys(("y1", "h1", "y2", "h2", "y3"), operation))
    for name in ("w", "r"):
        value = np.zeros((1, GATES[op] * 3, 3), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


@pytest.mark.parametrize("op", GATES)
def test_layers_of_a_recurrence_drop_of_what_they_are_given(op: str) -> None:
    followed = follow_operations(layers_of(op, "True, 3, 0.25, True, False, True"))

    assert dropouts_of(followed) == [("h1", 0.25), ("h2", 0.25)]
    read = [node.input[0] for node in followed.graph.node if node.op_type == op]
    assert read == ["x", "h1.dropped", "h2.dropped"]


@pytest.mark.parametrize(
    "arguments",
    ["True, 3, 0.25, False, False, True", "True, 3, 0.0, True, False, True", "True, 1, 0.25, True, False"],
)
def test_other_recurrences_stay_as_they_are(arguments: str) -> None:
    model = layers_of("LSTM", arguments)

    assert follow_operations(model) is model


def test_layers_that_are_not_apart_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"left out the dropout between 2 layers, of 0\.25"):
        follow_operations(layers_of("GRU", "True, 2, 0.25, True, False, True"))
