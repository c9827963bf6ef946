"""A pre-norm transformer block with a head, in double: 8 samples of 6 positions, 4 heads of 4."""

import numpy as np
import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Optimizer
from tests.builders.graphs.foreign_steps import parse

SAMPLES, POSITIONS, WIDTH = 8, 6, 16
SHAPES = {
    "g1": (16,),
    "b1": (16,),
    "Wq": (16, 16),
    "Wk": (16, 16),
    "Wv": (16, 16),
    "Wo": (16, 16),
    "bo": (16,),
    "g2": (16,),
    "b2": (16,),
    "W1": (16, 32),
    "c1": (32,),
    "W2": (32, 16),
    "c2": (16,),
    "Wp": (16, 3),
}

FORWARD = """
forward (double[8,6,16] x) => (double[8,3] logits)
<int64[4] heads = {0, 6, 4, 4}, int64[3] flat = {0, 6, 16}, int64[1] positions = {1}, double scale = {0.5}> {
    n1 = LayerNormalization <axis = -1> (x, g1, b1)
    q0 = MatMul (n1, Wq)
    k0 = MatMul (n1, Wk)
    v0 = MatMul (n1, Wv)
    q1 = Reshape (q0, heads)
    k1 = Reshape (k0, heads)
    v1 = Reshape (v0, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    qk = MatMul (q, k)
    scores = Mul (qk, scale)
    p = Softmax <axis = -1> (scores)
    o0 = MatMul (p, v)
    o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
    o2 = Reshape (o1, flat)
    o3 = MatMul (o2, Wo)
    o = Add (o3, bo)
    y = Add (x, o)
    n2 = LayerNormalization <axis = -1> (y, g2, b2)
    h0 = MatMul (n2, W1)
    h1 = Add (h0, c1)
    h = Tanh (h1)
    f0 = MatMul (h, W2)
    f = Add (f0, c2)
    z = Add (y, f)
    pooled = ReduceMean <keepdims = 0> (z, positions)
    logits = MatMul (pooled, Wp)
}
"""


def attention_step(optimizer: Optimizer, **options: object) -> onnx.ModelProto:
    """Return the training step of the block."""
    forward = parse(FORWARD)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        values = rng.normal(scale=0.4, size=shape) + (name[0] == "g")
        forward.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=optimizer, **options)  # type: ignore[arg-type]
