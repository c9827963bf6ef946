from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser

from partc.passes.cpu_kernels.halve_by_quotient import halve_by_quotient

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
BY_PRODUCTS = """
    m1 = Mul (x, k)
    m2 = Mul (m1, x)
    a = Add (m2, one)
    cx = Mul (x, c)
    b = Mul (cx, a)
"""
BY_POWER = """
    m1 = Pow (x, three)
    m2 = Mul (m1, k)
    a = Add (x, m2)
    b = Mul (a, c)
"""
GELU = """
segment (float[4,3] x) => (float[4,3] z)
<float half = {{0.5}}, float one = {{1}}, float three = {{3}}, float k = {{0.044715}},
 float c = {{0.7978845608}}> {{
    {inner}
    t = Tanh (b)
    d = Add (t, one)
    h = Mul (x, half)
    y = Mul ({product})
    z = Sin (y)
}}
"""
FEEDS = {"x": np.linspace(-3, 3, 12, dtype=np.float32).reshape(4, 3)}
IN_A_BODY = """c0 = Constant <value = bool {1}> () again = If (c0) <
    then_branch = t () => (float[4,3] u) { u = Neg (h) },
    else_branch = e () => (float[4,3] v) { v = Abs (h) }>"""


def gelu(inner: str = BY_POWER, product: str = "h, d") -> onnx.ModelProto:
    return parser.parse_model(HEADER + GELU.format(inner=inner, product=product))


def read_again(model: onnx.ModelProto, value: str, op: str, place: int) -> None:
    """Let a node read a value, and hand out what it makes."""
    model.graph.node.insert(place, helper.make_node(op, [value], ["again"]))
    model.graph.output.append(helper.make_tensor_value_info("again", onnx.TensorProto.FLOAT, [4, 3]))


def results(model: onnx.ModelProto, rewrites: bool) -> list[np.ndarray]:
    """Run a model as ONNX Runtime opens it by itself, or node by node."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    if not rewrites:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, FEEDS))


@pytest.mark.parametrize("op", ["Neg", "Identity"])
@pytest.mark.parametrize("product", ["h, d", "d, h"])
@pytest.mark.parametrize("inner", [BY_POWER, BY_PRODUCTS], ids=["power", "products"])
def test_whatever_is_read_again_of_a_gelu_onnxruntime_opens_it(inner: str, product: str, op: str) -> None:
    plain = gelu(inner, product)
    values = [name for node in plain.graph.node for name in node.output if name != "z"]
    for value in values:
        model = gelu(inner, product)
        made = next(place for place, node in enumerate(model.graph.node) if value in node.output)
        read_again(model, value, op, made + 1)
        expected = results(model, rewrites=False)

        changed = halve_by_quotient(model)

        assert changed == (value == "h"), value
        for exact, now in zip(expected, results(model, rewrites=False), strict=True):
            np.testing.assert_array_equal(now, exact, err_msg=value)
        for exact, now in zip(expected, results(model, rewrites=True), strict=True):
            np.testing.assert_allclose(now, exact, rtol=1e-5, atol=1e-6, err_msg=value)


def test_a_body_may_read_the_half() -> None:
    model = parser.parse_model(
        HEADER
        + GELU.format(inner=BY_POWER, product="h, d")
        .replace("z = Sin", f"{IN_A_BODY} z = Sin")
        .replace("z)", "z, float[4,3] again)", 1)
    )

    assert halve_by_quotient(model) == 1
    results(model, rewrites=True)


def test_a_cast_may_stand_between_the_half_and_its_product() -> None:
    model = gelu(product="hc, d")
    cast = helper.make_node("Cast", ["h"], ["hc"], to=onnx.TensorProto.FLOAT)
    place = next(place for place, node in enumerate(model.graph.node) if "y" in node.output)
    model.graph.node.insert(place, cast)
    read_again(model, "h", "Neg", place)

    assert halve_by_quotient(model) == 1
    results(model, rewrites=True)


def test_halves_of_two_gelus_share_their_two() -> None:
    other = "w = Mul (h, one) m1_ = Pow (w, three) m2_ = Mul (m1_, k) a_ = Add (w, m2_) b_ = Mul (a_, c) "
    other += "t_ = Tanh (b_) d_ = Add (t_, one) h_ = Mul (w, half) y_ = Mul (h_, d_) again = Sub (y_, h_)"
    text = GELU.format(inner=BY_POWER, product="h, d").replace("z = Sin", f"{other} z = Sin")
    model = parser.parse_model(HEADER + text.replace("z)", "z, float[4,3] again)", 1))

    assert halve_by_quotient(model) == 2
    results(model, rewrites=True)
    assert [tensor.name for tensor in model.graph.initializer][-1:] == ["half/two"]


@pytest.mark.parametrize(
    "change",
    [
        ("z)", "z)"),
        ("z)", "z, float[4,3] h)"),
        ("z = Sin", "again = Neg (h) s = Neg (t) z = Sin"),
        ("half = {0.5}", "half = {0.25}"),
        ("d = Add (t, one)", "d = Sub (t, one) again = Neg (h)"),
    ],
    ids=["alone", "an output", "the tangent is read", "a quarter", "no sum"],
)
def test_what_onnxruntime_leaves_or_loses_nothing_of_is_left_alone(change: tuple[str, str]) -> None:
    text = GELU.format(inner=BY_POWER, product="h, d").replace(*change, 1)
    model = parser.parse_model(HEADER + text)

    assert halve_by_quotient(model) == 0
    assert model == parser.parse_model(HEADER + text)


def test_a_gelu_whose_half_nobody_else_reads_stays_one_op(tmp_path: Path) -> None:
    model = gelu()
    halve_by_quotient(model)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "opened.onnx")

    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    assert "FastGelu" in {node.op_type for node in onnx.load(tmp_path / "opened.onnx").graph.node}
