import numpy as np

from partc.models.lm import LmOptions, lm
from tests.builders.graphs.forward_models import parameter_sizes, run_with_parameters

SMALL = {"vocab": 40, "embedding": 4, "cells": 6, "projection": 5, "steps": 3, "samples": 8}
BATCH = 7


def words(seed: int, **options: bool) -> dict[str, np.ndarray]:
    """Draw a batch, [batch, steps], whose labels are often among the negatives."""
    generator = np.random.default_rng(seed)
    feeds = {
        "x": generator.integers(0, 40, (BATCH, 3)),
        "y": generator.integers(0, 10, (BATCH, 3)),
        "sampled": np.array([0, 1, 1, 3, 8, 20, 30, 39]),
    }
    if options.get("weights"):
        feeds["weights"] = generator.integers(0, 2, (BATCH, 3)).astype(np.float64)
    return feeds


def sigmoid(v: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-v))


def lstm(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return the projected states [steps, batch, projection]."""
    h, c = np.zeros((len(x), 5)), np.zeros((len(x), 6))
    states = []
    for t in range(x.shape[1]):
        gates = w["embedding"][x[:, t]] @ w["lstm.input_weight"] + h @ w["lstm.recurrent_weight"]
        i, j, f, o = np.split(gates + w["lstm.bias"], 4, axis=1)
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(j)
        h = (sigmoid(o) * np.tanh(c)) @ w["lstm.projection_weight"]
        states.append(h)
    return np.stack(states)


def word_losses(w: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return the loss of each word [steps, batch], one word at a time."""
    states, sampled = lstm(w, feeds["x"]), feeds["sampled"]

    def logit(h: np.ndarray, word: int) -> float:
        probability = np.log((word + 2) / (word + 1)) / np.log(41)
        return float(h @ w["softmax.weight"][word] + w["softmax.bias"][word] - np.log(8 * probability))

    losses = np.zeros(states.shape[:2])
    for t, b in np.ndindex(losses.shape):
        label = feeds["y"][b, t]
        own = logit(states[t, b], label)
        others = [logit(states[t, b], word) for word in sampled if word != label]
        losses[t, b] = np.log(np.sum(np.exp([own, *others]))) - own
    return losses


def test_loss_equals_a_word_by_word_computation() -> None:
    feeds = words(seed=0)

    loss, w = run_with_parameters(lm(LmOptions(**SMALL, dtype="float64")), "loss", feeds)

    np.testing.assert_allclose(loss, word_losses(w, feeds).mean(), rtol=1e-12)


def test_weighted_loss_is_divided_by_the_sum_of_weights() -> None:
    feeds = words(seed=1, weights=True)

    loss, w = run_with_parameters(lm(LmOptions(**SMALL, dtype="float64", weights=True)), "loss", feeds)

    np.testing.assert_allclose(
        loss, np.average(word_losses(w, feeds).T, weights=feeds["weights"]), rtol=1e-12
    )


def test_time_major_inputs_give_the_same_loss() -> None:
    feeds = words(seed=2)
    turned = {"x": feeds["x"].T, "y": feeds["y"].T, "sampled": feeds["sampled"]}

    loss, _ = run_with_parameters(lm(LmOptions(**SMALL, dtype="float64")), "loss", feeds)
    same, _ = run_with_parameters(lm(LmOptions(**SMALL, dtype="float64", time_major=True)), "loss", turned)

    np.testing.assert_allclose(loss, same, rtol=1e-12)


def test_float32_stays_close_to_float64() -> None:
    feeds = words(seed=3)

    loss, w = run_with_parameters(lm(LmOptions(**SMALL)), "loss", feeds)

    np.testing.assert_allclose(loss, word_losses(w, feeds).mean(), rtol=1e-5)


def test_no_node_knows_the_batch() -> None:
    open_batch, of_thirteen = lm(LmOptions(**SMALL)), lm(LmOptions(**SMALL, batch=13))

    assert list(open_batch.graph.node) == list(of_thirteen.graph.node)


def test_the_tables_are_read_by_gather_alone() -> None:
    model = lm(LmOptions(**SMALL))

    readers = {
        table: {node.op_type for node in model.graph.node if table in node.input}
        for table in ("embedding", "softmax.weight", "softmax.bias")
    }

    assert set(map(frozenset, readers.values())) == {frozenset({"Gather"})}


def test_parameters_number_as_in_the_paper() -> None:
    """Parallax, table 1: 9 million dense; 814 million sparse, at a vocabulary it rounds to 800,000."""
    model = lm(LmOptions())

    sizes = parameter_sizes(model)

    sparse = sizes["embedding"] + sizes["softmax.weight"] + sizes["softmax.bias"]
    assert sum(sizes.values()) - sparse == 9_445_376
    assert sparse == 820_000_000
    assert model.ByteSize() < 50_000
