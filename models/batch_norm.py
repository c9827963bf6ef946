"""Normalise over the batch, as in training, with running statistics that the forward pass renews."""

from partc.models.graph_builder import GraphBuilder


def batch_norm(b: GraphBuilder, name: str, x: str, channels: int) -> str:
    """Return x [B, channels, ...] normalised, scaled and shifted (Ioffe and Szegedy, arXiv:1502.03167)."""
    scale = b.filled(f"{name}.scale", (channels,), 1.0)
    shift = b.filled(f"{name}.shift", (channels,), 0.0)
    mean, mean_next = b.state(f"{name}.running_mean", (channels,), 0.0)
    variance, variance_next = b.state(f"{name}.running_variance", (channels,), 1.0)
    outputs = (f"{name}.normalised", mean_next, variance_next)
    b.ops("BatchNormalization", x, scale, shift, mean, variance, outputs=outputs, training_mode=1)
    return outputs[0]
