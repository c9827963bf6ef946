"""A training graph keeps what only the bodies of its If, Loop and Scan read."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.loss_scaling import StaticScale
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from tests.checks.training_steps import EVERYTHING, facts_of, initial_variables, session, train

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
Y = np.array([0, 2, 1])

# Integer loops stay loops: no gradient passes them.
MAPPED_LABELS = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[3,4] x, int64[3] y) => (float loss) <int64[3] table = {2, 0, 1}>
{
    z = MatMul (x, w) LABELS
    scores = LogSoftmax <axis = 1> (z)
    shape = Constant <value_ints = [3, 1]> () ids = Reshape (labels, shape)
    picked = GatherElements <axis = 1> (scores, ids)
    mean = ReduceMean <keepdims = 0> (picked) loss = Neg (mean)
}"""
LABELS = {
    "Loop, an initializer": """n = Constant <value_int = 2> () yes = Constant <value = bool {1}> ()
        labels = Loop (n, yes, y) <body = b (int64 i, bool c, int64[3] s) => (bool c2, int64[3] s2) {
            c2 = Identity (c) s2 = Gather (table, s) }>""",
    "Loop, a node's result": """n = Constant <value_int = 2> () yes = Constant <value = bool {1}> ()
        three = Constant <value_int = 3> () twice = Add (table, table) made = Mod (twice, three)
        labels = Loop (n, yes, y) <body = b (int64 i, bool c, int64[3] s) => (bool c2, int64[3] s2) {
            c2 = Identity (c) s2 = Gather (made, s) }>""",
    "If within an If": """sum = ReduceSum <keepdims = 0> (y) zero = Constant <value_int = 0> ()
        some = Greater (sum, zero) none = Not (some)
        labels = If (some) <then_branch = a () => (int64[3] p) {
                p = If (none) <then_branch = c () => (int64[3] q) { q = Identity (y) },
                               else_branch = d () => (int64[3] r) { r = Gather (table, y) }> },
            else_branch = b () => (int64[3] t) { t = Identity (y) }>""",
    "Scan": """zero = Constant <value_int = 0> ()
        last, labels = Scan (zero, y) <num_scan_inputs = 1, body =
            b (int64 s, int64 i) => (int64 s2, int64 o) { s2 = Add (s, i) o = Gather (table, i) }>""",
    "Loop, a dropout's result": """n = Constant <value_int = 2> () yes = Constant <value = bool {1}> ()
        numbers = Cast <to = 1> (table) same = Dropout (numbers)
        labels = Loop (n, yes, y) <body = b (int64 i, bool c, int64[3] s) => (bool c2, int64[3] s2) {
            c2 = Identity (c) f = Gather (same, s) s2 = Cast <to = 7> (f) }>""",
}


def model_of(labels: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(MAPPED_LABELS.replace("LABELS", labels))
    model.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return model


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_what_only_a_body_reads_is_kept(labels: str) -> None:
    model = model_of(labels)
    (loss,) = session(model).run(None, {"x": X, "y": Y})

    step = build_training_graph(model, loss="loss", optimizer=SGD(lr=0.5), parameters=EVERYTHING)
    losses, after = train(step, [{"x": X, "y": Y}])

    np.testing.assert_allclose(losses, [loss], rtol=1e-6)
    np.testing.assert_allclose(after["w"], W - 0.5 * numeric_gradient(model), atol=2e-3)


def numeric_gradient(model: onnx.ModelProto) -> np.ndarray:
    forward = onnx.ModelProto()
    forward.CopyFrom(model)
    weights = next(tensor for tensor in forward.graph.initializer if tensor.name == "w")
    forward.graph.initializer.remove(weights)
    forward.graph.input.append(helper.make_tensor_value_info("w", weights.data_type, list(weights.dims)))
    run = session(forward)
    gradient = np.zeros_like(W)
    for place in np.ndindex(W.shape):
        step = np.zeros_like(W)
        step[place] = 1e-2
        high, low = (run.run(None, {"x": X, "y": Y, "w": W + sign * step})[0] for sign in (1, -1))
        gradient[place] = (high - low) / 2e-2
    return gradient


def test_a_body_reads_the_rounded_weight_of_a_float32_master() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        net (float16[3,4] x) => (float loss)
        {
            z = MatMul (x, w) n = Constant <value_int = 2> () yes = Constant <value = bool {1}> ()
            zero = Constant <value_int = 0> ()
            k = Loop (n, yes, zero) <body = b (int64 i, bool c, int64 s) => (bool c2, int64 s2) {
                c2 = Identity (c) small = Abs (w) big = Cast <to = 9> (small)
                all = Cast <to = 7> (big) count = ReduceSum <keepdims = 0> (all) s2 = Add (s, count) }>
            f = Cast <to = 1> (z) kf = Cast <to = 1> (k) m = ReduceMean <keepdims = 0> (f) loss = Mul (m, kf)
        }"""
    )
    model.graph.initializer.append(numpy_helper.from_array((2 * W).astype(np.float16), "w"))
    x = X.astype(np.float16)
    (loss,) = session(model).run(None, {"x": x})

    step = build_training_graph(
        model,
        loss="loss",
        optimizer=SGD(lr=0.5),
        parameters=EVERYTHING,
        update=UpdateOptions(loss_scale=StaticScale(8.0)),
    )
    onnx.checker.check_model(step, full_check=True)
    facts = facts_of(step)

    (first,) = session(step).run([facts["loss"]], {**initial_variables(step), "x": x})

    np.testing.assert_allclose(first, loss, rtol=1e-3)
