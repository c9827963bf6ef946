"""Small steps of the models that random configurations are drawn for, all in float64.

Sizes have divisors and remainders: 8 samples, 5 or 6 positions, 2 to 4 heads, words in elevens. Adam's
epsilon is large: it divides the gradient of a key's bias, which is rounding alone, by little else.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.commands.arguments.parse_update_options import parse_optimizer
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Momentum, Optimizer
from partc.models.catalogue import build_model
from tests.builders.graphs.attention_block import attention_step
from tests.builders.graphs.training_models import training_model

SAMPLES = 8

# GPT-2: pre-norm, a fused query, key and value, a causal mask, Gelu by tanh, the table tied to the logits.
GPT2 = """
gpt2 (int64[8,6] ids, int64[8,6] labels, double[22,12] wte, double[6,12] wpe, double[12] g1, double[12] b1,
    double[12,36] attn, double[36] attn_b, double[12,12] proj, double[12] proj_b, double[12] g2,
    double[12] b2,
    double[12,24] fc, double[24] fc_b, double[24,12] out, double[12] out_b, double[12] gf, double[12] bf,
    double[1,1,6,6] causal_) => (double loss)
<int64[4] heads = {0, 6, 3, 4}, int64[3] joined = {0, 6, 12}, int64[2] words = {-1, 22}, int64[1] flat = {-1},
 double scale = {0.5}> {
    token = Gather (wte, ids)
    x = Add (token, wpe)
    n1 = LayerNormalization <axis = -1> (x, g1, b1)
    fused = MatMul (n1, attn)
    qkv = Add (fused, attn_b)
    q0, k0, v0 = Split <axis = 2, num_outputs = 3> (qkv)
    q1 = Reshape (q0, heads)
    k1 = Reshape (k0, heads)
    v1 = Reshape (v0, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    qk = MatMul (q, k)
    scaled = Mul (qk, scale)
    scores = Add (scaled, causal_)
    p = Softmax <axis = -1> (scores)
    o0 = MatMul (p, v)
    o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
    o2 = Reshape (o1, joined)
    o3 = MatMul (o2, proj)
    o = Add (o3, proj_b)
    y = Add (x, o)
    n2 = LayerNormalization <axis = -1> (y, g2, b2)
    h0 = MatMul (n2, fc)
    h1 = Add (h0, fc_b)
    h = Gelu <approximate = "tanh"> (h1)
    f0 = MatMul (h, out)
    f = Add (f0, out_b)
    z = Add (y, f)
    n = LayerNormalization <axis = -1> (z, gf, bf)
    head = Transpose <perm = [1, 0]> (wte)
    logits0 = MatMul (n, head)
    logits = Reshape (logits0, words)
    wanted = Reshape (labels, flat)
    loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (logits, wanted)
}
"""

# BERT: post-norm, a padding mask of the data, Gelu by tanh, words that do not count.
BERT = """
bert (int64[8,5] ids, int64[8,5] types, int64[8,5] mask, int64[8,5] labels,
    double[22,12] word, double[2,12] type, double[5,12] position, double[12] g0, double[12] b0,
    double[12,12] Wq, double[12] bq, double[12,12] Wk,
    double[12] bk, double[12,12] Wv, double[12] bv, double[12,12] Wo, double[12] bo,
    double[12] g1, double[12] b1, double[12,20] Wi, double[20] bi, double[20,12] Wt, double[12] bt,
    double[12] g2, double[12] b2, double[12,22] decoder, double[22] decoder_b) => (double loss)
<int64[4] heads = {0, 5, 4, 3}, int64[3] joined = {0, 5, 12}, int64[2] words = {-1, 22}, int64[1] flat = {-1},
 double scale = {0.57735}, double one = {1}, double far = {-10000},
 int64 none = {0}, int64[2] around = {1, 2}> {
    words0 = Gather (word, ids)
    types0 = Gather (type, types)
    x0 = Add (words0, types0)
    x1 = Add (x0, position)
    x = LayerNormalization <axis = -1> (x1, g0, b0)
    is_word = Greater (mask, none)
    present = CastLike (is_word, one)
    absent = Sub (one, present)
    offset0 = Mul (absent, far)
    offset = Unsqueeze (offset0, around)
    q0 = MatMul (x, Wq)
    k0 = MatMul (x, Wk)
    v0 = MatMul (x, Wv)
    q1 = Add (q0, bq)
    k1 = Add (k0, bk)
    v1 = Add (v0, bv)
    q2 = Reshape (q1, heads)
    k2 = Reshape (k1, heads)
    v2 = Reshape (v1, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q2)
    k = Transpose <perm = [0, 2, 3, 1]> (k2)
    v = Transpose <perm = [0, 2, 1, 3]> (v2)
    qk = MatMul (q, k)
    scaled = Mul (qk, scale)
    scores = Add (scaled, offset)
    p = Softmax <axis = -1> (scores)
    o0 = MatMul (p, v)
    o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
    o2 = Reshape (o1, joined)
    o3 = MatMul (o2, Wo)
    o = Add (o3, bo)
    y0 = Add (x, o)
    y = LayerNormalization <axis = -1> (y0, g1, b1)
    h0 = MatMul (y, Wi)
    h1 = Add (h0, bi)
    h = Gelu <approximate = "tanh"> (h1)
    f0 = MatMul (h, Wt)
    f = Add (f0, bt)
    z0 = Add (y, f)
    z = LayerNormalization <axis = -1> (z0, g2, b2)
    logits0 = MatMul (z, decoder)
    logits1 = Add (logits0, decoder_b)
    logits = Reshape (logits1, words)
    wanted = Reshape (labels, flat)
    loss = SoftmaxCrossEntropyLoss <reduction = "mean", ignore_index = 0> (logits, wanted)
}
"""

# Windows of several strides, groups and pools, normalised over the batch and over groups of channels.
CONVOLUTIONS = """
images (double[8,3,16,8] x, int64[8] labels, double[4,3,3,3] w1, double[4] g1, double[4] b1, double[4] mean_,
    double[4] variance_, double[6,4,5,3] w2, double[6] c2, double[6] g2, double[6] b2, double[6,3,3,3] w3,
    double[6,5] w4, double[5] b4) => (double loss) {
    c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
    n1, m1, v1 = BatchNormalization <training_mode = 1> (c1, g1, b1, mean_, variance_)
    r1 = Relu (n1)
    p1 = MaxPool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 0, 1]> (r1)
    c2_ = Conv <kernel_shape = [5, 3], strides = [1, 2], pads = [2, 1, 2, 0]> (p1, w2, c2)
    n2 = GroupNormalization <num_groups = 2> (c2_, g2, b2)
    r2 = Relu (n2)
    c3 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 2> (r2, w3)
    s3 = Add (c3, r2)
    a3 = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (s3)
    pooled = GlobalAveragePool (a3)
    f = Flatten (pooled)
    logits = Gemm (f, w4, b4)
    loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (logits, labels)
}
"""

# Rows and columns that hardly anything divides, and windows that lie differently on equal parts of them.
ODD_IMAGES = """
odd_images (double[6,3,13,9] x, int64[6] labels, double[4,3,3,3] w1, double[4] g1, double[4] b1,
    double[4] mean_, double[4] variance_, double[4,4,3,3] w2, double[6,4,3,3] w3, double[6,6,2,2] w4,
    double[6,6,1,1] w5, double[6,5] w6, double[5] b6) => (double loss) {
    c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
    n1, m1, v1 = BatchNormalization <training_mode = 1> (c1, g1, b1, mean_, variance_)
    r1 = Relu (n1)
    p1 = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (r1)
    c2 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (p1, w2)
    s2 = Add (c2, p1)
    c3 = Conv <kernel_shape = [3, 3], dilations = [2, 1], pads = [1, 1, 1, 1]> (s2, w3)
    r3 = Relu (c3)
    a3 = AveragePool <kernel_shape = [3,2], strides = [2,1], pads = [1,0,1,0], count_include_pad = 1> (r3)
    c4 = Conv <kernel_shape = [2, 2], pads = [0, 0, 1, 1], group = 1> (a3, w4)
    c5 = Conv <kernel_shape = [1, 1], strides = [1, 2]> (c4, w5)
    pooled = GlobalAveragePool (c5)
    f = Flatten (pooled)
    logits = Gemm (f, w6, b6)
    loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (logits, labels)
}
"""

# Windows that spread, norms of windows, and averages that do not count their padding.
SPREAD_IMAGES = """
spread_images (double[6,3,11,8] x, int64[6] labels, double[4,3,3,3] w1, double[4] b1, double[4,6,3,2] w2,
    double[6] b2, double[6,4,2,3] w3, double[4] b3, double[6,4,2,2] w4, double[6,5] w5,
    double[5] b5) => (double loss) {
    c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
    r1 = Tanh (c1)
    a1 = AveragePool <kernel_shape = [3, 3], strides = [2, 1], pads = [1, 1, 1, 1]> (r1)
    t2 = ConvTranspose <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 0, 1]> (a1, w2, b2)
    l2 = LpPool <kernel_shape = [2, 3], strides = [1, 2], pads = [1, 1, 0, 0], p = 3> (t2)
    t3 = ConvTranspose <kernel_shape = [2, 3], strides = [3, 2], output_padding = [1, 0]> (l2, w3, b3)
    r3 = Tanh (t3)
    a3 = AveragePool <kernel_shape = [2, 2], strides = [2, 2], pads = [0, 1, 1, 0]> (r3)
    c4 = Conv <kernel_shape = [2, 2], strides = [2, 1]> (a3, w4)
    pooled = GlobalAveragePool (c4)
    f = Flatten (pooled)
    logits = Gemm (f, w5, b5)
    loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (logits, labels)
}
"""

# An encoder and a decoder that attends to it, of one table: source, target and logits.
TIED_TRANSLATION = """
translation (int64[8,5] source, int64[8,3] target, int64[8,3] labels,
    double[22,8] E, double[8,8] Eq, double[8,8] Ek, double[8,8] Ev, double[8] eg,
    double[8] eb, double[8,8] Dq, double[8,8] Dk,
    double[8,8] Dv, double[8,12] Di, double[12,8] Do, double[8] dg, double[8] db) => (double loss)
