"""What gradient rules of plain ops refuse, and what they tell the reader to do."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.onnx_cases import gradients, in_onnxruntime
from tests.checks.training_steps import EVERYTHING

# Nodes that make y of h float[N, 1, 2, 3], and what the refusal says to do.
REFUSED = {
    'p = Constant <value_ints = [1,0,0,0,1,0,0,0]> () y = Pad <mode = "edge"> (h, p)': "fix this axis' size",
    "c = Cast <to = 7> (h) f = Constant <value_ints = [-1]> () e = Reshape (c, f) "
    'p = Slice (e, zero, eight) y = Pad <mode = "edge"> (h, p)': "make it an initializer or a Constant node",
    's = Constant <value_ints = [1,1,2,1]> () y = Resize <keep_aspect_ratio_policy = "not_smaller", '
    "axes = [0,1,2,3]> (h, , , s)": "fix this axis' size",
    's = Constant <value_ints = [1,1]> () y = Resize <keep_aspect_ratio_policy = "not_smaller", '
    "axes = [2,3]> (h, , , s)": "no policy for the aspect ratio",
    "r = Constant <value = float[1,5] {0, 0, 0, 1, 1}> () y = MaxRoiPool <pooled_shape = [1,1]> (h, r)": (
        "replace the op"
    ),
    "m = ReduceMax <keepdims = 0> (h) y = Clip (h, , m)": "Min and Max for Clip",
    "m = ReduceMax <keepdims = 0> (h) y = Pad (h, ends, m)": "--freeze the parameter",
}


@pytest.mark.parametrize("body", REFUSED)
def test_a_gradient_that_is_not_known_is_refused_with_a_way_out(body: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        step (float[N,1,2,3] x, float[1,1,2,3] w) => (float total)
        {{ zero = Constant <value_ints = [0]> () eight = Constant <value_ints = [8]> ()
          ends = Constant <value_ints = [0,0,1,0,0,0,0,1]> ()
          h = Mul (x, w) {body} total = ReduceSum <keepdims = 0> (y) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 2, 3), np.float32), "w"))

    with pytest.raises(UnsupportedModel) as refusal:
        gradients(model, in_onnxruntime, EVERYTHING)

    assert REFUSED[body] in str(refusal.value)
    assert "at:  node '" in str(refusal.value)
