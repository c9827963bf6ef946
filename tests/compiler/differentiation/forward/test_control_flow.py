"""If, Loop and Scan in a forward graph: written as plain nodes, and differentiated."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import UnsupportedModel
from tests.checks.training_steps import EVERYTHING, Arrays, facts_of, session

# Inputs a (and b, c) are parameters of random values; y is the result.
CASES = {
    "If_known": """(double[3,4] a, double[3,4] b) => (double[3,4] y) {
        t = Constant <value = bool {1}> ()
        y = If (t) <then_branch = g1 () => (double[3,4] u) { u = Mul (a, b) },
                    else_branch = g2 () => (double[3,4] v) { v = Exp (a) }> }""",
    "If_of_a_shape": """(double[3,4] a, double[3,4] b) => (double[3,4] y) {
        shape = Shape (a) two = Constant <value_int = 3> () zero = Constant <value_int = 0> ()
        rows = Gather (shape, zero) t = Equal (rows, two)
        y = If (t) <then_branch = g1 () => (double[3,4] u) { u = Mul (a, b) },
                    else_branch = g2 () => (double[3,4] v) { v = Exp (a) }> }""",
    "If_of_data": """(double[3,4] a, double[3,4] b) => (double[3,4] y) {
        sum_a = ReduceSum <keepdims = 0> (a) zero = Constant <value = double {0.0}> ()
        t = Greater (sum_a, zero)
        y = If (t) <then_branch = g1 () => (double[3,4] u) { u = Mul (a, b) },
                    else_branch = g2 () => (double[3,4] v) { w = Exp (a) v = Mul (w, b) }> }""",
    "Loop": """(double[3,4] a, double[4,4] b) => (double[3,4] y) {
        n = Constant <value_int = 3> () t = Constant <value = bool {1}> ()
        y, z = Loop (n, t, a) <body = g (int64 i, bool go, double[3,4] h) =>
            (bool more, double[3,4] next, double[3,4] out) {
                more = Identity (go) p = MatMul (h, b) next = Tanh (p) out = Mul (next, a) }> }""",
    "Loop_scan_output": """(double[3,4] a, double[4,4] b) => (double[2,3,4] y) {
        n = Constant <value_int = 2> ()
        z, y = Loop (n, , a) <body = g (int64 i, bool go, double[3,4] h) =>
            (bool more, double[3,4] next, double[3,4] out) {
                more = Identity (go) p = MatMul (h, b) next = Tanh (p)
                f = Cast <to = 11> (i) out = Add (next, f) }> }""",
    "Loop_until": """(double[3,4] a, double[4,4] b) => (double[3,4] y) {
        n = Constant <value_int = 100> () t = Constant <value = bool {1}> ()
        y = Loop (n, t, a) <body = g (int64 i, bool go, double[3,4] h) => (bool more, double[3,4] next) {
                two = Constant <value_int = 2> () more = Less (i, two)
                p = MatMul (h, b) next = Tanh (p) }> }""",
    "Loop_with_If": """(double[3,4] a, double[4,4] b) => (double[3,4] y) {
        n = Constant <value_int = 2> () t = Constant <value = bool {1}> ()
        y = Loop (n, t, a) <body = g (int64 i, bool go, double[3,4] h) => (bool more, double[3,4] next) {
                zero = Constant <value_int = 0> () more = Identity (go) first = Equal (i, zero)
                p = MatMul (h, b)
                next = If (first) <then_branch = g1 () => (double[3,4] u) { u = Tanh (p) },
                                   else_branch = g2 () => (double[3,4] v) { v = Mul (p, h) }> }> }""",
    "Scan": """(double[2,4] a, double[5,2,4] b, double[4,4] c) => (double[5,2,4] y) {
        z, y = Scan (a, b) <num_scan_inputs = 1, body = g (double[2,4] h, double[2,4] x) =>
            (double[2,4] next, double[2,4] out) {
                p = MatMul (h, c) s = Add (p, x) next = Tanh (s) out = Mul (next, x) }> }""",
    "Scan_backwards": """(double[2,4] a, double[2,5,4] b, double[4,4] c) => (double[2,5,4] y) {
        z, y = Scan (a, b) <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
            scan_input_directions = [1], scan_output_directions = [1], body =
            g (double[2,4] h, double[2,4] x) => (double[2,4] next, double[2,4] out) {
                p = MatMul (h, c) s = Add (p, x) next = Tanh (s) out = Mul (next, x) }> }""",
}


def stored(text: str, opset: int = 21) -> onnx.ModelProto:
    """Read a graph, make its inputs initializers, and add total = sum of y squared."""
    text = text.rstrip().removesuffix("}").replace("=> (", "=> (double total, ", 1)
    text += "squared = Mul (y, y) total = ReduceSum <keepdims = 0> (squared) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> test {text}')
    rng = np.random.default_rng(4)
    for value in model.graph.input:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape), value.name))
    del model.graph.input[:]
    return model


def slope(model: onnx.ModelProto, name: str, way: np.ndarray) -> float:
    """Return d total / d t of name + t way."""
    ends = []
    for step in (1e-6, -1e-6):
        moved = onnx.ModelProto()
        moved.CopyFrom(model)
        tensor = next(t for t in moved.graph.initializer if t.name == name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + step * way, name))
        ends.append(float(session(moved).run(["total"], {})[0]))
    return (ends[0] - ends[1]) / 2e-6


def gradients(model: onnx.ModelProto) -> Arrays:
    built = build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    assert not {node.op_type for node in built.graph.node} & {"If", "Loop", "Scan"}
    start = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    state = facts_of(built)["state"]
    after = session(built).run([state[name] for name in start], start)
    return {name: start[name] - value for name, value in zip(start, after, strict=True)}


@pytest.mark.parametrize("opset", [13, 21, 24])
@pytest.mark.parametrize("case", CASES)
def test_gradient_through_control_flow(case: str, opset: int) -> None:
    model = stored(CASES[case], opset)

    for name, gradient in gradients(model).items():
        way = np.random.default_rng(6).normal(size=gradient.shape)
        assert (gradient * way).sum() == pytest.approx(slope(model, name, way), rel=1e-6, abs=1e-6), name


def test_weights_of_a_body_are_trained() -> None:
    text = CASES["Loop"].replace("more = Identity (go)", "more = Identity (go) p2 = Add (h, own)")
    model = stored(text.replace("p = MatMul (h, b)", "p = MatMul (p2, b)"))
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    own = numpy_helper.from_array(np.ones((1, 4)), "own")
    next(a for a in loop.attribute if a.name == "body").g.initializer.append(own)

    built = build_training_graph(model, loss="total", optimizer=SGD(), parameters=EVERYTHING)

    assert {"a", "b", "own"} == facts_of(built)["state"].keys()


def test_computed_trip_count_is_refused() -> None:
    text = CASES["Loop"].replace(
        "n = Constant <value_int = 3> ()", "s = ReduceSum <keepdims = 0> (a) n = Cast <to = 7> (s)"
    )

    with pytest.raises(UnsupportedModel, match="fixed number of steps"):
        build_training_graph(stored(text), loss="total", optimizer=SGD(), parameters=EVERYTHING)


def test_a_branch_that_is_not_taken_spoils_no_gradient() -> None:
    text = """(double[3,4] a, double[3,4] b) => (double[3,4] y) {
        sum_a = ReduceSum <keepdims = 0> (a) limit = Constant <value = double {1000.0}> ()
        t = Greater (sum_a, limit)
        y = If (t) <then_branch = g1 () => (double[3,4] u) { r = Reciprocal (a) u = Log (r) },
                    else_branch = g2 () => (double[3,4] v) { v = Mul (a, b) }> }"""
    model = stored(text)
    zeros = numpy_helper.from_array(np.zeros((3, 4)), "a")
    next(tensor for tensor in model.graph.initializer if tensor.name == "a").CopyFrom(zeros)

    found = gradients(model)

    np.testing.assert_allclose(found["a"], 0)
    np.testing.assert_allclose(found["b"], 0)