<int64[4] heads = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, int64[2] words = {-1, 22}, int64[1] flat = {-1},
 double scale = {0.5}> {
    s = Gather (E, source)
    q0 = MatMul (s, Eq)
    k0 = MatMul (s, Ek)
    v0 = MatMul (s, Ev)
    q1 = Reshape (q0, heads)
    k1 = Reshape (k0, heads)
    v1 = Reshape (v0, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    qk = MatMul (q, k)
    scaled = Mul (qk, scale)
    p = Softmax <axis = -1> (scaled)
    o = MatMul (p, v)
    o1 = Transpose <perm = [0, 2, 1, 3]> (o)
    o2 = Reshape (o1, joined)
    m0 = Add (s, o2)
    memory = LayerNormalization <axis = -1> (m0, eg, eb)
    t = Gather (E, target)
    dq0 = MatMul (t, Dq)
    dk0 = MatMul (memory, Dk)
    dv0 = MatMul (memory, Dv)
    dq1 = Reshape (dq0, heads)
    dk1 = Reshape (dk0, heads)
    dv1 = Reshape (dv0, heads)
    dq = Transpose <perm = [0, 2, 1, 3]> (dq1)
    dk = Transpose <perm = [0, 2, 3, 1]> (dk1)
    dv = Transpose <perm = [0, 2, 1, 3]> (dv1)
    dqk = MatMul (dq, dk)
    dscaled = Mul (dqk, scale)
    dp = Softmax <axis = -1> (dscaled)
    context0 = MatMul (dp, dv)
    context1 = Transpose <perm = [0, 2, 1, 3]> (context0)
    context = Reshape (context1, joined)
    y0 = Add (t, context)
    y = LayerNormalization <axis = -1> (y0, dg, db)
    h0 = MatMul (y, Di)
    h = Tanh (h0)
    f = MatMul (h, Do)
    z = Add (y, f)
    table = Transpose <perm = [1, 0]> (E)
    logits0 = MatMul (z, table)
    logits = Reshape (logits0, words)
    wanted = Reshape (labels, flat)
    loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (logits, wanted)
}
"""
FED = re.compile(r"x|ids|types|mask|labels|source|target")


def _step(
    text: str, optimizer: Optimizer, given: Mapping[str, np.ndarray] | None = None, **options: object
) -> bytes:
    """Return a step of a forward graph. Inputs that nobody feeds are weights; those named `.._` are fixed."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    rng = np.random.default_rng(0)
    given, weights = given or {}, [info for info in model.graph.input if not FED.fullmatch(info.name)]
    for info in weights:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        values = rng.normal(scale=1 / np.sqrt(max(3, np.prod(shape[1:]))), size=shape)
        values += re.fullmatch(r"[ed]?g.?", info.name) is not None  # a gain
        model.graph.initializer.append(numpy_helper.from_array(given.get(info.name, values), info.name))
        model.graph.input.remove(info)
    trained = tuple(info.name for info in weights if not info.name.endswith("_"))
    frozen = tuple(info.name for info in weights if info.name.endswith("_"))
    chosen = ParameterChoice(train=trained, freeze=frozen)
    return _trained(model, optimizer, parameters=chosen, **options)


def _trained(forward: onnx.ModelProto, optimizer: Optimizer, **options: object) -> bytes:
    step = build_training_graph(forward, loss="loss", optimizer=optimizer, **options)  # type: ignore[arg-type]
    return bytes(step.SerializeToString())


def _gpt2(text: str) -> bytes:
    return _step(text, Adam(0.01, epsilon=1e-3), {"causal_": np.triu(np.full((1, 1, 6, 6), -1e4), 1)})


def _normalised_images(text: str) -> bytes:
    return _step(text, Momentum(0.1), {"mean_": np.zeros(4), "variance_": np.ones(4)})


def _translation() -> bytes:
    sizes = {"source_vocab": 24, "target_vocab": 24, "source_steps": 2, "target_steps": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "cells": 4, "embedding": 4}
    forward = build_model("nmt", dtype="float64", batch=SAMPLES, **sizes, **layers)
    return _trained(forward, SGD(0.3))


def _mlp_by(optimizer: str) -> bytes:
    forward = build_model("mlp", dtype="float64", sizes=[6, 8, 5], batch=SAMPLES)
    by = parse_optimizer(optimizer, "0.05", (), None)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=by)
    return bytes(step.SerializeToString())


