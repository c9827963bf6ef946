import numpy as np
import onnx
from onnx import parser, shape_inference
from onnx.reference import ReferenceEvaluator

from partc.passes.cpu_kernels.align_scalars import align_scalars

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
MOMENTUM = """
step (float[4,3,1,1] W, float rate) => (float[4,3,1,1] W_next) <float keep = {0.9}> {
    kept = Mul (keep, W)
    twice = Add (rate, rate)
    W_next = Sub (kept, twice)
}
"""


def aligned(text: str) -> tuple[onnx.ModelProto, int]:
    model = parser.parse_model(HEADER + text)
    changed = align_scalars(model, shape_inference.infer_shapes(model))
    onnx.checker.check_model(model, full_check=True)
    return model, changed


def test_constant_and_computed_scalars_take_the_rank_of_a_weight_that_ends_in_ones() -> None:
    model, changed = aligned(MOMENTUM)

    assert changed == 2
    nodes = {node.output[0]: (node.op_type, list(node.input)) for node in model.graph.node}
    assert nodes["kept"] == ("Mul", ["keep/of_rank_4", "W"])
    assert nodes["twice/of_rank_4"][0] == "Expand"
    assert nodes["W_next"] == ("Sub", ["kept", "twice/of_rank_4"])


def test_the_values_stay_the_same() -> None:
    feeds = {"W": np.arange(12, dtype=np.float32).reshape(4, 3, 1, 1), "rate": np.float32(0.5)}
    before = ReferenceEvaluator(parser.parse_model(HEADER + MOMENTUM)).run(None, feeds)

    after = ReferenceEvaluator(aligned(MOMENTUM)[0]).run(None, feeds)

    np.testing.assert_array_equal(after[0], before[0])


def test_a_weight_whose_last_axis_is_longer_is_left_alone() -> None:
    text = MOMENTUM.replace("[4,3,1,1]", "[4,3]")
    model, changed = aligned(text)

    assert changed == 0
    assert model == parser.parse_model(HEADER + text)
