"""LSTM layers on top of each other, each step of each layer by itself."""

import onnx
from onnx import TensorProto

from partc.models.graph_builder import GraphBuilder, ModelOptions
from partc.models.layers import lstm_cell, matrix, zero_state


def stacked_lstm(layers: int, steps: int, cells: int, vocabulary: int, batch: int) -> onnx.ModelProto:
    """Return the forward graph of `x` and `y`, int64 [batch, steps]; its loss is the mean over all words."""
    b = GraphBuilder("stacked_lstm", ModelOptions(batch=batch))
    given = (b.input(name, TensorProto.INT64, [batch, steps]) for name in ("x", "y"))
    words, labels = (b.split(b.op("Transpose", name, perm=[1, 0]), steps, axis=0) for name in given)
    table = b.uniform("embedding", (vocabulary, cells), limit=0.1)
    weights = [
        (matrix(b, f"layer{n}.input", cells, 4 * cells), matrix(b, f"layer{n}.recurrent", cells, 4 * cells))
        for n in range(layers)
    ]
    logits = matrix(b, "logits", cells, vocabulary)
    states = [(zero_state(b, words[0], cells), zero_state(b, words[0], cells)) for _ in range(layers)]
    losses = []
    for word, label in zip(words, labels, strict=True):
        x = b.op("Gather", table, b.op("Squeeze", word, b.integers(0)), axis=0)
        for number, (from_input, recurrent) in enumerate(weights):
            cell, hidden = states[number]
            gates = b.op("Add", b.op("MatMul", x, from_input), b.op("MatMul", hidden, recurrent))
            states[number] = lstm_cell(b, gates, cell)
            x = states[number][1]
        label = b.op("Squeeze", label, b.integers(0))
        losses.append(b.op("SoftmaxCrossEntropyLoss", b.op("MatMul", x, logits), label))
    b.op("Mean", *losses, name="loss")
    b.output("loss", [])
    return b.model()
