"""Weights, convolutions, dense layers and batch normalisation, as ONNX nodes.

Batch normalisation is that of training, with running statistics that the forward pass renews.

Letters: B batch, C channels.
"""

import math

from partc.models.graph_builder import GraphBuilder

KernelSize = tuple[int, int]


def matrix(b: GraphBuilder, name: str, rows: int, columns: int) -> str:
    """Make a weight [rows, columns] of uniform draws."""
    # Glorot and Bengio, AISTATS 2010, equation 16.
    return b.uniform(name, (rows, columns), limit=math.sqrt(6 / (rows + columns)))


def convolve(
    b: GraphBuilder, name: str, x: str, channels_in: int, channels: int, kernel: KernelSize, stride: int,
    pads: KernelSize, *, bias: bool = False,
) -> str:  # fmt: skip
    """Convolve [B, channels_in, h, w] to [B, channels, h', w']; `pads` on both sides of each axis."""
    height, across = kernel
    # He et al., arXiv:1502.01852, equation 14: keeps the variance of gradients.
    scale = math.sqrt(2 / (height * across * channels))
    weight = b.normal(f"{name}.weight", (channels, channels_in, height, across), scale=scale)
    parameters = (weight, b.filled(f"{name}.bias", (channels,), 0.0)) if bias else (weight,)
    strides, around = [stride] * 2, [*pads, *pads]
    return b.op("Conv", x, *parameters, kernel_shape=list(kernel), strides=strides, pads=around)


def dense(b: GraphBuilder, name: str, x: str, width: int, columns: int, *, output: str = "") -> str:
    """Return x [B, width] W + b, [B, columns], called `output` where that is given."""
    weight = b.uniform(f"{name}.weight", (width, columns), limit=math.sqrt(1 / width))
    return b.op("Gemm", x, weight, b.filled(f"{name}.bias", (columns,), 0.0), name=output)


def mean_head(b: GraphBuilder, x: str, channels: int, classes: int) -> None:
    """Make the output "logits" [B, classes] of the means of images [B, channels, h, w]."""
    pooled = b.op("Flatten", b.op("GlobalAveragePool", x), axis=1)
    dense(b, "head", pooled, channels, classes, output="logits")


def batch_norm(b: GraphBuilder, name: str, x: str, channels: int) -> str:
    """Return x [B, channels, ...] normalised, scaled and shifted (Ioffe and Szegedy, arXiv:1502.03167)."""
    scale = b.filled(f"{name}.scale", (channels,), 1.0)
    shift = b.filled(f"{name}.shift", (channels,), 0.0)
    mean, mean_next = b.state(f"{name}.running_mean", (channels,), 0.0)
    variance, variance_next = b.state(f"{name}.running_variance", (channels,), 1.0)
    outputs = (f"{name}.normalised", mean_next, variance_next)
    b.ops("BatchNormalization", x, scale, shift, mean, variance, outputs=outputs, training_mode=1)
    return outputs[0]
