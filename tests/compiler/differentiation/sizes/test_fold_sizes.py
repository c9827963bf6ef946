"""Computed sizes as constants, and the shapes that follow from them."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.sizes import symbolic
from partc.compiler.differentiation.sizes.fold_sizes import fold_sizes
from partc.compiler.differentiation.tensor_types import Size, infer_types, small_constants
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.data.step_draws import evaluate_size
from partc.runtime.errors import UnsupportedModel
from tests.checks.training_steps import EVERYTHING, train
from tests.compiler.differentiation.sizes.test_symbolic_broadcasts import check_gradients, with_parameters


def folded(text: str, *, shapes: bool = True) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    fold_sizes(model, shapes=shapes)
    onnx.checker.check_model(model, full_check=True)
    return model


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


MERGED = """g ({x}) => (float[m, n] y)
    <int64[1] zero = {{0}}, int64[1] forty = {{40}}, int64[1] eight = {{8}}> {{
    s = Shape (x) b = Gather (s, zero) five = Div (forty, eight)
    n = Mul (b, five) t = Concat <axis = 0> (n, eight) h = Reshape (x, t) y = Relu (h) }}"""


def merged(first: str, *, shapes: bool = True) -> onnx.ModelProto:
    return folded(MERGED.format(x=f"float[{first}, 5, 8] x"), shapes=shapes)


def test_a_target_computed_from_a_shape_becomes_a_constant() -> None:
    model = merged("4")

    assert ops(model) == ["Reshape", "Relu"]
    assert small_constants(model.graph)["t"].tolist() == [20, 8]
    assert infer_types(model)["h"].shape == (20, 8)


def test_a_target_computed_from_a_symbolic_shape_stays_and_its_shape_is_noted() -> None:
    model = merged("batch")

    assert ops(model) == ["Shape", "Gather", "Mul", "Concat", "Reshape", "Relu"]
    assert infer_types(model)["h"].shape == ("5*batch", 8)


def test_a_shape_that_may_change_is_not_folded() -> None:
    model = merged("4", shapes=False)

    assert ops(model) == ["Shape", "Gather", "Mul", "Concat", "Reshape", "Relu"]
    assert small_constants(model.graph)["five"].tolist() == [5]


def test_floats_that_are_stored_or_made_stay_for_they_may_be_parameters() -> None:
    model = folded(
        """g (float[2,3] x) => (float[2,3] y) <float[3] w = {1.0, 2.0, 3.0}, int64[1] three = {3}> {
            double_w = Add (w, w) b = ConstantOfShape <value = float[1] {0.5}> (three)
            two = Constant <value = float {2.0}> () c = Mul (b, two)
            h = Mul (x, double_w) y = Add (h, c) }"""
    )

    assert ops(model) == ["Add", "ConstantOfShape", "Mul", "Mul", "Add"]


def test_the_scales_of_a_resize_are_found() -> None:
    model = folded(
        """g (float[1,2,4,6] x) => (float[1,2,n,m] y) {
            s = Shape <start = 2> (x) t = Constant <value_ints = [8,3]> ()
            a = Cast <to = 1> (s) b = Cast <to = 1> (t) c = Div (b, a)
            one = Constant <value_floats = [1.0, 1.0]> () scales = Concat <axis = 0> (one, c)
            y = Resize <mode = "linear"> (x, , scales) }"""
    )

    assert ops(model) == ["Resize"]
    assert small_constants(model.graph)["scales"].tolist() == [1, 1, 2, 0.5]


# Old exporters write Expand with -1 for "as it is".
def test_a_symbolic_size_is_not_negative() -> None:
    model = folded(
        """g (float[batch,1,4] x) => (float[a,b,c] y) {
            minus = Constant <value_ints = [-1,3,-1]> () one = Constant <value_ints = [-1,-1,-1]> ()
            s = Shape (x) keeps = Equal (minus, one) t = Where (keeps, s, minus)
            y = Expand (x, t) z = Relu (y) }"""
    )

    assert infer_types(model)["z"].shape == ("batch", 3, 4)


PATTERNS: dict[str, tuple[tuple[Size, Size], object]] = {
    "multiply": ((6, "batch"), "6*batch"),
    "multiply zero": ((0, None), 0),
    "multiply symbols": (("seq", "2*batch"), "2*batch*seq"),
    "divide": (("6*batch", 3), "2*batch"),
    "divide symbols": (("6*batch*seq", "seq"), "6*batch"),
    "divide unevenly": (("batch", 2), None),
    "divide numbers": ((-7, 2), -3),
    "add": (("batch", "2*batch"), "3*batch"),
    "add others": (("batch", 1), None),
    "subtract": (("3*batch", "batch"), "2*batch"),
    "subtract more": (("batch", 1), None),
    "largest": ((0, "batch"), "batch"),
    "largest of any": ((1, "batch"), None),
    "smallest": (("batch", -1), -1),
    "is_equal": (("batch", -1), False),
    "is_equal perhaps": (("batch", 1), None),
    "is_less": (("batch", 0), False),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_arithmetic_of_sizes(case: str) -> None:
    operands, expected = PATTERNS[case]

    assert getattr(symbolic, case.split()[0])(*operands) == expected


def test_random_expressions_of_sizes_hold_at_any_batch() -> None:
    """What is known of an expression in symbols is what numbers make of it."""
    rng = np.random.default_rng(0)
    names = ("multiply", "divide", "add", "subtract", "largest", "smallest")
    exact = {
        "multiply": lambda a, b: a * b,
        "divide": lambda a, b: int(a / b) if b else None,
        "add": lambda a, b: a + b,
        "subtract": lambda a, b: a - b,
        "largest": max,
        "smallest": min,
    }
    checked = 0
    for _ in range(3000):
        values = {"batch": int(rng.integers(0, 9)), "seq": int(rng.integers(0, 9))}
        terms: list[tuple[Size, int]] = [(size, size) for size in (0, 1, 2, 3)]
        terms += list(values.items())
        for _ in range(6):
            name = names[rng.integers(len(names))]
            (a, x), (b, y) = (terms[rng.integers(len(terms))] for _ in range(2))
            known, value = getattr(symbolic, name)(a, b), exact[name](x, y)
            if known is None or value is None:
                continue
            number = known if isinstance(known, int) else evaluate_size(known, values)
            assert number == value, (name, a, b, values)
            checked += isinstance(known, str)
            terms.append((known, value))
    assert checked > 1000


# ---------------------------------------------------------------- through differentiation

COMPUTED = {
    # As torchlib writes EmbeddingBag: a Loop over the bags, rows cut by computed offsets.
    "bags": """(double[6,3] a, double[3,2] b) => (double total) {
        offsets = Constant <value_ints = [0,2,3,6]> () zero = Constant <value_ints = [0]> ()
        first = Constant <value_int = 0> () s = Size (offsets) one = Constant <value_int = 1> ()
        n = Sub (s, one) none = SequenceEmpty <dtype = 11> () goes = Less (first, n)
        rows, last = Loop ("", goes, none, first) <body =
            g (int64 i, bool go, seq(double[d,3]) held, int64 k) =>
            (bool more, seq(double[d,3]) kept, int64 next) {
                minus = Constant <value_ints = [-1]> () f = Constant <value_ints = [1]> ()
                p = Reshape (k, minus) q = Add (p, f) qq = Add (q, f)
                from = Slice (offsets, p, q) to = Slice (offsets, q, qq)
                part = Slice (a, from, to) z = Constant <value_ints = [0]> () row = ReduceMean (part, z)
                kept = SequenceInsert (held, row) o = Constant <value_int = 1> () next = Add (k, o)
                more = Less (next, n) }>
        e = ConcatFromSequence <axis = 0> (rows) y = MatMul (e, b) t = Tanh (y)
        total = ReduceSum <keepdims = 0> (t) }""",
    # The rank of h is known only once its target is.
    "rank": """(double[2,3,4] a, double[4,3] b) => (double total) {
        s = Shape (a) zero = Constant <value_int = 0> () two = Constant <value_ints = [2]> ()
        ends = Constant <value_ints = [9]> () n = Slice (s, two, ends) many = Constant <value_ints = [-1]> ()
        size = Size (n) flat = Constant <value_ints = [1]> ()
        count = Reshape (size, flat) ones = Expand (many, count) t = Concat <axis = 0> (ones, n)
        h = Reshape (a, t) y = MatMul (h, b) w = Tanh (y) total = ReduceSum <keepdims = 0> (w) }""",
}


@pytest.mark.parametrize("case", COMPUTED)
def test_gradient_through_computed_sizes(case: str) -> None:
    model = with_parameters(f'<ir_version: 10, opset_import: ["": 21]> g {COMPUTED[case]}', names="abc")

    trained = build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)

    check_gradients(model, trained, {}, case)


LSTM = """(float[20,4] a, float[20,5] b, float[3,2,4] c) => (float total) {{
    zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> ()
    nought = Constant <value = float {{0.0}}> () s = Constant <value_ints = [1,2,5]> ()
    h0 = Expand (nought, s) {weights}
    W = Unsqueeze (w, zero) R = Unsqueeze (r, zero)
    y, yh = LSTM <hidden_size = 5> (c, W, R, , , h0, h0) k = Mul (y, y)
    total = ReduceSum <keepdims = 0> (k) }}"""
CUT_WEIGHTS = """
    two = Constant <value_ints = [2]> () n = Shape <start = 2> (h0) n2 = Mul (n, two)
    four = Constant <value_ints = [4]> () n4 = Mul (n, four)
    wi = Slice (a, zero, n2, zero) wj = Slice (a, n2, n4, zero) w = Concat <axis = 0> (wj, wi)
    ri = Slice (b, zero, n2, zero) rj = Slice (b, n2, n4, zero) r = Concat <axis = 0> (rj, ri)"""


def test_a_recurrent_layer_whose_weights_are_cut_by_computed_sizes() -> None:
    """As unoptimised exporters write it; the same weights stored in their places give the same gradients."""
    header = '<ir_version: 10, opset_import: ["": 21]> g '
    cut = with_parameters(header + LSTM.format(weights=CUT_WEIGHTS), names="abc")
    plain = with_parameters(header + LSTM.format(weights="w = Identity (a) r = Identity (b)"), names="abc")
    for tensor in plain.graph.initializer[:2]:  # the halves change places
        moved = np.roll(numpy_helper.to_array(tensor), 10, axis=0)
        tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))

    stepped = [
        train(build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING), [{}])[
            1
        ]
        for model in (cut, plain)
    ]

    np.testing.assert_allclose(stepped[0]["c"], stepped[1]["c"], rtol=1e-5, atol=1e-6)
    for name in "ab":
        expected = np.roll(stepped[1][name], 10, axis=0)
        np.testing.assert_allclose(stepped[0][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_batch_that_is_rewritten_is_not_folded() -> None:
    """Means over the batch follow it: Shape is folded only behind --batch-size."""
    model = with_parameters(
        """<ir_version: 10, opset_import: ["": 21]>
        g (double[4,3] x, double[3,2] a) => (double[b,2] y, double total) {
            y = MatMul (x, a) s = Shape <end = 1> (x) n = Cast <to = 11> (s) t = ReduceSum <keepdims = 0> (y)
            m = Div (t, n) z = Constant <value_ints = [0]> () total = Squeeze (m, z) }""",
        names="a",
    )

    trained = build_training_graph(
        model, loss="total", optimizer=SGD(lr=1.0), batch_size=8, parameters=EVERYTHING
    )

    x = np.random.default_rng(1).normal(size=(8, 3))
    check_gradients(model, trained, {"x": x}, "batch 8", batch=8)


def test_a_loop_over_a_symbolic_number_of_bags_is_refused() -> None:
    text = COMPUTED["bags"].replace("offsets = Constant <value_ints = [0,2,3,6]> ()", "")
    text = text.replace("(double[6,3] a,", "(int64[n] offsets, double[6,3] a,")
    model = with_parameters(f'<ir_version: 10, opset_import: ["": 21]> g {text}', names="ab")

    with pytest.raises(UnsupportedModel, match="export the model with fixed sizes"):
        build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
