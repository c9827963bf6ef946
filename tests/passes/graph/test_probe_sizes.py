"""Steps that bound a size: what is fixed at two sizes is another thing at a third."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.probe_sizes import is_fixed_at_other_sizes
from partc.passes.graph.training_graph import TrainingGraph

STEP = """<ir_version: 10, opset_import: ["" : 21]>
step (float[N, 4] x, float[4, 3] W) => (float loss, float[4, 3] W_next)
    <int64 k = {{16}}, int64 many = {{64}}, int64 one = {{1}}, float share = {{0.125}}, float whole = {{1}},
     int64[1] none = {{-1}}> {{
    p = MatMul (x, W)
    loss = ReduceMean <keepdims = 0> (p)
    size = Shape <start = 0, end = 1> (x)
    first = Squeeze (size)
    real = Cast <to = 1> (first)
    {nodes}
    xt = Transpose <perm = [1, 0]> (x)
    g = MatMul (xt, p)
    part = Mul (g, rate)
    W_next = Sub (W, part)
}}
"""
BOUNDED = {
    "least": "scaled = Mul (real, share) rate = Min (scaled, whole)",
    "floor": "parts = Div (first, k) most = Max (parts, one) rate = Cast <to = 1> (most)",
    "taken": """parts = Div (first, k) most = Max (parts, one) count = Unsqueeze (most, zero)
        top, at = TopK <axis = 0> (p, count) rate = ReduceMax <keepdims = 0> (top)""",
    "decided": "few = Less (first, many) rate = Cast <to = 1> (few)",
}
OPEN = {
    "shares": "rate = Div (whole, real)",
    "itself": "rate = Div (real, real)",
    "expanded": """given = Equal (size, none) ones = ConstantOfShape <value = int64[1] {1}> (width)
        s = Where (given, ones, size)
        wide = Expand (whole, s) rate = ReduceMean <keepdims = 0> (wide)""",
}


def training_of(nodes: str) -> TrainingGraph:
    text = STEP.format(nodes=nodes).replace(
        "int64[1] none", "int64[1] zero = {0}, int64[1] width = {1}, int64[1] none"
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "W"))
    options = GraphOptions(state={"W": "W_next"}, loss="loss", sample_axes={"x": 0})
    return import_training_graph(model, options)


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize(("nodes", "is_open"), [*((n, False) for n in BOUNDED), *((n, True) for n in OPEN)])
def test_what_hides_a_size_at_two_is_seen_at_others(nodes: str, is_open: bool, size: int) -> None:
    training = training_of((BOUNDED | OPEN)[nodes])
    facts = infer_facts(training, {"N": size})

    assert is_fixed_at_other_sizes(training, facts, {"N": size}, 1) == is_open


def test_a_size_that_is_a_number_has_no_others() -> None:
    training = training_of(BOUNDED["least"])
    training.fixed_sizes = {"N": 8}
    facts = infer_facts(training, {"N": 8})

    assert is_fixed_at_other_sizes(training, facts, {"N": 8}, 1)
