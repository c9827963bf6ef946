"""Imported steps in fewer nodes, with the same results."""

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest

from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.importing.import_training import import_training_graph, read_training_graph
from partc.passes.graph.simplify import simplify
from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.passes.roles.find_gradients import find_gradients
from tests.builders.graphs.foreign_steps import SGD, import_step, parse

FIXTURES = Path(__file__).parents[2] / "fixtures"
HEAD = "step (float[8,4] x, float[4,3] W) => (float loss, float[4,3] W_next)"
TWO_GRADIENTS = """
step (float[8,4] x, float[4,3] W, float[3] v) => (float loss, float[4,3] W_next, float[3] v_next) {
    y = MatMul (x, W)
    loss = ReduceMean <keepdims = 0> (y)
    t = Transpose <perm = [1, 0]> (x)
    dW = MatMul (t, y)
    size = ReduceMean <keepdims = 0> (dW)
    dv = Mul (v, size)
    again = ReduceMean <keepdims = 0> (dW)
    part = Mul (dW, again)
    W_next = Sub (W, part)
    v_next = Sub (v, dv)
}
"""


def lines(training: TrainingGraph) -> list[str]:
    """Return the graph's nodes as text."""
    return [
        f"{node.outputs[0].name} = {node.op} ({', '.join(tensor.name for tensor in node.inputs)})"
        for node in training.graph.nodes
    ]


def imported(nodes: str, head: str = HEAD, constants: str = "") -> list[str]:
    """Return the nodes that are left of a step without gradients, but for the last, its loss."""
    return lines(simplified(f"{head} {constants} {{ {nodes} loss = ReduceSum <keepdims = 0> (y) }}"))[:-1]


def simplified(text: str) -> TrainingGraph:
    training = import_step(text)
    simplify(training)
    return training


def test_equal_nodes_are_merged_and_so_are_their_readers() -> None:
    nodes = (
        "a = MatMul (x, W) b = MatMul (x, W) ta = Tanh (a) tb = Tanh (b) y = Sub (ta, tb) W_next = Abs (W)"
    )

    assert imported(nodes) == ["a = MatMul (x, W)", "ta = Tanh (a)", "y = Sub (ta, ta)", "W_next = Abs (W)"]


def test_equal_constants_have_equal_readers_but_other_values_and_attributes_tell_nodes_apart() -> None:
    constants = "<float one = {1.0}, float also = {1.0}, float two = {2.0}>"
    nodes = """a = Add (x, one) b = Add (x, also) c = Add (x, two) d = Softmax <axis = 0> (x)
        e = Softmax <axis = 1> (x) y = Sum (a, b, c, d, e) W_next = Abs (W)"""

    assert imported(nodes, constants=constants)[-2] == "y = Sum (a, a, c, d, e)"


def test_what_small_constants_make_is_a_constant() -> None:
    constants = "<float one = {1.0}, float two = {2.0}>"
    nodes = "c = Add (one, two) d = Identity (c) e = Sqrt (d) y = Mul (x, e) W_next = Mul (W, c)"

    training = simplified(f"{HEAD} {constants} {{ {nodes} loss = ReduceSum <keepdims = 0> (y) }}")

    assert lines(training)[:2] == ["y = Mul (x, e)", "W_next = Mul (W, c)"]
    assert training.graph.tensors()["e"].values == np.sqrt(np.float32(3))


def test_a_large_tensor_is_not_made_of_a_small_one() -> None:
    constants = "<int64[2] shape = {4, 3}, float two = {2.0}>"
    nodes = "zeros = ConstantOfShape (shape) y = MatMul (x, zeros) W_next = Add (W, zeros)"

    assert imported(nodes, constants=constants)[0] == "zeros = ConstantOfShape (shape)"


def test_what_variables_make_stays_with_each_reader() -> None:
    nodes = "a = Mul (W, W) b = Mul (W, W) c = Sub (a, b) y = MatMul (x, c) W_next = Abs (W)"

    assert imported(nodes)[:3] == ["a = Mul (W, W)", "b = Mul (W, W)", "c = Sub (a, b)"]


