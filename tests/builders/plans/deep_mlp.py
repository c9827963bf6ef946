"""Training steps of a chain of layers, which pipelines cut anywhere."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from tests.builders.graphs.foreign_steps import parse

LAYERS = 6
WIDTH = 16
SAMPLES = 32
BY_1F1B: Mapping[str, Any] = {"recompute_bytes": 10**12}  # else more may be under way where it pays


@cache
def deep_mlp() -> onnx.ModelProto:
    layers = "\n".join(
        f"a{n} = MatMul ({'x' if n == 0 else f'h{n - 1}'}, W{n})\n h{n} = Tanh (a{n})" for n in range(LAYERS)
    )
    text = f"""
    forward (double[{SAMPLES},{WIDTH}] x) => (double[{SAMPLES},4] logits) {{
        {layers}
        logits = MatMul (h{LAYERS - 1}, V)
    }}
    """
    forward, rng = parse(text), np.random.default_rng(0)
    shapes = {f"W{n}": (WIDTH, WIDTH) for n in range(LAYERS)} | {"V": (WIDTH, 4)}
    for name, shape in shapes.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))
