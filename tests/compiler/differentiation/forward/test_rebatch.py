"""A baked-in batch is found by where it flows, never by its value."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.forward.rebatch import BatchSize, rebatch
from partc.compiler.differentiation.objective import state_objective
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.tensor_types import infer_types, type_of
from partc.runtime.errors import BadUsage, UnsupportedModel


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> test {text}')


def target_of(model: onnx.ModelProto, op_type: str = "Reshape") -> list[int]:
    name = next(node.input[1] for node in model.graph.node if node.op_type == op_type)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    target: list[int] = numpy_helper.to_array(stored[name]).tolist()
    return target


@pytest.mark.parametrize(
    ("shape", "target", "result", "expected"),
    [
        ("8,8,4", "8,32", "8,32", [0, 32]),
        ("1,6,2", "1,12", "1,12", [0, 12]),
        ("8,3,4", "24,4", "24,4", [-1, 4]),
        ("8,12", "8,3,-1", "8,3,4", [0, 3, 4]),
        ("2,12", "1,2,12", "1,2,12", [1, -1, 12]),
    ],
)
def test_reshape_targets_keep_all_but_the_batch(
    shape: str, target: str, result: str, expected: list[int]
) -> None:
    model = parse(f"""(float[{shape}] x) => (float[{result}] y) {{
        s = Constant <value_ints = [{target}]> () y = Reshape (x, s) }}""")

    rebatch(model, 5, {"x": 0})

    assert target_of(model) == expected
    assert infer_types(model)["y"].shape is not None


@pytest.mark.parametrize(("shape", "target"), [("8,8,4", "8,32"), ("8,3,4", "24,4"), ("8,12", "8,3,-1")])
def test_a_target_that_copies_the_batch_does_so_under_allowzero_too(shape: str, target: str) -> None:
    model = parse(f"""(float[{shape}] x) => (float[a,b] flat, float[c] y) {{
        s = Constant <value_ints = [{target}]> () v = Reshape <allowzero = 1> (x, s)
        end = Constant <value_ints = [-1]> () y = Reshape <allowzero = 1> (v, end)
        flat = Flatten (v) }}""")
    x = np.arange(5 * 96, dtype=np.float32).reshape(5, *map(int, shape.split(",")[1:]), -1)[..., 0]

    rebatch(model, 5, {"x": 0})

    assert 0 not in (infer_types(model)["v"].shape or (0,))
    _, y = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(y, x.reshape(-1))


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_an_initial_state_that_holds_the_batch_is_refused(op: str, gates: int) -> None:
    """Shape inference does not compare an initial state with the data."""
    zeros, ones = ", ".join(["0"] * 6), ", ".join(["0.1"] * gates * 6)
    model = parse(f"""(float[2,4,2] x) => (float loss)
        <float[1,{3 * gates},2] W = {{{ones}}}, float[1,{3 * gates},3] R = {{{ones + ", 0.1" * gates * 3}}},
         float[1,2,3] state = {{{zeros}}}> {{
            xt = Transpose <perm = [1, 0, 2]> (x)
            all, last = {op} <hidden_size = 3> (xt, W, R, , , state)
            loss = ReduceMean <keepdims = 0> (last) }}""")
    chosen = ParameterChoice(train=("W", "R"), freeze=("state",))

    with pytest.raises(UnsupportedModel, match="held in a constant") as caught:
        state_objective(model, "loss", 5, choice=chosen)

    assert "symbolic batch" in caught.value.fix


def test_a_hidden_size_that_equals_the_batch_stays() -> None:
    model = parse("""(float[8,6] x, float[8,6] w) => (float[8,8] y) {
        s = Constant <value_ints = [6,8]> () v = Reshape (w, s) y = MatMul (x, v) }""")

    rebatch(model, 4, {"x": 0, "w": None})

    types = infer_types(model)
    assert types["v"].shape == (6, 8)
    assert types["y"].shape == (4, 8)


def test_time_major_batch() -> None:
    model = parse("""(float[5,2,3] x) => (float[10,3] y) {
        s = Constant <value_ints = [10,3]> () y = Reshape (x, s) }""")

    rebatch(model, 7, {"x": 1})

    assert infer_types(model)["y"].shape == (35, 3)


def test_an_inner_batch_is_left_to_the_target_that_adapts() -> None:
    model = parse("""(float[3,8,2] x) => (float[3,8,2] y) {
        s = Constant <value_ints = [24,2]> () flat = Reshape (x, s)
        t = Constant <value_ints = [3,-1,2]> () y = Reshape (flat, t) }""")

    rebatch(model, 5, {"x": 1})

    assert infer_types(model)["y"].shape == (3, 5, 2)


def test_an_inner_batch_that_is_spelled_out_is_refused() -> None:
    model = parse("""(float[3,8,2] x) => (float[3,8,2] y) {
        s = Constant <value_ints = [24,2]> () flat = Reshape (x, s)
        t = Constant <value_ints = [3,8,-1]> () y = Reshape (flat, t) }""")

    with pytest.raises(UnsupportedModel, match="symbolic batch"):
        rebatch(model, 5, {"x": 1})


def test_expand_keeps_the_batch_of_its_input() -> None:
    model = parse("""(float[2,1] x) => (float[2,3] y) {
        s = Constant <value_ints = [2,3]> () y = Expand (x, s) }""")

    rebatch(model, "dynamic", {"x": 0})

    assert infer_types(model)["y"].shape == ("batch", 3)


def test_a_target_behind_computed_sizes_keeps_all_but_the_batch() -> None:
    """ONNX's inference knows no size of v; an export that nobody optimised computes many."""
    model = parse("""(float[6,8] x) => (float[2,3,8] y) {
        n = Shape <start = 1> (x) all = Shape (x) count = ReduceProd (all) m = Div (count, n)
        shape = Concat <axis = 0> (m, n) v = Reshape (x, shape)
        s = Constant <value_ints = [2,3,8]> () y = Reshape (v, s) }""")
    x = np.arange(30, dtype=np.float32).reshape(6, 5)

    rebatch(model, 5, {"x": 1})

    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": x})[0], x.reshape(2, 3, 5))


