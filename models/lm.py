"""The language model of the Parallax paper (arXiv:1808.02621, section 7), after arXiv:1602.02410.

One LSTM of 2,048 cells, projected to 512 and unrolled over 20 words, reads a table of 800,000 x 512
and is scored against another by a sampled softmax. Words differ from step to step, so both tables
are read by Gather alone: their gradients are the rows that a step touched.

    x ─ Gather(embedding) ─ MatMul ─┬─ step 0 ─ h ─┬─ step 1 ─ ... ─ step T-1
                                    └──────────────┘
    every h, [T*B, P] ──┬─ dot rows Gather(softmax, y) ──────────────> true logits     [n, 1]
                        └─ MatMul Gather(softmax, sampled) transposed > sampled logits [n, S]
    loss = mean over words of -log softmax([true, sampled] - log expected count)[0]

Letters: B batch, T steps, E embedded width, H cells, P projected width, S samples, V vocabulary,
n = T*B words, time outermost.
"""

from typing import Annotated

import onnx
from msgspec import Meta
from onnx import TensorProto

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size
from partc.models.layers import matrix
from partc.models.recurrent import lstm_cell, zero_state

TABLE_LIMIT = 0.05  # half the width of the tables' first values; small, so that logits start near zero
NEVER = -(10**9)  # logit of a sampled word that is also the label: its probability is zero


class LmOptions(ModelOptions, frozen=True, kw_only=True):
    """Sizes of the model; the defaults are the paper's."""

    vocab: Annotated[Size, Meta(description="words that have a row in each table")] = 800_000
    embedding: Annotated[Size, Meta(description="width of an embedded word")] = 512
    cells: Annotated[Size, Meta(description="LSTM cells")] = 2048
    projection: Annotated[Size, Meta(description="width that the cells are projected to")] = 512
    steps: Annotated[Size, Meta(description="words of a sample, one LSTM step each")] = 20
    samples: Annotated[Size, Meta(description="negative words, shared by the whole batch")] = 8192
    time_major: Annotated[bool, Meta(description="x and y are [steps, batch]")] = False
    weights: Annotated[bool, Meta(description="add an input that weighs each word's loss")] = False


def lm(options: LmOptions) -> onnx.ModelProto:
    """Build the forward graph: int64 x, y [batch, steps] and sampled [samples] to a scalar loss."""
    b = GraphBuilder("lm", options)
    words = _per_word_input(b, "x", TensorProto.INT64, options)
    labels = _flat(b, _per_word_input(b, "y", TensorProto.INT64, options))
    sampled = b.input("sampled", TensorProto.INT64, [options.samples], sample_axis=None)

    hidden = _lstm(b, words, options)
    losses = _sampled_softmax(b, hidden, labels, sampled, options)

    if options.weights:
        weights = _flat(b, _per_word_input(b, "weights", b.element_type, options))
        _weighted_mean(b, losses, weights)
    else:
        b.op("ReduceMean", losses, name="loss", keepdims=0)
    b.output("loss", [])
    return b.model()


def _per_word_input(b: GraphBuilder, name: str, element_type: int, options: LmOptions) -> str:
    """Declare an input of one entry per word, and return it as [T, B]."""
    if options.time_major:
        return b.input(name, element_type, [options.steps, options.batch_size], sample_axis=1)
    words = b.input(name, element_type, [options.batch_size, options.steps])
    return b.op("Transpose", words, perm=[1, 0])


def _flat(b: GraphBuilder, tensor: str) -> str:
    return b.op("Reshape", tensor, b.integers(-1))


# ---------------------------------------------------------------- LSTM


def _lstm(b: GraphBuilder, words: str, options: LmOptions) -> str:
    """Return the projected state after each word, [n, P], for words int64[T, B]."""
    table = b.uniform("embedding", (options.vocab, options.embedding), limit=TABLE_LIMIT)
    embedded = b.op("Reshape", b.op("Gather", table, words, axis=0), b.integers(-1, options.embedding))
    inputs = _gate_inputs(b, embedded, options)
    recurrent = matrix(b, "lstm.recurrent_weight", options.projection, 4 * options.cells)
    project = matrix(b, "lstm.projection_weight", options.cells, options.projection)

    hidden = zero_state(b, words, options.projection)
    cell = zero_state(b, words, options.cells)
    states = []
    for piece in b.split(inputs, options.steps, axis=0):
        gates = b.op("Add", b.op("Squeeze", piece, b.integers(0)), b.op("MatMul", hidden, recurrent))
        cell, cell_output = lstm_cell(b, gates, cell)
        hidden = b.op("MatMul", cell_output, project)
        states.append(b.op("Unsqueeze", hidden, b.integers(0)))
    stacked = states[0] if len(states) == 1 else b.op("Concat", *states, axis=0)
    return b.op("Reshape", stacked, b.integers(-1, options.projection))


