"""The translation model of the Parallax paper (arXiv:1808.02621, section 7), after Luong's NMT tutorial.

    source ─ Gather ─┬─ LSTM, LSTM  (forwards)  ─┬─ Concat ─ MatMul ─> keys [B, S, H]
                     └─ LSTM, LSTM  (backwards) ─┘                       │
    target ─ Gather ─ [word, context] ─ LSTM, LSTM ─ attention <─────────┘
                             ^ context of the step before ──┘
    logits = (state + context) W [H, V]      loss = mean cross-entropy over target words

Four layers of 1,024 cells from source to target: two bidirectional ones that encode, two that decode.
With embeddings of 1,024 and WMT's 36,548 word pieces that makes the paper's table 1: 2 x 36,548 x 1,024
= 75 million sparse parameters, and 94 million dense ones: six LSTMs and the context's weight (54.6), the
keys' weight (2.1), the output's (37.4). At 27 pieces a sentence a batch of 128 reads 6,912 rows at most,
which are 7.1 million parameters: the paper's subset of 7.

Letters: B batch, S source steps, T target steps, E embedded width, H cells, V vocabulary. Sources:
Luong et al., arXiv:1508.04025, section 3.1 (attention, "general") and 3.3 (input feeding).
"""

from typing import Annotated

import onnx
from msgspec import Meta

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size
from partc.models.layers import matrix
from partc.models.recurrent import (
    CellState,
    attend,
    each_step,
    keys_of,
    lstm_step,
    stack,
    time_major,
    zero_state,
)

TABLE_LIMIT = 0.1


class NmtOptions(ModelOptions, frozen=True, kw_only=True):
    """Sizes of the model; the defaults are the paper's."""

    source_vocab: Annotated[Size, Meta(description="word pieces of the source")] = 36_548
    target_vocab: Annotated[Size, Meta(description="word pieces of the target")] = 36_548
    embedding: Annotated[Size, Meta(description="width of an embedded piece")] = 1024
    cells: Annotated[Size, Meta(description="LSTM cells of every layer and direction")] = 1024
    encoder_layers: Annotated[Size, Meta(description="bidirectional layers")] = 2
    decoder_layers: Annotated[Size, Meta(description="layers that write the target")] = 2
    source_steps: Annotated[Size, Meta(description="pieces of a source sentence")] = 27
    target_steps: Annotated[Size, Meta(description="pieces of a target sentence")] = 27


def nmt(options: NmtOptions) -> onnx.ModelProto:
    """Build the forward graph: int64 source [batch, S], target and labels [batch, T] to a scalar loss."""
    b = GraphBuilder("nmt", options)
    source = time_major(b, "source", options.source_steps, options)
    target = time_major(b, "target", options.target_steps, options)
    labels = time_major(b, "labels", options.target_steps, options)

    keys, states = _encode(b, source, options)
    written = _decode(b, target, keys, states, options)
    logits = b.op("MatMul", written, matrix(b, "output.weight", options.cells, options.target_vocab))
    flat = b.op("Reshape", labels, b.integers(-1))
    b.op("SoftmaxCrossEntropyLoss", logits, flat, name="loss", reduction="mean")
    b.output("loss", [])
    return b.model()


def _embed(b: GraphBuilder, name: str, words: str, vocab: int, width: int) -> str:
    """Return the rows of words int64[T, B], [T*B, E]."""
    table = b.uniform(f"{name}.embedding", (vocab, width), limit=TABLE_LIMIT)
    return b.op("Reshape", b.op("Gather", table, words, axis=0), b.integers(-1, width))


# ---------------------------------------------------------------- encoder


def _encode(b: GraphBuilder, source: str, options: NmtOptions) -> tuple[str, list[CellState]]:
    """Return keys [B, S, H] for attention, and each forward layer's last state."""
    embedded = _embed(b, "source", source, options.source_vocab, options.embedding)
    outputs: list[str] = []
    states: list[CellState] = []
    for direction in ("forwards", "backwards"):
        hidden, width = embedded, options.embedding
        for layer in range(options.encoder_layers):
            name = f"encoder.{direction}{layer}"
            hidden, state = _layer(b, name, hidden, width, source, direction == "backwards", options)
            width = options.cells
            if direction == "forwards":
                states.append(state)
        outputs.append(hidden)
    memory = b.op("Concat", *outputs, axis=1)
    return keys_of(b, memory, 2 * options.cells, options.source_steps, options.cells), states


def _layer(
    b: GraphBuilder, name: str, inputs: str, width: int, words: str, reverse: bool, options: NmtOptions
) -> tuple[str, CellState]:
    """Return one layer's outputs [S*B, H] for inputs [S*B, width], and its last state."""
    pieces = _input_gates(b, name, inputs, width, options.source_steps, options)
    recurrent = matrix(b, f"{name}.recurrent_weight", options.cells, 4 * options.cells)
    state = zero_state(b, words, options.cells), zero_state(b, words, options.cells)
    states: list[str] = []
    for piece in reversed(pieces) if reverse else pieces:
        state = lstm_step(b, piece, recurrent, state)
        states.append(state[0])
    return stack(b, states[::-1] if reverse else states), state


def _input_gates(
    b: GraphBuilder, name: str, inputs: str, width: int, steps: int, options: NmtOptions
) -> list[str]:
    """Return what the inputs alone contribute to the gates, [B, 4H] a step: one product for all."""
    weight = matrix(b, f"{name}.input_weight", width, 4 * options.cells)
    bias = b.filled(f"{name}.bias", (4 * options.cells,), 0.0)
    gates = b.op("Add", b.op("MatMul", inputs, weight), bias)
    apart = b.op("Reshape", gates, b.integers(steps, -1, 4 * options.cells))
    return each_step(b, apart, steps)


# ---------------------------------------------------------------- decoder


def _decode(b: GraphBuilder, target: str, keys: str, states: list[CellState], options: NmtOptions) -> str:
    """Return what the output layer reads after each step, [T*B, H]."""
    embedded = _embed(b, "target", target, options.target_vocab, options.embedding)
    cells = options.cells
    pieces = _input_gates(b, "decoder0", embedded, options.embedding, options.target_steps, options)
    of_context = matrix(b, "decoder0.context_weight", cells, 4 * cells)
    recurrent = [
        matrix(b, f"decoder{layer}.recurrent_weight", cells, 4 * cells)
        for layer in range(options.decoder_layers)
    ]
    between = [
        (
            matrix(b, f"decoder{layer}.input_weight", cells, 4 * cells),
            b.filled(f"decoder{layer}.bias", (4 * cells,), 0.0),
        )
        for layer in range(1, options.decoder_layers)
    ]
    layers = [states[min(layer, len(states) - 1)] for layer in range(options.decoder_layers)]
    columns = b.op("Transpose", keys, perm=[0, 2, 1])
    context = zero_state(b, target, cells)
    written: list[str] = []
    for piece in pieces:
        gates = b.op("Add", piece, b.op("MatMul", context, of_context))
        for layer, state in enumerate(layers):
            layers[layer] = lstm_step(b, gates, recurrent[layer], state)
            if layer < len(between):
                weight, bias = between[layer]
                gates = b.op("Add", b.op("MatMul", layers[layer][0], weight), bias)
        context = attend(b, layers[-1][0], keys, columns)
        written.append(b.op("Add", layers[-1][0], context))
    return stack(b, written)