def test_two_batches_beside_each_other_are_no_copy_of_the_batch() -> None:
    """z is [2 B, 3]: its first axis is not the batch that the target's first size is."""
    model = parse("""(float[4,3] x) => (float[4,2,3] y) {
        z = Concat <axis = 0> (x, x) s = Constant <value_ints = [4,2,3]> () y = Reshape (z, s) }""")
    x = np.arange(15, dtype=np.float32).reshape(5, 3)

    rebatch(model, 5, {"x": 0})

    expected = np.concatenate([x, x]).reshape(5, 2, 3)
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": x})[0], expected)


def test_inputs_that_disagree_are_refused() -> None:
    model = parse("(float[2,3] a, float[4,3] b) => (float[2,3] c) { c = Neg (a) d = Neg (b) }")

    with pytest.raises(BadUsage, match="symbol of each input tells its sample axis"):
        rebatch(model, 5, {"a": 0, "b": 0})


def test_symbols_tell_the_sample_axes_of_inputs_that_disagree() -> None:
    """Steps first in x, samples first in y: refused as numbers, and what the refusal says to do."""
    text = """(float[3,{n},2] x, float[{n},2] y) => (float loss) {{
        first = Constant <value_ints = [0]> () last = ReduceSum <keepdims = 0> (x, first)
        h = MatMul (last, W) d = Sub (h, y) s = Mul (d, d) loss = ReduceMean <keepdims = 0> (s) }}"""
    fixed, open_size = (parse(text.format(n=size)) for size in ("4", "n"))
    rng = np.random.default_rng(0)
    x, y, w = rng.normal(size=(3, 12, 2)), rng.normal(size=(12, 2)), rng.normal(size=(2, 2))
    for model in (fixed, open_size):
        model.graph.initializer.append(numpy_helper.from_array(w.astype(np.float32), "W"))

    with pytest.raises(BadUsage, match=r"first axis.*'x': 3, 'y': 4"):
        state_objective(fixed, "loss", 12)
    objective = state_objective(open_size, "loss", 12)

    feeds = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    (loss,) = ReferenceEvaluator(objective.model).run(["loss"], feeds)
    assert loss == pytest.approx(((x.sum(0) @ w - y) ** 2).mean(), rel=1e-5)
    assert objective.sample_axes == {"x": 1, "y": 0}


