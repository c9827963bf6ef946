"""Training graphs, run in plain onnxruntime and held against numpy."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum, Optimizer
from tests.checks.training_steps import facts_of, fetch, initial_variables, session, train

RNG = np.random.default_rng(3)


def parse(text: str, **initializers: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> test {text}')
    for name, value in initializers.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


DENSE = "(double[batch,3] x) => (double[batch,2] y) { y = MatMul (x, W) }"
W = RNG.normal(size=(3, 2))
X, TARGETS = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 2))


def mse_gradient(w: np.ndarray) -> np.ndarray:
    return 2 * X.T @ (X @ w - TARGETS) / TARGETS.size


# ---------------------------------------------------------------- optimizers


def numpy_sgd(w: np.ndarray, steps: int, gradient=mse_gradient) -> np.ndarray:
    for _ in range(steps):
        w = w - 0.3 * gradient(w)
    return w


def numpy_momentum(w: np.ndarray, steps: int, nesterov: bool = False) -> np.ndarray:
    v = np.zeros_like(w)
    for _ in range(steps):
        g = mse_gradient(w)
        v = 0.8 * v + g
        w = w - 0.3 * (g + 0.8 * v if nesterov else v)
    return w


def numpy_adagrad(w: np.ndarray, steps: int) -> np.ndarray:
    a = np.full_like(w, 0.1)
    for _ in range(steps):
        g = mse_gradient(w)
        a = a + g * g
        w = w - 0.3 * g / (np.sqrt(a) + 1e-10)
    return w


@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        (SGD(0.3), numpy_sgd),
        (Momentum(0.3, 0.8), numpy_momentum),
        (Momentum(0.3, 0.8, nesterov=True), lambda w, steps: numpy_momentum(w, steps, nesterov=True)),
        (Adagrad(0.3), numpy_adagrad),
    ],
    ids=["sgd", "momentum", "nesterov", "adagrad"],
)
def test_dense_updates_equal_numpy(optimizer: Optimizer, reference) -> None:
    model = build_training_graph(parse(DENSE, W=W), loss="mse", optimizer=optimizer)

    _, after = train(model, [{"x": X, "targets": TARGETS}] * 3)

    np.testing.assert_allclose(after["W"], reference(W, 3), rtol=1e-12)


def test_slots_start_as_stated_and_are_named_after_their_parameter() -> None:
    model = build_training_graph(parse(DENSE, W=W), loss="mse", optimizer=Adagrad(0.3))

    start = initial_variables(model)

    np.testing.assert_array_equal(start["W.accumulator"], np.full((3, 2), 0.1))
    np.testing.assert_array_equal(start["W"], W)


def test_learning_rate_may_be_fed() -> None:
    model = build_training_graph(parse(DENSE, W=W), loss="mse", optimizer=SGD("fed"))

    batch = {"x": X, "targets": TARGETS, "learning_rate": np.array(0.5, np.float32)}
    _, after = train(model, [batch])

    np.testing.assert_allclose(after["W"], W - 0.5 * mse_gradient(W))
    assert facts_of(model)["sample_axes"] == {"x": 0, "targets": 0, "learning_rate": None}


# ---------------------------------------------------------------- sparse gradients

TABLE = RNG.normal(size=(6, 2))
IDS = np.array([[1, 4, 1], [0, 4, 4]])
LOOKUP = """(int64[batch,3] x) => (double[batch,3,2] y) { y = Gather (E, x) }"""
LOOKUP_TARGETS = RNG.normal(size=(2, 3, 2))


def table_gradient(table: np.ndarray) -> np.ndarray:
    gradient = np.zeros_like(table)
    np.add.at(gradient, IDS, 2 * (table[IDS] - LOOKUP_TARGETS) / LOOKUP_TARGETS.size)
    return gradient


@pytest.mark.parametrize("optimizer", [SGD(0.3), Momentum(0.3, 0.8), Adagrad(0.3)])
def test_sparse_update_equals_the_dense_one(optimizer: Optimizer) -> None:
    sparse = build_training_graph(parse(LOOKUP, E=TABLE), loss="mse", optimizer=optimizer)
    tied = LOOKUP.replace("y = Gather (E, x)", "F = Identity (E) y = Gather (F, x)")
    dense = build_training_graph(parse(tied, E=TABLE), loss="mse", optimizer=optimizer)

    batches = [{"x": IDS, "targets": LOOKUP_TARGETS}] * 3
    (_, after), (_, expected) = train(sparse, batches), train(dense, batches)

    assert set(facts_of(sparse)["gradients"]["E"]) == {"ids", "rows"}
    assert set(facts_of(dense)["gradients"]["E"]) == {"dense"}
    for name in expected:
        np.testing.assert_allclose(after[name], expected[name], rtol=1e-12)


def test_sparse_sgd_equals_numpy_with_duplicate_ids() -> None:
    model = build_training_graph(parse(LOOKUP, E=TABLE), loss="mse", optimizer=SGD(0.3))

    _, after = train(model, [{"x": IDS, "targets": LOOKUP_TARGETS}])

    np.testing.assert_allclose(after["E"], TABLE - 0.3 * table_gradient(TABLE), rtol=1e-12)


@pytest.mark.parametrize("optimizer", [Momentum(0.3, 0.8), Adagrad(0.3)])
def test_an_id_from_the_end_is_the_same_row(optimizer: Optimizer) -> None:
    model = build_training_graph(parse(LOOKUP, E=TABLE), loss="mse", optimizer=optimizer)
    from_end = np.where(np.arange(IDS.size).reshape(IDS.shape) % 2, IDS, IDS - len(TABLE))

    _, after = train(model, [{"x": from_end, "targets": LOOKUP_TARGETS}] * 2)
    _, expected = train(model, [{"x": IDS, "targets": LOOKUP_TARGETS}] * 2)

    for name in expected:
        np.testing.assert_array_equal(after[name], expected[name])


def test_two_gathers_on_one_table_are_concatenated() -> None:
    text = """(int64[batch] a, int64[batch] b) => (double[batch,2] y) {
        p = Gather (E, a) q = Gather (E, b) y = Mul (p, q) }"""
    model = build_training_graph(parse(text, E=TABLE), loss="mse", optimizer=SGD(0.3))
    a, b, targets = np.array([1, 2, 2]), np.array([2, 5, 2]), RNG.normal(size=(3, 2))

    _, after = train(model, [{"a": a, "b": b, "targets": targets}])

    error = 2 * (TABLE[a] * TABLE[b] - targets) / targets.size
    expected = TABLE.copy()
    np.subtract.at(expected, a, 0.3 * error * TABLE[b])
    np.subtract.at(expected, b, 0.3 * error * TABLE[a])
    np.testing.assert_allclose(after["E"], expected, rtol=1e-12)
    gradient = facts_of(model)["gradients"]["E"]
    makers = {name: node for node in model.graph.node for name in node.output}
    assert makers[gradient["ids"]].op_type == makers[gradient["rows"]].op_type == "Concat"


def test_tied_embedding_has_a_dense_gradient() -> None:
    text = """(int64[batch] x) => (double[batch,6] y) {
        h = Gather (E, x) T = Transpose <perm = [1,0]> (E) y = MatMul (h, T) }"""
    model = build_training_graph(parse(text, E=TABLE), loss="mse", optimizer=SGD(0.3))
    x, targets = np.array([1, 5, 1]), RNG.normal(size=(3, 6))

    _, after = train(model, [{"x": x, "targets": targets}])

    error = 2 * (TABLE[x] @ TABLE.T - targets) / targets.size
    gradient = error.T @ TABLE[x]
    np.add.at(gradient, x, error @ TABLE)
    np.testing.assert_allclose(after["E"], TABLE - 0.3 * gradient, rtol=1e-12)
    assert set(facts_of(model)["gradients"]["E"]) == {"dense"}


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_clipping_by_global_norm_counts_sparse_gradients_per_id(clip: float) -> None:
    text = """(int64[batch,3] x) => (double[batch,3,2] y) { h = Gather (E, x) y = MatMul (h, V) }"""
    V = RNG.normal(size=(2, 2))
    model = build_training_graph(
        parse(text, E=TABLE, V=V), loss="mse", optimizer=SGD(1.0), clip_global_norm=clip
    )

    _, after = train(model, [{"x": IDS, "targets": LOOKUP_TARGETS}])

    error = 2 * (TABLE[IDS] @ V - LOOKUP_TARGETS) / LOOKUP_TARGETS.size
    dV = np.einsum("bti,btj->ij", TABLE[IDS], error)
    dE = np.zeros_like(TABLE)
    np.add.at(dE, IDS, error @ V.T)
    scale = clip / max(clip, np.sqrt((dV**2).sum() + (dE**2).sum()))
    np.testing.assert_allclose(after["V"], V - scale * dV, rtol=1e-12)
    np.testing.assert_allclose(after["E"], TABLE - scale * dE, rtol=1e-12)


# ---------------------------------------------------------------- state and dropout


def test_running_statistics_of_batches_are_variables() -> None:
    text = """(double[batch,3] x) => (double[batch,3] y) {
        y, m2, v2 = BatchNormalization <training_mode = 1, momentum = 0.75> (x, s, b, m, v) }"""
    s, b, m, v = RNG.normal(size=(4, 3))
    model = build_training_graph(parse(text, s=s, b=b, m=m, v=v), loss="mse", optimizer=SGD(0.1))

    _, after = train(model, [{"x": X, "targets": X}])

    np.testing.assert_allclose(after["m"], 0.75 * m + 0.25 * X.mean(0), rtol=1e-12)
    np.testing.assert_allclose(after["v"], 0.75 * v + 0.25 * X.var(0), rtol=1e-12)
    assert facts_of(model)["gradients"].keys() == {"s", "b"}


def test_training_dropout_passes_the_gradient_where_its_mask_is_true() -> None:
    text = """(float[64,3] x) => (float[64,2] y) {
        h = MatMul (x, W) r = Constant <value = float {0.25}> () t = Constant <value = bool {1}> ()
        y, mask = Dropout <seed = 5> (h, r, t) }"""
    x = RNG.normal(size=(64, 3)).astype(np.float32)
    model = parse(text, W=W.astype(np.float32))
    model.graph.output.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [64, 2]))
    model.graph.node.append(helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("total", TensorProto.FLOAT, []))
    step = build_training_graph(model, loss="total", optimizer=SGD(1.0))

    mask = fetch(step, "mask", {"x": x})
    change = fetch(step, "W_next", {"x": x}) - W

    assert 0 < mask.mean() < 1
    assert np.isfinite(change).all()
    np.testing.assert_allclose(fetch(step, facts_of(step)["gradients"]["W"]["dense"], {"x": x}).shape, (3, 2))


def test_inference_dropout_disappears() -> None:
    text = "(double[batch,3] x) => (double[batch,2] y) { d = Dropout (x) y = MatMul (d, W) }"

    model = build_training_graph(parse(text, W=W), loss="mse", optimizer=SGD())

    assert "Dropout" not in {node.op_type for node in model.graph.node}


# ---------------------------------------------------------------- functions


@pytest.mark.parametrize(
    "function",
    [
        "act <k: float = 0.25> (x) => (y) { y = Elu <alpha: float = @k> (x) }",
        "act <k: float = 3.0> (x) => (y) { c = Constant <value_float: float = @k> () y = Mul (x, c) }",
    ],
    ids=["Elu", "Constant"],
)
def test_a_function_has_the_defaults_of_what_its_call_leaves_out(function: str) -> None:
    forward = parse(
        "(float[4,3] x) => (float loss) { h = MatMul (x, W) a = my.act (h) s = Mul (a, a) "
        f'loss = ReduceMean <keepdims = 0> (s) }} <domain: "my", opset_import: ["": 21]> {function}',
        W=W.astype(np.float32),
    )
    forward.opset_import.add(domain="my", version=1)
    batch = {"x": X.astype(np.float32)}

    model = build_training_graph(forward, loss="loss", optimizer=SGD(0.1))

    (loss,), _ = train(model, [batch])
    (expected,) = session(forward).run(None, batch)
    assert loss == pytest.approx(float(expected), rel=1e-6)
