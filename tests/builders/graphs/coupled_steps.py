"""Training steps whose samples are coupled, as forward graphs in ONNX text: x [8, 4], t [8, 3], W [4, 3].

`H` stands for the scores [8, 3] of each; the loss is the mean square of their distance from t.
"""

import json

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.assemble import TRAINING_KEY
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.builders.graphs.foreign_steps import parse

COUPLED = {
    "roll": """
        first = Slice (y, zero, one, zero)
        rest = Slice (y, one, far, zero)
        h = Concat <axis = 0> (rest, first)""",
    "flip": "h = Slice (y, minus, near, zero, minus)",
    "pairs": """
        yt = Transpose <perm = [1, 0]> (y)
        p = MatMul (y, yt)
        s = Softmax (p)
        h = MatMul (s, y)""",
    "softmax over the batch": "h = Softmax <axis = 0> (y)",
    "cumulative sum": """
        along = Constant <value_int = 0> ()
        h = CumSum (y, along)""",
    "batch statistics": """
        m = ReduceMean <keepdims = 1> (y, zero)
        c = Sub (y, m)
        c2 = Mul (c, c)
        v = ReduceMean <keepdims = 1> (c2, zero)
        safe = Add (v, half)
        root = Sqrt (safe)
        h = Div (c, root)""",
    "sort": """
        k = Constant <value_ints = [8]> ()
        h, i = TopK <axis = 0> (y, k)""",
    "sum by label": """
        z = Sub (y, y)
        label = ArgMax <axis = 1, keepdims = 1> (t)
        shape = Shape (y)
        index = Expand (label, shape)
        h = ScatterElements <axis = 0, reduction = "add"> (z, index, y)""",
    "mask": """
        score = ReduceSum <keepdims = 0> (t, one)
        keep = Greater (score, zero_float)
        weight = Cast <to = 11> (keep)
        column = Unsqueeze (weight, one)
        count = ReduceSum <keepdims = 0> (weight)
        safe = Max (count, unit)
        kept = Mul (y, column)
        h = Div (kept, safe)""",
    "distances": """
        a = Unsqueeze (y, one)
        b = Unsqueeze (y, zero)
        ab = Sub (a, b)
        ab2 = Mul (ab, ab)
        d2 = ReduceSum <keepdims = 0> (ab2, two)
        far_off = Neg (d2)
        near_by = Exp (far_off)
        h = MatMul (near_by, y)""",
}


def coupled_step(kind: str) -> onnx.ModelProto:
    """Return the training step, in float64."""
    if kind == "contrastive":
        return _contrastive_step()
    body = COUPLED[kind]
    forward = parse(
        f"""step (double[8,4] x, double[8,3] t) => (double loss)
        <double[4,3] W, double half = {{0.5}}, double unit = {{1.0}}, double zero_float = {{0.0}},
         int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] minus = {{-1}},
         int64[1] far = {{9223372036854775807}}, int64[1] near = {{-9223372036854775807}}> {{
            y = MatMul (x, W)
            {body}
            d = Sub (h, t)
            sq = Mul (d, d)
            loss = ReduceMean <keepdims = 0> (sq)
        }}"""
    )
    return _trained(forward)


def _contrastive_step() -> onnx.ModelProto:
    """Return the step of a loss that tells pairs of two views apart, batch [8]."""
    forward = parse(
        """step (double[8,4] one, double[8,5] other) => (double loss)
        <double[4,3] W, double[5,3] V, int64[8] labels = {0, 1, 2, 3, 4, 5, 6, 7}, int64[1] last = {1}> {
            a = MatMul (one, W)
            b = MatMul (other, V)
            bt = Transpose <perm = [1, 0]> (b)
            scores = MatMul (a, bt)
            logs = LogSoftmax <axis = 1> (scores)
            column = Unsqueeze (labels, last)
            picked = GatherElements <axis = 1> (logs, column)
            mean = ReduceMean <keepdims = 0> (picked)
            loss = Neg (mean)
        }"""
    )
    return _trained(forward)


def _trained(forward: onnx.ModelProto) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    for tensor in [*forward.graph.initializer]:
        if tensor.name in ("W", "V"):
            forward.graph.initializer.remove(tensor)
    shapes = {"W": (4, 3), "V": (5, 3)}
    read = {name for node in forward.graph.node for name in node.input}
    for name in sorted(read & shapes.keys()):
        forward.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shapes[name]), name))
    inputs = [info for info in forward.graph.input if info.name not in shapes]
    del forward.graph.input[:]
    forward.graph.input.extend(inputs)
    return undeclared(build_training_graph(forward, loss="loss", optimizer=SGD(0.1)))


def undeclared(step: onnx.ModelProto) -> onnx.ModelProto:
    """Let a training step forget where its samples lie."""
    for entry in step.metadata_props:
        if entry.key == TRAINING_KEY:
            facts = json.loads(entry.value)
            facts.pop("sample_axes", None)
            entry.value = json.dumps(facts)
    return step
