"""Training steps that between them use everything a step may hold: name -> how to make it.

Samples are `SAMPLES`, which 2, 3, 4 and 8 ranks divide.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum, Optimizer
from partc.compiler.importing.bindings import Bindings, write_bindings
from partc.models.catalogue import build_model
from tests.builders.graphs.foreign_steps import ADAFACTOR, ADAM, CLIPPED, COUNTED, parse

SAMPLES = 24
IGNORED = 3  # the class that does not count

# A table that is gathered and multiplied: its gradient is dense.
TIED = """
forward (int64[S] ids, double[S,4] x) => (double[S,10] logits) <double[10,4] E = {VALUES}> {
    e = Gather (E, ids)
    h0 = Add (e, x)
    h = Tanh (h0)
    columns = Transpose <perm = [1, 0]> (E)
    logits = MatMul (h, columns)
}
"""

# Windows and groups: everything that splits by samples alone.
CONVOLUTIONS = """
forward (float[S,4,6,6] x) => (float[S,5] logits) {
    c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    r1 = Relu (c1)
    n1 = LRN <size = 3> (r1)
    p1 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (n1)
    c2 = Conv <group = 2> (p1, w2)
    g = GlobalAveragePool (c2)
    f = Flatten (g)
    logits = Gemm (f, w3, b3)
}
"""

# A moving average of the weights, one of the data, and a step counter that sets the learning rate.
AVERAGED = """
step (double[S,4] x, double[S,3] t, double[4,3] W, double[4,3] W_mean, double[4] x_mean, int64 count)
    => (double loss, double[4,3] W_next, double[4,3] W_mean_next, double[4] x_mean_next, int64 count_next)
<double lr = {0.5}, double kept = {0.9}, double new = {0.1}, int64 one = {1}, int64[1] samples = {0}> {
    y = MatMul (x, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    elements = Size (d)
    n = Cast <to = 11> (elements)
    dy = Div (d, n)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    count_next = Add (count, one)
    age = Cast <to = 11> (count_next)
    root = Sqrt (age)
    rate = Div (lr, root)
    part = Mul (rate, dW)
    W_next = Sub (W, part)
    W_old = Mul (kept, W_mean)
    W_new = Mul (new, W_next)
    W_mean_next = Add (W_old, W_new)
    mean = ReduceMean <keepdims = 0> (x, samples)
    x_old = Mul (kept, x_mean)
    x_new = Mul (new, mean)
    x_mean_next = Add (x_old, x_new)
}
"""


def _mlp(optimizer: Optimizer, dtype: str = "float64", **options: object) -> onnx.ModelProto:
    forward = build_model("mlp", dtype=dtype, sizes=[6, 8, 5], batch=SAMPLES)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=optimizer, **options)  # type: ignore[arg-type]


def _lm(optimizer: Optimizer, clip: float | None = 0.1, **options: object) -> onnx.ModelProto:
    sizes = {"vocab": 40, "embedding": 6, "cells": 6, "projection": 6, "steps": 2, "samples": 8}
    forward = build_model("lm", **{"dtype": "float64", "batch": SAMPLES, **sizes, **options})
    return build_training_graph(forward, loss="loss", optimizer=optimizer, clip_global_norm=clip)


def _tied() -> onnx.ModelProto:
    values = ", ".join(f"{value:.6f}" for value in np.random.default_rng(0).normal(size=40))
    forward = parse(TIED.replace("VALUES", values).replace("S]", f"{SAMPLES}]").replace("S,", f"{SAMPLES},"))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


def _convolutions() -> onnx.ModelProto:
    forward = parse(CONVOLUTIONS.replace("S,", f"{SAMPLES},"))
    rng = np.random.default_rng(0)
    shapes = {"w1": (8, 4, 3, 3), "b1": (8,), "w2": (6, 4, 2, 2), "w3": (6, 5), "b3": (5,)}
    for name, shape in shapes.items():
        values = rng.normal(scale=0.3, size=shape).astype(np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


def _with_values(text: str) -> onnx.ModelProto:
    """A step in double whose variables are the inputs X that have an output X_next, at random."""
    model = parse(text.replace("float", "double").replace("S,", f"{SAMPLES},"))
    outputs = {info.name for info in model.graph.output}
    state = {i.name: f"{i.name}_next" for i in model.graph.input if f"{i.name}_next" in outputs}
    write_bindings(model, Bindings(state=state, loss="loss"))
    rng = np.random.default_rng(0)
    for info in model.graph.input:
        if info.name in state:
            shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            is_whole = info.type.tensor_type.elem_type == onnx.TensorProto.INT64
            value = np.zeros(shape, np.int64) if is_whole else np.array(rng.uniform(0.1, 0.5, shape))
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, info.name))
    return model


def _foreign(text: str) -> onnx.ModelProto:
    """A step of tests/builders/graphs/foreign_steps.py, its 8 samples (or 6 ids) grown to SAMPLES."""
    return _with_values(text.replace("[8,", f"[{SAMPLES},"))


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp, sgd": lambda: _mlp(SGD(0.5)),
    "mlp, momentum, clipped": lambda: _mlp(Momentum(0.5), clip_global_norm=0.1),
    "mlp, adagrad": lambda: _mlp(Adagrad(0.5)),
    "mlp, ignored labels": lambda: _mlp(Momentum(0.5), ignore_index=IGNORED),
    "mlp, float32": lambda: _mlp(Momentum(0.5), "float32", clip_global_norm=0.5),
    "convolutions, float32": _convolutions,
    "tied embedding": _tied,
    "lm, adagrad, clipped": lambda: _lm(Adagrad(0.5)),
    "lm, sgd": lambda: _lm(SGD(0.5), clip=None),
    "lm, momentum, time-major": lambda: _lm(Momentum(0.5), time_major=True),
    "lm, sgd, time-major, weighed": lambda: _lm(SGD(0.5), time_major=True, weights=True),
    "averages and a counter": lambda: _with_values(AVERAGED),
    "foreign adam": lambda: _foreign(ADAM),
    "foreign, counted": lambda: _foreign(COUNTED),
    "foreign, clipped": lambda: _foreign(CLIPPED),
    "foreign adafactor": lambda: _foreign(ADAFACTOR),
}


@cache
def training_model(name: str) -> bytes:
    """Return a model's bytes, made once."""
    return bytes(MODELS[name]().SerializeToString())
