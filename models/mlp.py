"""A multi-layer perceptron: the smallest model worth training.

x [batch, sizes[0]] ─ MatMul, Add, activation ─ ... ─ MatMul, Add ─> logits [batch, sizes[-1]]
"""

import math
from typing import Annotated, Literal

import onnx
from msgspec import Meta

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size


class MlpOptions(ModelOptions, frozen=True, kw_only=True):
    """Widths and activation."""

    sizes: Annotated[
        tuple[Size, ...], Meta(description="widths from the input's to the logits'", min_length=2)
    ] = (784, 512, 10)
    activation: Annotated[Literal["Relu", "Tanh"], Meta(description="between the layers")] = "Relu"


def mlp(options: MlpOptions) -> onnx.ModelProto:
    """Build the forward graph: x [batch, sizes[0]] to logits [batch, sizes[-1]]."""
    b = GraphBuilder("mlp", options)
    last = len(options.sizes) - 2
    hidden = b.input("x", b.element_type, [options.batch_size, options.sizes[0]])
    for layer, (width_in, width_out) in enumerate(zip(options.sizes, options.sizes[1:], strict=False)):
        # Keeps the variance of activations: He et al., arXiv:1502.01852, equation 10.
        weight = b.normal(f"layer{layer}.weight", (width_in, width_out), scale=math.sqrt(2 / width_in))
        bias = b.filled(f"layer{layer}.bias", (width_out,), 0.0)
        product = b.op("MatMul", hidden, weight)
        hidden = b.op("Add", product, bias, name="logits" if layer == last else "")
        if layer < last:
            hidden = b.op(options.activation, hidden)
    b.output("logits", [options.batch_size, options.sizes[-1]])
    return b.model()
