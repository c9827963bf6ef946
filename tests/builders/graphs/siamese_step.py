"""A step of one network applied to three inputs, in double, whose results two losses compare in pairs."""

import numpy as np
import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Optimizer
from tests.builders.graphs.foreign_steps import parse

SAMPLES, WIDTH = 8, 16
SHAPES = {"W1": (16, 12), "W2": (12, 6)}

FORWARD = """
siamese (double[8,16] a, double[8,16] p, double[8,16] n) => (double loss) <int64[1] axis = {1}> {
    ha = MatMul (a, W1) ta = Tanh (ha) ga = MatMul (ta, W2) la = ReduceL2 (ga, axis) ea = Div (ga, la)
    hp = MatMul (p, W1) tp = Tanh (hp) gp = MatMul (tp, W2) lp = ReduceL2 (gp, axis) ep = Div (gp, lp)
    hn = MatMul (n, W1) tn = Tanh (hn) gn = MatMul (tn, W2) ln = ReduceL2 (gn, axis) en = Div (gn, ln)
    near = Sub (ea, ep) far = Sub (ea, en)
    near_norm = ReduceL2 (near, axis) far_norm = ReduceL2 (far, axis)
    gap = Sub (near_norm, far_norm) hinge = Relu (gap) triplets = ReduceMean <keepdims = 0> (hinge)
    products = Mul (ea, ep) cosines = ReduceSum (products, axis) squares = Mul (cosines, cosines)
    pairs = ReduceMean <keepdims = 0> (squares)
    loss = Add (triplets, pairs)
}
"""


def siamese_step(optimizer: Optimizer) -> onnx.ModelProto:
    """Return the step. Gradients go from each network's group to others', and back."""
    forward = parse(FORWARD)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    return build_training_graph(forward, loss="loss", optimizer=optimizer)
