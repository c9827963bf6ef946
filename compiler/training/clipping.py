"""Clip gradients by their global norm. Source: Pascanu et al., ICML 2013.

    norm = sqrt(sum over all gradients of sum of squares)      g' = g clip / max(norm, clip)

A sparse gradient counts with its rows summed per id.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from partc.compiler.training.node_builder import NodeBuilder
from partc.compiler.training.optimizers import ReadyGradient
from partc.compiler.training.tensor_types import Types


def clip_by_global_norm(
    build: NodeBuilder, types: Types, gradients: Sequence[ReadyGradient], clip: float
) -> list[ReadyGradient]:
    """Emit the clipping and return the scaled gradients."""
    build.scope = "clip/"
    element = types[gradients[0].parameter].element
    squares = []
    for gradient in gradients:
        square = build.op("ReduceSum", build.op("Mul", gradient.values, gradient.values), keepdims=0)
        same = types[gradient.parameter].element == element
        squares.append(square if same else build.op("Cast", square, to=element))
    total = squares[0] if len(squares) == 1 else build.op("Sum", *squares)
    limit = build.constant(np.array(clip, types[gradients[0].parameter].dtype))
    scale = build.op("Div", limit, build.op("Max", build.op("Sqrt", total), limit))
    clipped = [_scaled(build, types, gradient, scale, element) for gradient in gradients]
    build.scope = ""
    return clipped


def _scaled(
    build: NodeBuilder, types: Types, gradient: ReadyGradient, scale: str, element: int
) -> ReadyGradient:
    own = types[gradient.parameter].element
    factor = scale if own == element else build.op("Cast", scale, to=own)
    values = build.op("Mul", gradient.values, factor)
    if gradient.dense is None:
        return replace(gradient, sums=values)
    return replace(gradient, dense=values)
