"""A perceptron with a batch of symbolic size, for what asks how a step's time comes about."""

from collections.abc import Sequence

import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Momentum
from partc.models.catalogue import build_model

SIZES = (64, 256, 64)


def wide_mlp(batch: int | None = None, sizes: Sequence[int] = SIZES) -> onnx.ModelProto:
    """Return a training step whose parameters are large next to its work. No batch: a symbolic one."""
    forward = build_model("mlp", sizes=list(sizes), batch=batch)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))
