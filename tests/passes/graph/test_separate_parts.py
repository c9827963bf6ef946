"""What is computed of the parts of a concatenation: the same results, and nothing reads the whole."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.passes.graph.expand_normalised import can_expand, expand
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.separate_parts import ReadOrder, Separation, can_separate, follow_parts, separate
from partc.passes.graph.training_graph import TrainingGraph
from tests.builders.graphs.run_graphs import graph_of, run_graph

HEAD = "step (double[4,1] a, double[4,6] b, double[4,3] c)"
CONSTANTS = """<int64[1] axis = {1}, int64[3] sizes = {1, 6, 3}, int64[1] first = {1}, int64[1] last = {7},
    int64[4] around = {0, 1, 0, 3}, double[10] gains = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, double two = {2}>"""
JOINED = "x = Concat <axis = 1> (a, b, c)"

# What is computed of x, and what comes of it.
APART = {
    "points and a pick": ("y", "t = Tanh (x) u = Mul (t, two) y = Slice (u, first, last, axis)"),
    "a sum": ("y", "t = Exp (x) y = ReduceSum <keepdims = 0> (t, axis)"),
    "extremes": ("y, z", "y = ReduceMax (x, axis) z = ReduceMin <keepdims = 0> (x, axis)"),
    "all of them": ("y, z, w", "t = Neg (x) y, z, w = Split <axis = 1> (t, sizes)"),
    "turned": ("y", "t = Transpose <perm = [1, 0]> (x) y = ReduceSum <keepdims = 0> (t, rows)"),
    "sums over everything": ("y", "y = ReduceSum <keepdims = 0> (x)"),
    "with itself": ("y", "t = Tanh (x) u = Mul (t, x) y = ReduceSum (u, axis)"),
    "two of one": ("y, z", "y = Slice (x, first, last, axis) z = Slice (x, first, last, axis)"),
    "normalised": ("y", "p = LogSoftmax <axis = 1> (x) y = Slice (p, first, last, axis)"),
    "a gradient": (
        "z",
        "p = Softmax <axis = 1> (x) y = Slice (p, first, last, axis) d = Pad (y, around)"
        " s = ReduceSum (d, axis) m = Mul (p, s) e = Sub (d, m) z, w, v = Split <axis = 1> (e, sizes)",
    ),
    "read whole behind a sum": ("y, z", "t = Tanh (x) y = ReduceSum (t, axis) z = Mul (t, gains)"),
}

# What needs the whole: of each its op.
WHOLE = {
    "other numbers of each entry": ("y", "y = Mul (x, gains) z = ReduceSum (x, axis)", "Mul"),
    "across the ends of parts": ("y", "s = ReduceSum (x, axis) y = Slice (x, axis, sizes2, axis)", "Slice"),
    "a running sum": ("y", "one = Constant <value_int = 1> () y = CumSum (x, one)", "CumSum"),
    "places": ("y", "y = ArgMax <axis = 1> (x)", "ArgMax"),
    "means": ("y", "y = ReduceMean (x, axis)", "ReduceMean"),
}


def step(outputs: str, body: str) -> TrainingGraph:
    kinds = ", ".join(f"{'int64' if 'ArgMax' in body else 'double'} {name}" for name in outputs.split(", "))
    constants = CONSTANTS.replace(">", ", int64[1] rows = {0}, int64[1] sizes2 = {4}>")
    copies = " ".join(f"{name} = Identity ({name}0)" for name in outputs.split(", "))
    renamed = " ".join(_renamed(word, outputs.split(", ")) for word in body.split(" "))
    training = graph_of(f"{HEAD} => ({kinds}) {constants} {{ {JOINED} {renamed} {copies} }}")
    for node in training.graph.nodes:
        node.name = node.outputs[0].name
    return training


def _renamed(word: str, outputs: list[str]) -> str:
    """Results are copied to outputs, so that what makes them may go."""
    bare = word.strip("(),")
    return word.replace(bare, f"{bare}0") if bare in outputs else word


def separation(training: TrainingGraph) -> Separation:
    facts = infer_facts(training, {})
    concat = next(node for node in training.graph.nodes if node.op == "Concat")
    return follow_parts(ReadOrder(training.graph), concat, facts)


def in_primitives(training: TrainingGraph) -> TrainingGraph:
    facts = infer_facts(training, {})
    expand(
        training,
        [n.name for n in training.graph.nodes if n.op.endswith("Softmax") and can_expand(n, facts)],
        facts,
    )
    return training


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(4, size)) for name, size in (("a", 1), ("b", 6), ("c", 3))}


@pytest.mark.parametrize(("outputs", "body"), APART.values(), ids=APART)
def test_parts_give_what_the_whole_gives(outputs: str, body: str) -> None:
    training = step(outputs, body)
    expected = run_graph(training, feeds())
    assert can_separate(separation(training), infer_facts(training, {}))
    found = separation(in_primitives(training))
    assert found.is_useful

    separate(training, found, infer_facts(training, {}))

    result = run_graph(training, feeds())
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-13)
    assert not any(_reads_concatenation(node) for node in training.graph.nodes if node.op != "Mul")


def _reads_concatenation(node: gs.Node) -> bool:
    return any(source.op == "Concat" for tensor in node.inputs for source in tensor.inputs)


@pytest.mark.parametrize(("outputs", "body", "op"), WHOLE.values(), ids=WHOLE)
def test_what_needs_the_whole_is_told(outputs: str, body: str, op: str) -> None:
    found = separation(step(outputs, body))

    assert op in {node.op for node in found.whole}
    assert not found.is_useful


def test_zeros_are_not_put_for_a_part_in_a_product() -> None:
    """A Gemm takes no scalar: where what it adds is no zero, the product of a part of zeros is needed."""
    body = (
        "p = Slice (x, first, last, axis) q = Tanh (p) d = Pad (q, around) dt = Transpose <perm = [1, 0]> (d)"
        " xt = Transpose <perm = [1, 0]> (x) bt = Transpose <perm = [1, 0]> (b) four = MatMul (b, bt)"
        " g = Gemm (dt, four, xt) y = ReduceSum (g, rows)"
    )
    found = separation(step("y", body))

    assert "Gemm" in {node.op for node in found.whole}


def test_a_sum_of_parts_that_are_zero_leaves_them_out() -> None:
    training = in_primitives(step(*APART["a gradient"]))

    separate(training, separation(training), infer_facts(training, {}))

    sums = [node for node in training.graph.nodes if "s/" in node.name or node.outputs[0].name == "s"]
    assert sum(node.op == "ReduceSum" for node in training.graph.nodes) == 3 + 1, sums
    assert not any(node.op == "Pad" for node in training.graph.nodes)
