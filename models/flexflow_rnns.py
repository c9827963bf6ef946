"""The recurrent networks of the FlexFlow paper (arXiv:1807.05358, section 8.1 and table 3).

    rnntc   words ─ Gather ─ LSTM x 4 ─ last state ─ dense ──────────────> logits [batch, classes]
    rnnlm   words ─ Gather ─ LSTM x 2 ─ every state ─ dense ─────────────> mean cross-entropy
    flexflow_nmt
            source ─ Gather ─ LSTM x 2 ─ states ─────────> keys [B, S, H] ┐
                              └ last states ┐                             │
            target ─ Gather ─ LSTM x 2 ─────┴─ state ─ attention <────────┘
                                                 └─ Tanh([state, context] W) ─ dense ─> mean cross-entropy

Every step of every layer is an operator by itself, as in the paper's figure 14, so that each may have devices
of its own; the steps of a layer share its weights. 40 steps and a batch of 64 are the paper's.
It does not state vocabularies, nor how wide words are embedded. Here:

    rnntc    18,765 words and two classes: the movie reviews of Kim, arXiv:1408.5882, table 1 (MR)
    rnnlm    10,000 words: Penn Treebank as in Zaremba et al., arXiv:1409.2329, section 4.1
    nmt      32,000 pieces a side: Wu et al., arXiv:1609.08144, section 4.1
    all      words as wide as a layer

Attention reads the top layer's state and is not fed back: Luong et al., arXiv:1508.04025, section 3.1,
"general", and equation 5. Dropout is left out. Letters: B batch, S source steps, H cells.
"""

from typing import Annotated

import onnx
from msgspec import Meta

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size
from partc.models.layers import dense, matrix
from partc.models.recurrent import (
    LstmWeights,
    attend,
    embed_each_step,
    keys_of,
    lstm_weights,
    mean_word_loss,
    stack,
    time_major,
    unroll,
    zero_states,
)

TABLE_LIMIT = 0.1  # Zaremba et al.: 0.05 and 0.04


class RecurrentOptions(ModelOptions, frozen=True, kw_only=True):
    """What the three have in common."""

    batch: Annotated[Size | None, Meta(description="samples per step; none leaves it open")] = 64
    steps: Annotated[Size, Meta(description="words of a sample, one step of every layer each")] = 40


class RnntcOptions(RecurrentOptions, frozen=True, kw_only=True):
    """Sizes of the text classifier; the defaults are the paper's."""

    vocab: Annotated[Size, Meta(description="words that have a row in the table")] = 18_765
    embedding: Annotated[Size, Meta(description="width of an embedded word")] = 1024
    cells: Annotated[Size, Meta(description="LSTM cells of every layer")] = 1024
    layers: Annotated[Size, Meta(description="LSTM layers")] = 4
    classes: Annotated[Size, Meta(description="classes")] = 2


class RnnlmOptions(RecurrentOptions, frozen=True, kw_only=True):
    """Sizes of the language model; the defaults are the paper's."""

    vocab: Annotated[Size, Meta(description="words that have a row in the table")] = 10_000
    embedding: Annotated[Size, Meta(description="width of an embedded word")] = 2048
    cells: Annotated[Size, Meta(description="LSTM cells of every layer")] = 2048
    layers: Annotated[Size, Meta(description="LSTM layers")] = 2


class FlexflowNmtOptions(RecurrentOptions, frozen=True, kw_only=True):
    """Sizes of the translation model; the defaults are the paper's."""

    steps: Annotated[Size, Meta(description="pieces of a source sentence, and of a target sentence")] = 40
    source_vocab: Annotated[Size, Meta(description="word pieces of the source")] = 32_000
    target_vocab: Annotated[Size, Meta(description="word pieces of the target")] = 32_000
    embedding: Annotated[Size, Meta(description="width of an embedded piece")] = 1024
    cells: Annotated[Size, Meta(description="LSTM cells of every layer")] = 1024
    layers: Annotated[Size, Meta(description="LSTM layers of the encoder, and of the decoder")] = 2


def rnntc(options: RnntcOptions) -> onnx.ModelProto:
    """Build the forward graph: int64 x [batch, steps] to logits [batch, classes]."""
    b = GraphBuilder("rnntc", options)
    words = time_major(b, "x", options.steps, options)
    embedded = _embed(b, "embedding", words, options.vocab, options)
    layers = _layers(b, "layer", options)
    outputs, _ = unroll(b, embedded, layers, zero_states(b, words, options.layers, options.cells))
    dense(b, "head", outputs[-1], options.cells, options.classes, output="logits")
    b.output("logits", [options.batch_size, options.classes])
    return b.model()


def rnnlm(options: RnnlmOptions) -> onnx.ModelProto:
    """Build the forward graph: int64 x and y [batch, steps] to a scalar loss."""
    b = GraphBuilder("rnnlm", options)
    words = time_major(b, "x", options.steps, options)
    labels = time_major(b, "y", options.steps, options)
    embedded = _embed(b, "embedding", words, options.vocab, options)
    layers = _layers(b, "layer", options)
    outputs, _ = unroll(b, embedded, layers, zero_states(b, words, options.layers, options.cells))
    weight = matrix(b, "output.weight", options.cells, options.vocab)
    bias = b.filled("output.bias", (options.vocab,), 0.0)
    mean_word_loss(b, outputs, labels, weight, bias)
    b.output("loss", [])
    return b.model()


def flexflow_nmt(options: FlexflowNmtOptions) -> onnx.ModelProto:
    """Build the forward graph: int64 source, target and labels [batch, steps] to a scalar loss."""
    b = GraphBuilder("flexflow_nmt", options)
    source, target, labels = (
        time_major(b, name, options.steps, options) for name in ("source", "target", "labels")
    )
    embedded = _embed(b, "source.embedding", source, options.source_vocab, options)
    encoder = _layers(b, "encoder", options)
    first = zero_states(b, source, options.layers, options.cells)
    memory, states = unroll(b, embedded, encoder, first)
    keys = keys_of(b, stack(b, memory), options.cells, options.steps, options.cells)

    embedded = _embed(b, "target.embedding", target, options.target_vocab, options)
    outputs, _ = unroll(b, embedded, _layers(b, "decoder", options), states)
    columns = b.op("Transpose", keys, perm=[0, 2, 1])
    merge = matrix(b, "attention.output_weight", 2 * options.cells, options.cells)
    attended = []
    for state in outputs:
        both = b.op("Concat", state, attend(b, state, keys, columns), axis=1)
        attended.append(b.op("Tanh", b.op("MatMul", both, merge)))
    weight = matrix(b, "output.weight", options.cells, options.target_vocab)
    mean_word_loss(b, attended, labels, weight)
    b.output("loss", [])
    return b.model()


_Layered = RnntcOptions | RnnlmOptions | FlexflowNmtOptions


def _embed(b: GraphBuilder, name: str, words: str, vocab: int, options: _Layered) -> list[str]:
    return embed_each_step(b, name, words, options.steps, (vocab, options.embedding), TABLE_LIMIT)


def _layers(b: GraphBuilder, name: str, options: _Layered) -> list[LstmWeights]:
    widths = [options.embedding] + [options.cells] * (options.layers - 1)
    return [lstm_weights(b, f"{name}{n}", width, options.cells) for n, width in enumerate(widths)]
