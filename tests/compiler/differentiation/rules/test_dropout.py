"""Dropout in a training graph: the mask of the forward pass is that of the gradient."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import EVERYTHING, session

# `r` is the share that is dropped, `t` whether the graph trains: constants, or data.
HEAD = "(float[8,64] x{inputs}) => (float loss, float[8,64] y)"
CONSTANTS = "r = Constant <value = float {0.25}> () t = Constant <value = bool {1}> ()"
CASES = {
    "constant": ("", CONSTANTS, {}),
    "fed_ratio": (", float r", "t = Constant <value = bool {1}> ()", {"r": np.array(0.25, np.float32)}),
    "fed_mode": (", bool t", "r = Constant <value = float {0.25}> ()", {"t": np.array(True)}),
    "fed_mode_off": (", bool t", "r = Constant <value = float {0.25}> ()", {"t": np.array(False)}),
}


@pytest.mark.parametrize("seed", ["<seed = 7>", ""])
@pytest.mark.parametrize("case", CASES)
def test_gradient_passes_where_the_forward_pass_did(case: str, seed: str) -> None:
    inputs, constants, feeds = CASES[case]
    text = f"""<ir_version: 10, opset_import: ["": 21]> test {HEAD.format(inputs=inputs)} {{
        {constants} h = Mul (x, W) y = Dropout {seed} (h, r, t) loss = ReduceSum <keepdims = 0> (y) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 64), np.float32), "W"))

    built = build_training_graph(model, loss="loss", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    x = np.ones((8, 64), np.float32)
    y, following = session(built).run(["y", "W_next"], {"x": x, "W": x, **feeds})

    np.testing.assert_allclose(1 - following, y, rtol=1e-6)
    share = (y == 0).mean()
    assert share == 0 if case == "fed_mode_off" else 0.15 < share < 0.35


def test_mask_of_a_dropout_that_drops_nothing_is_full() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> test (float[2,3] x) => (float loss, bool[2,3] mask) {
        h = Mul (x, W) y, mask = Dropout (h) loss = ReduceSum <keepdims = 0> (y) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "W"))

    built = build_training_graph(model, loss="loss", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    x = np.ones((2, 3), np.float32)

    assert session(built).run(["mask"], {"x": x, "W": x})[0].all()