def _gate_inputs(b: GraphBuilder, embedded: str, options: LmOptions) -> str:
    """Return what the words alone contribute to the gates, [T, B, 4H]: one product for all steps."""
    weight = matrix(b, "lstm.input_weight", options.embedding, 4 * options.cells)
    bias = b.filled("lstm.bias", (4 * options.cells,), 0.0)
    gates = b.op("Add", b.op("MatMul", embedded, weight), bias)
    return b.op("Reshape", gates, b.integers(options.steps, -1, 4 * options.cells))


# ---------------------------------------------------------------- sampled softmax


def _sampled_softmax(b: GraphBuilder, hidden: str, labels: str, sampled: str, options: LmOptions) -> str:
    """Return each word's loss [n], for hidden [n, P], labels int64[n], sampled int64[S].

    Source: Jean et al., arXiv:1412.2007, section 3. A negative that is the word's own label does not
    compete with it.
    """
    table = b.uniform("softmax.weight", (options.vocab, options.projection), limit=TABLE_LIMIT)
    bias = b.filled("softmax.bias", (options.vocab,), 0.0)
    true_logits = _true_logits(b, hidden, table, bias, labels)
    true_logits = b.op("Sub", true_logits, _log_expected_count(b, labels, options))
    negative_logits = _negative_logits(b, hidden, table, bias, sampled)
    negative_logits = b.op("Sub", negative_logits, _log_expected_count(b, sampled, options))

    column = b.op("Unsqueeze", labels, b.integers(1))
    is_label = b.op("Equal", column, b.op("Unsqueeze", sampled, b.integers(0)))
    negative_logits = b.op("Where", is_label, b.number(NEVER), negative_logits)

    logits = b.op("Concat", b.op("Unsqueeze", true_logits, b.integers(1)), negative_logits, axis=1)
    log_probabilities = b.op("LogSoftmax", logits, axis=1)
    of_label = b.op("Slice", log_probabilities, b.integers(0), b.integers(1), b.integers(1))
    return b.op("Neg", b.op("Squeeze", of_label, b.integers(1)))


def _true_logits(b: GraphBuilder, hidden: str, table: str, bias: str, labels: str) -> str:
    """Return each word's own logit [n]: a dot product of two rows."""
    rows = b.op("Gather", table, labels, axis=0)
    dots = b.op("ReduceSum", b.op("Mul", hidden, rows), b.integers(1), keepdims=0)
    return b.op("Add", dots, b.op("Gather", bias, labels, axis=0))


def _negative_logits(b: GraphBuilder, hidden: str, table: str, bias: str, sampled: str) -> str:
    """Return the logits of all negatives for every word, [n, S]."""
    rows = b.op("Gather", table, sampled, axis=0)
    products = b.op("MatMul", hidden, b.op("Transpose", rows, perm=[1, 0]))
    return b.op("Add", products, b.op("Gather", bias, sampled, axis=0))


def _log_expected_count(b: GraphBuilder, ids: str, options: LmOptions) -> str:
    """Return, for each id, the logarithm of how often S draws would pick it.

        S log((id + 2) / (id + 1)) / log(V + 1)

    Words are numbered by falling frequency, and drawn by the log-uniform (Zipf) law, with
    replacement. In float64: at id 800,000 the ratio differs from 1 by 10 float32 roundings.
    """
    double = TensorProto.DOUBLE
    rank = b.op("Add", b.op("Cast", ids, to=double), b.number(1, double))
    ratio = b.op("Div", b.op("Add", rank, b.number(1, double)), rank)
    normalised = b.op("Div", b.op("Log", ratio), b.op("Log", b.number(options.vocab + 1, double)))
    count = b.op("Mul", normalised, b.number(options.samples, double))
    return b.op("Cast", b.op("Log", count), to=b.element_type)


def _weighted_mean(b: GraphBuilder, losses: str, weights: str) -> None:
    total = b.op("ReduceSum", b.op("Mul", losses, weights), keepdims=0)
    b.op("Div", total, b.op("ReduceSum", weights, keepdims=0), name="loss")
