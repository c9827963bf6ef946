"""The LSTM cell and batch normalisation, as ONNX nodes.

The cell is unrolled, so that any step's ops are plain.

Letters: B batch, T steps, H cells.

Batch normalisation is that of training, with running statistics that the forward pass renews.
"""

import math

from partc.models.graph_builder import GraphBuilder


def lstm_cell(b: GraphBuilder, gates: str, cell: str) -> tuple[str, str]:
    """Return the next cell and the output, both [B, H], for gates [B, 4H].

        c' = sigmoid(f + 1) c + sigmoid(i) tanh(j)      output = sigmoid(o) tanh(c')

    The 1 lets a fresh network remember: Jozefowicz et al., ICML 2015.
    """
    i, j, f, o = b.split(gates, 4, axis=1)
    kept = b.op("Mul", b.op("Sigmoid", b.op("Add", f, b.number(1))), cell)
    written = b.op("Mul", b.op("Sigmoid", i), b.op("Tanh", j))
    following = b.op("Add", kept, written)
    return following, b.op("Mul", b.op("Sigmoid", o), b.op("Tanh", following))


def zero_state(b: GraphBuilder, words: str, width: int) -> str:
    """Return zeros [B, width], B read from words int64[T, B] at run time."""
    batch = b.op("Shape", words, start=1, end=2)
    return b.zeros(b.op("Concat", batch, b.integers(width), axis=0))


def matrix(b: GraphBuilder, name: str, rows: int, columns: int) -> str:
    """Make a weight [rows, columns] of uniform draws."""
    # Glorot and Bengio, AISTATS 2010, equation 16.
    return b.uniform(name, (rows, columns), limit=math.sqrt(6 / (rows + columns)))


def batch_norm(b: GraphBuilder, name: str, x: str, channels: int) -> str:
    """Return x [B, channels, ...] normalised, scaled and shifted (Ioffe and Szegedy, arXiv:1502.03167)."""
    scale = b.filled(f"{name}.scale", (channels,), 1.0)
    shift = b.filled(f"{name}.shift", (channels,), 0.0)
    mean, mean_next = b.state(f"{name}.running_mean", (channels,), 0.0)
    variance, variance_next = b.state(f"{name}.running_variance", (channels,), 1.0)
    outputs = (f"{name}.normalised", mean_next, variance_next)
    b.ops("BatchNormalization", x, scale, shift, mean, variance, outputs=outputs, training_mode=1)
    return outputs[0]