def test_a_batch_that_no_output_follows_is_refused() -> None:
    model = parse("""(float[2,3] x) => (float[2] y) {
        n = Constant <value_ints = [2]> ()
        y = ConstantOfShape (n) }""")

    with pytest.raises(UnsupportedModel, match="symbolic batch"):
        rebatch(model, 5, {"x": 0})


def test_a_state_that_holds_the_batch_is_refused() -> None:
    model = parse("""(float[2,3] x) => (float[2,6] y) {
        n = Constant <value_ints = [2,3]> () h = ConstantOfShape (n) y = Concat <axis = 1> (x, h) }""")

    with pytest.raises(UnsupportedModel, match="symbolic batch"):
        rebatch(model, 5, {"x": 0})


@pytest.mark.parametrize("old", ["4", "n"])
@pytest.mark.parametrize("batch", [12, "dynamic"])
def test_any_batch_is_refused_where_one_is(old: str, batch: BatchSize) -> None:
    """Beside a symbol ONNX's inference lets any number stand."""
    model = parse(f"""(float[{old},6] x) => (float loss) {{
        h = MatMul (x, W) middle = Constant <value_ints = [1]> () rows = Unsqueeze (h, middle)
        copies = Constant <value_ints = [1, 4, 1]> () all = Expand (rows, copies)
        first = Constant <value_ints = [0]> () means = ReduceMean <keepdims = 0> (all, first)
        d = Sub (means, x) s = Mul (d, d) loss = ReduceMean <keepdims = 0> (s) }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((6, 6), np.float32), "W"))

    with pytest.raises(UnsupportedModel, match="held in a constant"):
        state_objective(model, "loss", batch)


def test_any_batch_may_be_one_of_pairs() -> None:
    model = parse("""(float[n,6] x) => (float loss) {
        pairs = Constant <value_ints = [2, -1, 3]> () first = Constant <value_ints = [0]> () h = MatMul (x, W)
        views = Reshape (h, pairs) means = ReduceMean <keepdims = 0> (views, first) s = Mul (means, means)
        loss = ReduceMean <keepdims = 0> (s) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((6, 3), np.float32), "W"))

    objective = state_objective(model, "loss", "dynamic")

    assert type_of(objective.model.graph.input[0]).shape == ("batch", 6)


def test_labels_that_number_the_samples_are_refused() -> None:
    """ONNX's inference does not compare labels with scores."""
    model = parse("""(float[4,6] x) => (float loss) {
        labels = Constant <value_ints = [0, 1, 2, 3]> () xt = Transpose (x) scores = MatMul (x, xt)
        loss = SoftmaxCrossEntropyLoss (scores, labels) }""")

    with pytest.raises(UnsupportedModel, match=r"takes \[batch\] beside 'scores' of .*'labels' is of \[4\]"):
        rebatch(model, 12, {"x": 0})


def test_values_stay() -> None:
    model = parse("""(float[2,3,2] x) => (float[2,6] y) {
        s = Constant <value_ints = [2,6]> () y = Reshape (x, s) }""")
    x = np.arange(48, dtype=np.float32).reshape(8, 3, 2)

    rebatch(model, 8, {"x": 0})

    y = ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_array_equal(y, x.reshape(8, 6))