def test_sizes_of_data_do_not_make_zeros_common() -> None:
    nodes = """sa = Shape (x) sb = Shape (x) za = ConstantOfShape (sa) zb = ConstantOfShape (sb)
        y = Sum (x, za, zb) W_next = Abs (W)"""

    assert imported(nodes)[-2] == "y = Sum (x, za, zb)"


def test_outputs_keep_their_names_though_they_are_equal() -> None:
    head = "step (float[8,4] x, float[4,3] W) => (float loss, float[8,4] y, float[8,4] z, float[4,3] W_next)"

    assert imported("y = Tanh (x) z = Tanh (x) W_next = Abs (W)", head)[1] == "z = Tanh (x)"


def test_what_equals_a_gradient_is_not_averaged_with_it() -> None:
    """Per replica, the metric is the mean of the replicas' norms, not the norm of the mean."""
    text = SGD.replace("(float loss,", "(float loss, float norm,").replace(
        "W_next =", "again = MatMul (xt, dy) norm = ReduceSumSquare <keepdims = 0> (again) W_next ="
    )
    training = import_step(text)
    find_gradients(training)

    simplify(training)

    assert training.gradients["W"].dense == "dW"
    assert "again = MatMul (xt, dy)" in lines(training)


def test_the_update_shares_nothing_with_the_main_computation() -> None:
    """One reads a replica's own gradient, on the way to a second one; the other the average."""
    training = import_step(TWO_GRADIENTS)
    training.gradients = {"W": Gradient("W", "dW"), "v": Gradient("v", "dv")}

    simplify(training)

    assert {"size = ReduceMean (dW)", "again = ReduceMean (dW)"} <= set(lines(training))


def test_a_recorded_gradient_stays_though_the_update_reads_its_rows_alone() -> None:
    model = parse(TWO_GRADIENTS.replace("dv =", "dense = Neg (dW) dv ="))
    recorded = {"W": GradientTensors(dense="dense")}
    write_bindings(model, Bindings({"W": "W_next", "v": "v_next"}, gradients=recorded))
    training = read_training_graph(model, needs_initial=False)
    training.gradients = {"W": Gradient("W", "dense", None, "dW")}

    simplify(training)

    assert "dense = Neg (dW)" in lines(training)


def test_a_body_reads_the_node_that_stays() -> None:
    nodes = """a = Tanh (x) b = Tanh (x) big = ReduceMax <keepdims = 0> (x) low = ReduceMin <keepdims = 0> (x)
        is_so = Less (low, big) y = If (is_so) <then_branch = g1 () => (float[8,4] t) { t = Sub (b, a) },
        else_branch = g2 () => (float[8,4] e) { e = Neg (b) }> W_next = Abs (W)"""
    training = simplified(f"{HEAD} {{ {nodes} loss = ReduceSum <keepdims = 0> (y) }}")

    (branch,) = [node for node in training.graph.nodes if node.op.startswith("If")]

    assert {tensor.name for tensor in branch.inputs} == {"is_so", "a"}


@pytest.mark.parametrize(("name", "at_most"), [("pytorch_step_float32", 141), ("jax_step", 87)])
def test_a_foreign_step_gets_smaller_and_makes_the_same(name: str, at_most: int) -> None:
    training = import_training_graph(FIXTURES / f"{name}.onnx")
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.normal(size=v.shape).astype(v.dtype) for v in training.variables.values()}
    for data in training.data_inputs.values():
        feeds[data.name] = rng.integers(0, 5, data.shape).astype(data.dtype)

    simplified = gs.export_onnx(training.graph)
    simplified.ir_version = 10
    expected, found = (results(model, feeds) for model in (training.source, simplified.SerializeToString()))

    assert len(onnx.ModelProto.FromString(training.source).graph.node) > at_most >= len(training.graph.nodes)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_simplified_step_is_left_alone() -> None:
    training = import_training_graph(FIXTURES / "pytorch_step_float32.onnx")
    before = lines(training)

    simplify(training)

    assert lines(training) == before


def results(model: bytes, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))
