"""Recurrence, embeddings and attention as ONNX nodes, unrolled, so that any step's ops are plain.

Letters: B batch, T steps, H cells, E embedded width, V vocabulary. Words are int64[T, B], time outermost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorProto

from partc.models.graph_builder import GraphBuilder, ModelOptions
from partc.models.layers import matrix

CellState = tuple[str, str]  # hidden and cell, [B, H] each


# ---------------------------------------------------------------- LSTM


@dataclass(frozen=True, slots=True)
class LstmWeights:
    """What all steps of a layer share: [E, 4H], [H, 4H] and [4H], gates in the order i, j, f, o."""

    of_input: str
    recurrent: str
    bias: str


def lstm_weights(b: GraphBuilder, name: str, width: int, cells: int) -> LstmWeights:
    """Make the weights of a layer that reads inputs [B, width]."""
    return LstmWeights(
        of_input=matrix(b, f"{name}.input_weight", width, 4 * cells),
        recurrent=matrix(b, f"{name}.recurrent_weight", cells, 4 * cells),
        bias=b.filled(f"{name}.bias", (4 * cells,), 0.0),
    )


def lstm_cell(b: GraphBuilder, gates: str, cell: str) -> tuple[str, str]:
    """Return the next cell and the output, both [B, H], for gates [B, 4H].

        c' = sigmoid(f + 1) c + sigmoid(i) tanh(j)      output = sigmoid(o) tanh(c')

    The 1 lets a fresh network remember: Jozefowicz et al., ICML 2015.
    """
    i, j, f, o = b.split(gates, 4, axis=1)
    remembered = b.op("Mul", b.op("Sigmoid", b.op("Add", f, b.number(1))), cell)
    written = b.op("Mul", b.op("Sigmoid", i), b.op("Tanh", j))
    following = b.op("Add", remembered, written)
    return following, b.op("Mul", b.op("Sigmoid", o), b.op("Tanh", following))


def lstm_step(b: GraphBuilder, gates: str, recurrent: str, state: CellState) -> CellState:
    """Return the state after one step, for what its input contributes to the gates, [B, 4H]."""
    hidden, cell = state
    cell, hidden = lstm_cell(b, b.op("Add", gates, b.op("MatMul", hidden, recurrent)), cell)
    return hidden, cell


def advance_layers(
    b: GraphBuilder, x: str, layers: Sequence[LstmWeights], states: Sequence[CellState]
) -> list[CellState]:
    """Return the states of layers on top of each other after one step with input x [B, E]."""
    following = []
    for weights, state in zip(layers, states, strict=True):
        gates = b.op("Add", b.op("MatMul", x, weights.of_input), weights.bias)
        following.append(lstm_step(b, gates, weights.recurrent, state))
        x = following[-1][0]
    return following


def unroll(
    b: GraphBuilder, inputs: Sequence[str], layers: Sequence[LstmWeights], states: list[CellState]
) -> tuple[list[str], list[CellState]]:
    """Return the top layer's output [B, H] at every step, and the last state of every layer."""
    outputs = []
    for x in inputs:
        states = advance_layers(b, x, layers, states)
        outputs.append(states[-1][0])
    return outputs, states


def zero_state(b: GraphBuilder, words: str, width: int) -> str:
    """Return zeros [B, width], B read from words int64[T, B] at run time."""
    batch = b.op("Shape", words, start=1, end=2)
    return b.zeros(b.op("Concat", batch, b.integers(width), axis=0))


def zero_states(b: GraphBuilder, words: str, layers: int, cells: int) -> list[CellState]:
    """Return the first states of layers that read words int64[T, B]."""
    return [(zero_state(b, words, cells), zero_state(b, words, cells)) for _ in range(layers)]


# ---------------------------------------------------------------- words


def time_major(b: GraphBuilder, name: str, steps: int, options: ModelOptions) -> str:
    """Declare an input of words [batch, steps], and return it as [T, B]."""
    words = b.input(name, TensorProto.INT64, [options.batch_size, steps])
    return b.op("Transpose", words, perm=[1, 0])


def each_step(b: GraphBuilder, tensor: str, steps: int) -> list[str]:
    """Return a tensor's entries along its first axis, which goes."""
    pieces = (tensor,) if steps == 1 else b.split(tensor, steps, axis=0)
    return [b.op("Squeeze", piece, b.integers(0)) for piece in pieces]


def embed_each_step(
    b: GraphBuilder, name: str, words: str, steps: int, shape: tuple[int, int], limit: float
) -> list[str]:
    """Return the rows [B, E] of a table of this shape, [V, E], for the words of every step."""
    table = b.uniform(name, shape, limit=limit)
    return [b.op("Gather", table, of_step, axis=0) for of_step in each_step(b, words, steps)]


def stack(b: GraphBuilder, states: list[str]) -> str:
    """Lay states [B, H] one behind the other, [T*B, H]."""
    return states[0] if len(states) == 1 else b.op("Concat", *states, axis=0)


# ---------------------------------------------------------------- attention


def attend(b: GraphBuilder, hidden: str, keys: str, columns: str) -> str:
    """Return the mean of keys [B, S, H], weighed by their products with a state [B, H].

    `columns`: the keys transposed, [B, H, S], which all steps share.
    """
    query = b.op("Unsqueeze", hidden, b.integers(1))
    weights = b.op("Softmax", b.op("MatMul", query, columns), axis=2)
    return b.op("Squeeze", b.op("MatMul", weights, keys), b.integers(1))


def keys_of(b: GraphBuilder, memory: str, width: int, steps: int, cells: int) -> str:
    """Return keys [B, S, H] of what an encoder wrote, memory [S*B, width]; "general" of section 3.1.

    Luong et al., arXiv:1508.04025: the weight is applied to the encoder's states once, not to every query.
    """
    keys = b.op("MatMul", memory, matrix(b, "attention.weight", width, cells))
    apart = b.op("Reshape", keys, b.integers(steps, -1, cells))
    return b.op("Transpose", apart, perm=[1, 0, 2])


def mean_word_loss(
    b: GraphBuilder, states: Sequence[str], labels: str, weight: str, bias: str = "", *, output: str = "loss"
) -> str:
    """Return the mean cross-entropy of labels int64[T, B], each step's logits being state [B, H] W + b."""
    losses = []
    for state, of_step in zip(states, each_step(b, labels, len(states)), strict=True):
        logits = b.op("MatMul", state, weight)
        if bias:
            logits = b.op("Add", logits, bias)
        losses.append(b.op("SoftmaxCrossEntropyLoss", logits, of_step, reduction="mean"))
    # Not Mean, which ONNX Runtime has in float32 alone.
    return b.op("Div", b.op("Sum", *losses), b.number(len(losses)), name=output)
