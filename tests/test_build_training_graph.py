"""Training graphs, run in plain onnxruntime and held against numpy."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.training.build import build_training_graph
from partc.compiler.training.optimizers import SGD, Adagrad, Momentum, Optimizer
from tests.training_steps import Arrays, facts_of, fetch, initial_variables, train

LIGHT_MODELS = {"light_resnet50": 1e-4, "light_bvlc_alexnet": 1e-4, "light_inception_v1": 1e-3}  # steps
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
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


# ---------------------------------------------------------------- losses


def numpy_cross_entropy(logits: np.ndarray, labels: np.ndarray, ignored: int | None = None) -> float:
    log_sum = np.log(np.exp(logits).sum(-1))
    counted = labels != ignored
    picked = np.take_along_axis(logits, np.where(counted, labels, 0)[..., None], -1)[..., 0]
    return float(((log_sum - picked) * counted).sum() / max(counted.sum(), 1))


@pytest.mark.parametrize(
    "head", ["y = MatMul (x, W)", "z = MatMul (x, W) y = Softmax (z)", "z = MatMul (x, W) y = LogSoftmax (z)"]
)
def test_cross_entropy_trains_through_the_logits(head: str) -> None:
    text = "(double[batch,3] x) => (double[batch,2] y) { " + head + " }"
    model = build_training_graph(parse(text, W=W), loss="softmax_cross_entropy", optimizer=SGD(1.0))
    labels = np.array([0, 1, 1, 0])

    losses, after = train(model, [{"x": X, "labels": labels}])

    probabilities = np.exp(X @ W) / np.exp(X @ W).sum(-1, keepdims=True)
    np.testing.assert_allclose(losses[0], numpy_cross_entropy(X @ W, labels), rtol=1e-12)
    np.testing.assert_allclose(after["W"], W - X.T @ (probabilities - np.eye(2)[labels]) / 4, rtol=1e-12)
    assert facts_of(model)["forward_outputs"] == ["y"]


def test_softmax_loss_of_certain_samples_has_no_infinite_gradient() -> None:
    text = "(float[batch,3] x) => (float[batch,2] y) { z = MatMul (x, W) y = Softmax (z) }"
    model = build_training_graph(
        parse(text, W=W.astype(np.float32)), loss="softmax_cross_entropy", optimizer=SGD(1.0)
    )

    batch = {"x": (1e4 * X).astype(np.float32), "labels": np.array([0, 1, 1, 0])}
    losses, after = train(model, [batch])

    assert np.isfinite(losses[0])
    assert np.isfinite(after["W"]).all()


def test_labels_of_every_token_and_ignored_ones() -> None:
    text = "(double[batch,5,3] x) => (double[batch,5,2] y) { y = MatMul (x, W) }"
    x = RNG.normal(size=(2, 5, 3))
    labels = np.array([[0, 1, -100, 1, 0], [-100, -100, 1, 0, 0]])
    model = build_training_graph(
        parse(text, W=W), loss="softmax_cross_entropy", optimizer=SGD(1.0), ignore_index=-100
    )

    losses, after = train(model, [{"x": x, "labels": labels}])

    np.testing.assert_allclose(losses[0], numpy_cross_entropy(x @ W, labels, -100), rtol=1e-12)
    counted = labels != -100
    probabilities = np.exp(x @ W) / np.exp(x @ W).sum(-1, keepdims=True)
    error = (probabilities - np.eye(2)[np.where(counted, labels, 0)]) * counted[..., None] / counted.sum()
    np.testing.assert_allclose(after["W"], W - np.einsum("bti,btj->ij", x, error), rtol=1e-12)


def test_time_major_labels_have_the_sample_axis_of_the_logits() -> None:
    text = "(double[5,batch,3] x) => (double[5,batch,2] y) { y = MatMul (x, W) }"

    model = build_training_graph(parse(text, W=W), loss="softmax_cross_entropy", optimizer=SGD())

    assert facts_of(model)["sample_axes"] == {"x": 1, "labels": 1}


def test_a_loss_of_the_graph_may_have_one_element_instead_of_none() -> None:
    text = """(double[batch,3] x) => (double[1,1] total) {
        y = MatMul (x, W) z = Mul (y, y) total = ReduceSum (z) }"""
    model = build_training_graph(parse(text, W=W), loss="total", optimizer=SGD(1.0))

    _, after = train(model, [{"x": X}])

    np.testing.assert_allclose(after["W"], W - 2 * X.T @ (X @ W), rtol=1e-12)


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


# ---------------------------------------------------------------- old models, whole


def light_batch(model: onnx.ModelProto, samples: int) -> Arrays:
    state = facts_of(model)["state"]
    image = next(value.name for value in model.graph.input if value.name not in {*state, "labels"})
    rng = np.random.default_rng(0)
    return {
        image: rng.normal(size=(samples, 3, 224, 224)).astype(np.float32),
        "labels": rng.integers(0, 1000, samples),
    }


@pytest.mark.parametrize("batch_size", [4, "dynamic"])
@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_light_models_train_at_another_batch_size(name: str, batch_size: int | str) -> None:
    forward = onnx.load(LIGHT / f"{name}.onnx")
    model = build_training_graph(
        forward,
        loss="softmax_cross_entropy",
        optimizer=SGD(LIGHT_MODELS[name]),
        batch_size=batch_size,
        reinit=1,
    )

    steps = 3 if batch_size == 4 else 1
    losses, _ = train(model, [light_batch(model, 4 if batch_size == 4 else 2)] * steps)

    assert np.isfinite(losses).all()
    assert losses == sorted(losses, reverse=True)
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


def test_light_resnet50_as_it_is_knows_its_parameters() -> None:
    model = build_training_graph(
        onnx.load(LIGHT / "light_resnet50.onnx"), loss="softmax_cross_entropy", optimizer=SGD()
    )

    gradients = facts_of(model)["gradients"]

    assert len(gradients) == 53 * 3 + 2  # convolutions with scale and bias, and the dense layer
    assert not any("riv" in name or "_rm_" in name for name in gradients)


def test_building_twice_gives_equal_bytes() -> None:
    forward = onnx.load(LIGHT / "light_inception_v1.onnx")
    built = [
        build_training_graph(
            forward, loss="softmax_cross_entropy", optimizer=Momentum(), batch_size=4, reinit=1
        ).SerializeToString(deterministic=True)
        for _ in range(2)
    ]

    assert built[0] == built[1]


FLAT_SOFTMAX = "s = Constant <value_ints = [0,2]> () f = Reshape (z, s) p = Softmax (f) y = Unsqueeze (p, a)"


@pytest.mark.parametrize("ending", ["y = Identity (z)", FLAT_SOFTMAX], ids=["logits", "softmax"])
def test_image_classifier_with_trailing_axes_takes_flat_labels(ending: str) -> None:
    text = f"""(double[batch,3] x) => (double[batch,2,1,1] y) {{
        m = MatMul (x, W) a = Constant <value_ints = [2,3]> () z = Unsqueeze (m, a) {ending} }}"""
    model = build_training_graph(parse(text, W=W), loss="softmax_cross_entropy", optimizer=SGD(1.0))
    labels = np.array([0, 1, 1, 0])

    losses, _ = train(model, [{"x": X, "labels": labels}])

    np.testing.assert_allclose(losses[0], numpy_cross_entropy(X @ W, labels), rtol=1e-12)
