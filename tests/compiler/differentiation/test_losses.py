"""Losses, and the gradients that they start, against numpy."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import facts_of, train

RNG = np.random.default_rng(3)
W, X = RNG.normal(size=(3, 2)), RNG.normal(size=(4, 3))


def parse(text: str, **initializers: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> test {text}')
    for name, value in initializers.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


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


FLAT_SOFTMAX = "s = Constant <value_ints = [0,2]> () f = Reshape (z, s) p = Softmax (f) y = Unsqueeze (p, a)"


@pytest.mark.parametrize("ending", ["y = Identity (z)", FLAT_SOFTMAX], ids=["logits", "softmax"])
def test_image_classifier_with_trailing_axes_takes_flat_labels(ending: str) -> None:
    text = f"""(double[batch,3] x) => (double[batch,2,1,1] y) {{
        m = MatMul (x, W) a = Constant <value_ints = [2,3]> () z = Unsqueeze (m, a) {ending} }}"""
    model = build_training_graph(parse(text, W=W), loss="softmax_cross_entropy", optimizer=SGD(1.0))
    labels = np.array([0, 1, 1, 0])

    losses, _ = train(model, [{"x": X, "labels": labels}])

    np.testing.assert_allclose(losses[0], numpy_cross_entropy(X @ W, labels), rtol=1e-12)
