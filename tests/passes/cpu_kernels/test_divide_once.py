import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from partc.passes.cpu_kernels.divide_once import divide_once

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
COPIED = """
segment (float[4] x, float[3,1] a) => (float[4] b_sent, float[3,4] y) <float one = {{1}}> {{
    b = Sigmoid (x)
    b_sent = Identity (b)
    q = Div (one, a)
    y = Mul ({operands})
}}
"""
FEEDS = {"x": np.linspace(-2, 2, 4, dtype=np.float32), "a": np.array([[2], [3], [-7]], np.float32)}


def rewritten(text: str) -> tuple[onnx.ModelProto, int]:
    model = parser.parse_model(HEADER + text)
    changed = divide_once(model)
    onnx.checker.check_model(model, full_check=True)
    return model, changed


@pytest.mark.parametrize("operands", ["q, b", "b, q"])
def test_a_product_with_a_reciprocal_becomes_a_quotient(operands: str) -> None:
    text = COPIED.format(operands=operands)
    model, changed = rewritten(text)

    assert changed == 1
    assert [(node.op_type, list(node.input)) for node in model.graph.node][-1] == ("Div", ["b", "a"])
    assert "q" not in {name for node in model.graph.node for name in node.output}
    expected = ReferenceEvaluator(parser.parse_model(HEADER + text)).run(None, FEEDS)
    for result, value in zip(ReferenceEvaluator(model).run(None, FEEDS), expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-6)


def test_onnxruntime_opens_it_where_the_other_factor_is_copied_to_an_output() -> None:
    model, _ = rewritten(COPIED.format(operands="b, q"))

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    b, y = session.run(None, FEEDS)
    np.testing.assert_allclose(y, b / FEEDS["a"], rtol=1e-6)


def test_a_product_of_two_reciprocals_is_divided_twice() -> None:
    model, changed = rewritten(
        "g (float[4] a, float[4] b) => (float[4] y) <float one = {1}>"
        "{ p = Div (one, a) q = Div (one, b) y = Mul (p, q) }"
    )

    assert changed == 1
    feeds = {"a": np.array([1, 2, 4, 5], np.float32), "b": np.array([8, -2, 3, 1], np.float32)}
    np.testing.assert_allclose(
        ReferenceEvaluator(model).run(None, feeds)[0], 1 / feeds["a"] / feeds["b"], rtol=1e-6
    )


LONE = "g (float[4] x, float[4] a) => (float[4] y) <float one = {1}> { q = Div (one, a) y = Mul (q, x) }"
READ_TWICE = LONE.replace("y)", "y, float[4] z)", 1)
IN_A_BODY = """z = If (c) <
    then_branch = t () => (float[4] u) { u = Neg (q) },
    else_branch = e () => (float[4] v) { v = Abs (x) }> }"""


@pytest.mark.parametrize(
    "text",
    [
        LONE.replace("{1}", "{2}"),
        LONE.replace("float one", "float[1,1] one").replace("float[4] y", "float[1,4] y"),
        LONE.replace("float", "int64"),
        LONE.replace("y)", "y, float[4] q)", 1),
        LONE.replace("(q, x)", "(q, q)"),
        READ_TWICE.replace("(q, x) }", "(q, x) z = Neg (q) }"),
        READ_TWICE.replace("(q, x) }", f"(q, x) {IN_A_BODY}").replace("a)", "a, bool c)", 1),
    ],
    ids=["two", "more axes", "whole numbers", "an output", "a square", "read twice", "read in a body"],
)
def test_what_is_no_lone_reciprocal_is_left_alone(text: str) -> None:
    model, changed = rewritten(text)

    assert changed == 0
    assert model == parser.parse_model(HEADER + text)


def test_a_lone_reciprocal_is_not() -> None:
    assert rewritten(LONE)[1] == 1
