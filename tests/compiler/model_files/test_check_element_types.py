"""Element types that do not fit an op are refused with the node: inspected, compiled and differentiated."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.numpy_helper import from_array
from onnx.shape_inference import infer_shapes

from partc.compiler.api import compile_step, inspect
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.model_files.check_element_types import check_element_types
from partc.compiler.options import GraphOptions, Options
from partc.runtime.errors import BadModel
from tests.builders.graphs.foreign_steps import TABLE, parse
from tests.builders.plans.compiled_steps import cluster_of, import_text

# What makes y [8, 3] of h [8, 3] in float64, beside one [3] in float32 and whole [8, 3] in int64.
MISFITS = {
    "Add": "y = Add (h, one)",
    "Where": "c = Greater (h, h) y = Where (c, h, one)",
    "Concat": "o = Unsqueeze (one, first) z = Concat <axis = 0> (h, o) y = Slice (z, first, eight)",
    "Max, the third": "y = Max (h, h, one)",
    "ScatterElements": "z = ConstantOfShape (shape) s = ScatterElements <reduction = 'add'> (z, whole, h) "
    "y = Cast <to = 11> (s)",
    "Sigmoid of integers": "s = Sigmoid (whole) t = Cast <to = 11> (s) y = Mul (h, t)",
    "Gather by a float": "g = Gather (h, one) m = ReduceMean <keepdims = 0> (g) y = Mul (h, m)",
}
STEP = """
step (double[8,4] x, double[4,3] W, float[3] one, int64[8,3] whole) => (double loss, double[4,3] W_next)
<double rate = {{0.1}}, int64[1] first = {{0}}, int64[1] eight = {{8}}, int64[2] shape = {{8, 3}}> {{
    h = MatMul (x, W)
    {op}
    loss = ReduceMean <keepdims = 0> (y)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, y)
    part = Mul (dW, rate)
    W_next = Sub (W, part)
}}
"""


def step_with(kind: str) -> onnx.ModelProto:
    model = parse(STEP.format(op=MISFITS[kind].replace("'", '"')))
    model.graph.initializer.append(from_array(np.ones((4, 3)), "W"))
    return model


@pytest.mark.parametrize("kind", MISFITS)
def test_a_misfit_is_refused_before_anything_is_made_of_it(kind: str, tmp_path: Path) -> None:
    options = GraphOptions(state={"W": "W_next"}, sample_axes={"one": None, "whole": 0})
    with pytest.raises(Exception, match=r"Type Error|INVALID_GRAPH|FAIL"):
        onnxruntime.InferenceSession(step_with(kind).SerializeToString())

    with pytest.raises(BadModel, match=r"takes one type|has no meaning for") as refusal:
        inspect(step_with(kind), options=options)
    with pytest.raises(BadModel, match=r"takes one type|has no meaning for"):
        compile_step(step_with(kind), cluster_of("1x2"), tmp_path / "out", Options(options=options))

    assert kind.partition(" ")[0].strip(",") in refusal.value.at
    assert list(tmp_path.iterdir()) == []


def test_a_scatter_into_zeros_of_another_type_is_named() -> None:
    """ConstantOfShape makes float32 unless it is told otherwise."""
    with pytest.raises(BadModel, match="'zeros' is of float and 'd' of double, where ScatterElements takes"):
        import_text(TABLE.replace("float[", "double[").replace("float ", "double "))


@pytest.mark.parametrize("kind", ["float", "double", "float16"])
def test_a_float_that_an_op_is_not_said_to_take_is_left_to_its_kernels(kind: str) -> None:
    check_element_types(infer_shapes(parse(f"g ({kind}[4] x) => ({kind}[4] y) {{ y = Celu (x) }}")))


def test_a_forward_model_is_refused_before_it_is_differentiated() -> None:
    forward = parse(
        "f (double[8,4] x) => (double loss) <float rate = {2.0}> {"
        "h = MatMul (x, W) y = Mul (h, rate) loss = ReduceMean <keepdims = 0> (y) }"
    )
    forward.graph.initializer.append(from_array(np.ones((4, 3)), "W"))

    with pytest.raises(BadModel, match="'h' is of double and 'rate' of float, where Mul takes one type"):
        build_training_graph(forward, loss="loss", optimizer=SGD(0.1))


def test_probabilities_as_labels_are_not_to_be_cast_to_classes() -> None:
    text = "g (float[4, 3] x, float[4, 3] p) => (float loss) { loss = SoftmaxCrossEntropyLoss (x, p) }"

    with pytest.raises(BadModel, match="no meaning for 'p' of float") as refusal:
        check_element_types(infer_shapes(parse(text)))

    assert refusal.value.fix.startswith("give classes, which are integers; of probabilities write out")
