"""A language model with a mixture of experts between two LSTM layers (Shazeer et al., arXiv:1701.06538).

    words ─ Gather ─ LSTM ─┬─ gate ─> G [n, E], k of E not zero ─┐
                           ├─ every expert: Relu(x W + b) V + c ─┴─ sum over e of G[:, e] expert e ─┐
                           └──────────────────────────────── + <────────────────────────────────────┘
                                                             └─ LSTM ─ dense ─> mean cross-entropy

Gating is "noisy top-k" without the noise (equations 3 and 5), and dense: every expert computes every word,
and those that are not among a word's k best are weighed by zero. The numbers are those of routing words to
experts; the arithmetic is E / k times as much. In turn a graph of standard ops says it, and gradients flow
through it by ordinary rules: all experts are one product with a weight [E, H, M], whose axis E a strategy
may divide among devices, each keeping experts of its own; the sum over experts is then a sum over devices.

    G = softmax(x Wg where it is at least its k-th largest, else -10^9)

An expert's gate is learned through the softmax; which k are chosen has no gradient (the threshold is only
compared). Equal logits at the threshold would all be kept.

So that experts are used alike, E / k sum_e f[e] P[e] is added, divided by `balance`: f the share of words
that chose e, P the mean of softmax(x Wg) (Fedus et al., arXiv:2101.03961, equations 4 to 6, for k = 1).
Both are means over the whole batch.

Widths and experts are those of appendix C.1 (MoE-32), the vocabulary is Penn Treebank's. Letters: B batch,
T steps, n = T*B words, H cells, E experts, M cells of an expert.
"""

import math
from typing import Annotated

import onnx
from msgspec import Meta

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size
from partc.models.layers import matrix
from partc.models.recurrent import (
    each_step,
    embed_each_step,
    lstm_weights,
    mean_word_loss,
    stack,
    time_major,
    unroll,
    zero_states,
)

TABLE_LIMIT = 0.1
NEVER = -(10**9)  # logit of an expert that is not chosen: its gate is zero


class MoeOptions(ModelOptions, frozen=True, kw_only=True):
    """Sizes of the model. Raises ValueError where a word wants more experts than there are."""

    vocab: Annotated[Size, Meta(description="words that have a row in the table")] = 10_000
    cells: Annotated[Size, Meta(description="LSTM cells of both layers, and width of a word")] = 512
    steps: Annotated[Size, Meta(description="words of a sample, one LSTM step each")] = 20
    experts: Annotated[Size, Meta(description="experts")] = 32
    chosen: Annotated[Size, Meta(description="experts that a word is given to")] = 4
    expert_cells: Annotated[Size, Meta(description="cells of an expert's hidden layer")] = 1024
    balance: Annotated[Size, Meta(description="what the loss of balance is divided by")] = 100

    def __post_init__(self) -> None:
        if self.chosen > self.experts:
            raise ValueError(f"{self.chosen} experts chosen of {self.experts}")


def moe(options: MoeOptions) -> onnx.ModelProto:
    """Build the forward graph: int64 x and y [batch, steps] to a scalar loss."""
    b = GraphBuilder("moe", options)
    words = time_major(b, "x", options.steps, options)
    labels = time_major(b, "y", options.steps, options)
    cells = options.cells

    x = embed_each_step(b, "embedding", words, options.steps, (options.vocab, cells), TABLE_LIMIT)
    below, _ = unroll(b, x, [lstm_weights(b, "below", cells, cells)], zero_states(b, words, 1, cells))
    stacked = stack(b, below)
    mixed, imbalance = _mixture(b, stacked, options)
    mixed = b.op("Reshape", b.op("Add", stacked, mixed), b.integers(options.steps, -1, cells))
    above, _ = unroll(
        b,
        each_step(b, mixed, options.steps),
        [lstm_weights(b, "above", cells, cells)],
        zero_states(b, words, 1, cells),
    )
    weight = matrix(b, "output.weight", cells, options.vocab)
    bias = b.filled("output.bias", (options.vocab,), 0.0)
    of_words = mean_word_loss(b, above, labels, weight, bias, output="word_loss")
    b.op("Add", of_words, b.op("Div", imbalance, b.number(options.balance)), name="loss")
    b.output("loss", [])
    return b.model()


def _mixture(b: GraphBuilder, x: str, options: MoeOptions) -> tuple[str, str]:
    """Return the experts' sum [n, H] for x [n, H], weighed by the gates, and the loss of balance."""
    logits = b.op("MatMul", x, matrix(b, "gate.weight", options.cells, options.experts))
    best, _ = b.ops("TopK", logits, b.integers(options.chosen), outputs=("best_logits", "best"), axis=1)
    last = (b.integers(options.chosen - 1), b.integers(options.chosen), b.integers(1))
    is_chosen = b.op("GreaterOrEqual", logits, b.op("Slice", best, *last))
    gates = b.op("Softmax", b.op("Where", is_chosen, logits, b.number(NEVER)), axis=1)
    by_expert = b.op("Unsqueeze", b.op("Transpose", gates, perm=[1, 0]), b.integers(2))
    weighed = b.op("Mul", _experts(b, x, options), by_expert)
    return b.op("ReduceSum", weighed, b.integers(0), keepdims=0), _imbalance(b, logits, is_chosen, options)


def _experts(b: GraphBuilder, x: str, options: MoeOptions) -> str:
    """Return what every expert makes of every word, [E, n, H]."""
    experts, cells, inner = options.experts, options.cells, options.expert_cells
    limit = math.sqrt(6 / (cells + inner))  # Glorot and Bengio, AISTATS 2010, equation 16
    into = b.uniform("experts.input_weight", (experts, cells, inner), limit=limit)
    into_bias = b.filled("experts.input_bias", (experts, 1, inner), 0.0)
    out = b.uniform("experts.output_weight", (experts, inner, cells), limit=limit)
    out_bias = b.filled("experts.output_bias", (experts, 1, cells), 0.0)
    hidden = b.op("Relu", b.op("Add", b.op("MatMul", x, into, name="experts.hidden"), into_bias))
    return b.op("Add", b.op("MatMul", hidden, out, name="experts.output"), out_bias)


def _imbalance(b: GraphBuilder, logits: str, is_chosen: str, options: MoeOptions) -> str:
    """Return E / k sum_e f[e] P[e], a scalar: 1 where all experts are used alike."""
    counted = b.op("Cast", is_chosen, to=b.element_type)
    shares = b.op("ReduceMean", counted, b.integers(0), keepdims=0)
    means = b.op("ReduceMean", b.op("Softmax", logits, axis=1), b.integers(0), keepdims=0)
    total = b.op("ReduceSum", b.op("Mul", shares, means), keepdims=0)
    scaled = b.op("Mul", total, b.number(options.experts))
    return b.op("Div", scaled, b.number(options.chosen))
