"""Accumulate the gradients of k micro-batches, and let every k-th step's update count.

    micro' = (micro + 1) mod k                  ends = (micro' = 0)
    total = accumulated + g                     accumulated' = Where(ends, 0, total)
    the update reads total / k; every other variable's next value is Where(ends, updated, old)

So k steps equal one on the k micro-batches together, where the loss is a mean over samples. There is no
control flow: the arithmetic of the update is done in every step, and selected away. A sparse gradient is
accumulated into a dense variable, so the update then has a dense gradient.
"""

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from partc.compiler.training.updates.update_builder import ReadyGradient, Updates


def accumulate(
    updates: Updates, gradients: Sequence[ReadyGradient], count: int
) -> tuple[list[ReadyGradient], str]:
    """Emit the accumulation; return the mean gradients, and the bool scalar that ends an accumulation."""
    build = updates.build
    build.scope = "accumulate/"
    micro_step = updates.variable("micro_step", TensorProto.INT64, (), 0)
    one, limit, zero = (build.constant(np.array(value, np.int64)) for value in (1, count, 0))
    following = updates.set_next(micro_step, "Mod", build.op("Add", micro_step, one), limit)
    ends = build.op("Equal", following, zero)
    means = [_accumulated(updates, gradient, count, ends) for gradient in gradients]
    build.scope = ""
    return means, ends


def _accumulated(updates: Updates, gradient: ReadyGradient, count: int, ends: str) -> ReadyGradient:
    build, parameter = updates.build, gradient.parameter
    accumulated = updates.slot(parameter, "accumulated", 0.0)
    if gradient.dense is not None:
        total = build.op("Add", accumulated, gradient.dense)
    else:
        positions = updates.positions(gradient)
        total = build.op("ScatterND", accumulated, positions, gradient.sums, reduction="add")
    updates.set_next(accumulated, "Where", ends, updates.scalar(0.0, parameter), total)
    return ReadyGradient(parameter, dense=build.op("Div", total, updates.scalar(count, parameter)))