SLOTTED = (
    "nesterov",
    "rmsprop",
    "adam",
    "adamw",
    "lamb",
    "adafactor",
)  # what reads slots' next values, or norms
WRITTEN: dict[str, tuple[str, Callable[[str], bytes]]] = {
    "convolutions": (CONVOLUTIONS, _normalised_images),
    "odd images": (ODD_IMAGES, _normalised_images),
    "spread images": (SPREAD_IMAGES, lambda text: _step(text, Momentum(0.1))),
    "bert": (BERT, lambda text: _step(text, SGD(0.3))),
    "gpt2": (GPT2, _gpt2),
    "tied translation": (TIED_TRANSLATION, lambda text: _step(text, SGD(0.3), clip_global_norm=0.5)),
}
BUILT: dict[str, Callable[[], bytes]] = {
    "mlp": lambda: training_model("mlp, adagrad"),
    "lm": lambda: training_model("lm, adagrad, clipped"),
    "clipped attention": lambda: bytes(
        attention_step(Momentum(0.1), clip_global_norm=0.1).SerializeToString()
    ),
    "translation": _translation,
    "tied embedding": lambda: training_model("tied embedding"),
    **{f"mlp, {name}": partial(_mlp_by, name) for name in SLOTTED},
}
OPTIMIZED = tuple(f"mlp, {name}" for name in SLOTTED)
MODELS = (
    "mlp",
    "lm",
    "convolutions",
    "odd images",
    "spread images",
    "bert",
    "gpt2",
    "clipped attention",
    "translation",
    "tied translation",
    "tied embedding",
)
OPEN_BATCH = "N"


@cache
def soap_model(name: str) -> bytes:
    """Return a step's bytes, made once."""
    if name in BUILT:
        return BUILT[name]()
    text, build = WRITTEN[name]
    return build(text)


@cache
def open_soap_model(name: str) -> bytes:
    """Return a step's bytes, of one whose batch is left open, as exporters leave it."""
    text, build = WRITTEN[name]
    fed = rf"\[\d+((?:,\d+)*\]\s+(?:{FED.pattern})\b)"
    return build(re.sub(fed, rf"[{OPEN_BATCH}\1", text))
