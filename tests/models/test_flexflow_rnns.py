"""FlexFlow's recurrent networks, held against loops over words in numpy."""

import numpy as np
import pytest

from partc.models.catalogue import build_model, count_parameters
from tests.builders.graphs.forward_models import run_with_parameters

BATCH, STEPS, EMBEDDING, CELLS = 3, 4, 5, 6
SIZES = {"batch": BATCH, "steps": STEPS, "embedding": EMBEDDING, "cells": CELLS, "dtype": "float64"}

Weights = dict[str, np.ndarray]
State = tuple[np.ndarray, np.ndarray]


def words(seed: int, high: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, (BATCH, STEPS))


def sigmoid(v: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-v))


def softmax(v: np.ndarray) -> np.ndarray:
    e = np.exp(v - v.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def lstm(w: Weights, name: str, inputs: list[np.ndarray], state: State) -> tuple[list[np.ndarray], State]:
    """Return a layer's outputs [B, H], and its last state."""
    h, c = state
    outputs = []
    for x in inputs:
        gates = x @ w[f"{name}.input_weight"] + h @ w[f"{name}.recurrent_weight"] + w[f"{name}.bias"]
        i, j, f, o = np.split(gates, 4, axis=1)
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(j)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return outputs, (h, c)


def layers(
    w: Weights, name: str, inputs: list[np.ndarray], states: list[State]
) -> tuple[list[np.ndarray], list[State]]:
    last = []
    for number, state in enumerate(states):
        inputs, after = lstm(w, f"{name}{number}", inputs, state)
        last.append(after)
    return inputs, last


def zeros(count: int) -> list[State]:
    return [(np.zeros((BATCH, CELLS)), np.zeros((BATCH, CELLS)))] * count


def embedded(table: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    return [table[ids[:, t]] for t in range(STEPS)]


def cross_entropy(logits: list[np.ndarray], labels: np.ndarray) -> float:
    return float(
        np.mean(
            [
                -np.log(softmax(of_step)[sample, labels[sample, t]])
                for t, of_step in enumerate(logits)
                for sample in range(BATCH)
            ]
        )
    )


def test_the_classifier_reads_the_last_state_of_its_top_layer() -> None:
    model = build_model("rnntc", **SIZES, vocab=20, layers=3, classes=4)
    x = words(0, 20)

    logits, w = run_with_parameters(model, "logits", {"x": x})

    outputs, _ = layers(w, "layer", embedded(w["embedding"], x), zeros(3))
    np.testing.assert_allclose(logits, outputs[-1] @ w["head.weight"] + w["head.bias"], rtol=1e-12)


def test_the_language_models_loss_is_the_mean_over_words() -> None:
    model = build_model("rnnlm", **SIZES, vocab=20)
    x, y = words(0, 20), words(1, 20)

    loss, w = run_with_parameters(model, "loss", {"x": x, "y": y})

    outputs, _ = layers(w, "layer", embedded(w["embedding"], x), zeros(2))
    logits = [h @ w["output.weight"] + w["output.bias"] for h in outputs]
    np.testing.assert_allclose(loss, cross_entropy(logits, y), rtol=1e-12)


def test_the_translation_attends_to_the_source_after_each_target_word() -> None:
    model = build_model("flexflow_nmt", **SIZES, source_vocab=20, target_vocab=18)
    feeds = {"source": words(0, 20), "target": words(1, 18), "labels": words(2, 18)}

    loss, w = run_with_parameters(model, "loss", feeds)

    memory, last = layers(w, "encoder", embedded(w["source.embedding"], feeds["source"]), zeros(2))
    outputs, _ = layers(w, "decoder", embedded(w["target.embedding"], feeds["target"]), last)
    keys = np.stack([h @ w["attention.weight"] for h in memory], axis=1)  # [B, S, H]
    logits = []
    for h in outputs:
        shares = softmax(np.einsum("bh,bsh->bs", h, keys))
        both = np.concatenate([h, np.einsum("bs,bsh->bh", shares, keys)], axis=1)
        logits.append(np.tanh(both @ w["attention.output_weight"]) @ w["output.weight"])
    np.testing.assert_allclose(loss, cross_entropy(logits, feeds["labels"]), rtol=1e-12)


def lstm_parameters(width: int, cells: int) -> int:
    return 4 * cells * (width + cells + 1)


@pytest.mark.parametrize(
    ("name", "sparse", "dense"),
    [
        # A table of 18,765 words, four layers, two classes.
        ("rnntc", 18_765 * 1024, 4 * lstm_parameters(1024, 1024) + 1024 * 2 + 2),
        # 10,000 words in and out, two layers.
        ("rnnlm", 10_000 * 2048, 2 * lstm_parameters(2048, 2048) + 2048 * 10_000 + 10_000),
        # 32,000 pieces a side; 2 + 2 layers; the keys', the attention's and the output's weight.
        (
            "flexflow_nmt",
            2 * 32_000 * 1024,
            4 * lstm_parameters(1024, 1024) + 1024 * 1024 + 2 * 1024 * 1024 + 1024 * 32_000,
        ),
    ],
)
def test_parameters_number_as_the_sizes_say(name: str, sparse: int, dense: int) -> None:
    counted = count_parameters(build_model(name))

    assert (counted.sparse, counted.dense) == (sparse, dense)


@pytest.mark.parametrize("name", ["rnntc", "rnnlm", "flexflow_nmt"])
def test_steps_share_their_layers_weights_and_are_operators_of_their_own(name: str) -> None:
    model = build_model(name)

    readers = [node for node in model.graph.node if any("recurrent_weight" in i for i in node.input)]

    recurrent = {next(i for i in node.input if "recurrent_weight" in i) for node in readers}
    assert len(readers) == 40 * len(recurrent)
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [64, 40]
