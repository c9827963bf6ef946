"""Optional outputs: those that nobody reads are not made, those that the graph returns are."""

from pathlib import Path

import pytest

from partc.compiler.importing.bindings import Bindings
from partc.compiler.importing.drop_unread_outputs import drop_unread_outputs
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.checks.oracle import Oracle

LSTM = "Y, h, c = LSTM <hidden_size = 2> (x, W, R)"
CASES = {
    f"{LSTM} y = Abs (Y)": ["Y"],
    f"{LSTM} y = Abs (h)": ["Y", "h"],
    f"{LSTM} y = Abs (c)": ["Y", "", "c"],
    f"yes = Constant <value = bool {{1}}> () {LSTM} "
    "y = If (yes) <then_branch = g () => (float[1,2,2] t) { t = Abs (h) }, "
    "else_branch = g () => (float[1,2,2] e) { e = Neg (h) }>": ["Y", "h"],
    "k = Constant <value_ints = [1]> () y, i = TopK (x, k)": ["y", "i"],
    f"{LSTM} y = Abs (Y) unread = Abs (h)": ["Y"],
}


@pytest.mark.parametrize("nodes", CASES)
def test_only_what_is_optional_and_unread_is_dropped(nodes: str) -> None:
    model = parse(f"step (float[3,2,4] x, float[1,8,4] W, float[1,8,2] R) => (float[a,b,c] y) {{ {nodes} }}")

    drop_unread_outputs(model)

    (node,) = [node for node in model.graph.node if node.op_type in ("LSTM", "TopK")]
    assert list(node.output) == CASES[nodes]


def test_what_is_named_apart_from_the_outputs_is_kept() -> None:
    text = (
        f"step (float[3,2,4] x, float[1,8,4] W, float[1,8,2] R) => (float[a,b,c] y) {{ {LSTM} y = Abs (Y) }}"
    )
    model = parse(text)

    drop_unread_outputs(model, Bindings(loss="c").tensors)

    assert list(model.graph.node[0].output) == ["Y", "", "c"]


@pytest.mark.parametrize("strategy", ["data=2", "tensor=2", "spatial=2", "data=2,spatial=2"])
def test_indices_that_the_graph_returns_count_through_the_whole_batch(strategy: str, tmp_path: Path) -> None:
    model = parse(
        """
        step (float[4,2,8,8] x, float[4,2,3,3] K) => (float loss, float[4,2,3,3] K_next, int64[4,4,4,4] i) {
            c = Conv <pads = [1,1,1,1]> (x, K)
            y, i = MaxPool <kernel_shape = [2,2], strides = [2,2]> (c)
            loss = ReduceMean <keepdims = 0> (y)
            K_next = Sub (K, loss) }"""
    )
    step = import_training_graph(model, GraphOptions(state={"K": "K_next"}, loss="loss"), needs_initial=False)
    oracle = Oracle(step)

    compiled = compile_step(step, tmp_path / "out", "2x2" if "," in strategy else "1x2", strategy, "global")

    assert oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0], 1e-5) is None


def test_an_attention_whose_other_outputs_nobody_reads_is_compiled(tmp_path: Path) -> None:
    model = parse(
        """step (float[4,5,6] x, float[6,6] W) => (float loss, float[6,6] W_next) {
            v = MatMul (x, W)
            y, key, value, scores = Attention <q_num_heads = 3, kv_num_heads = 3, is_causal = 1> (x, x, v)
            loss = ReduceMean <keepdims = 0> (y)
            W_next = Sub (W, loss) }""",
        opset=23,
    )
    step = import_training_graph(model, GraphOptions(state={"W": "W_next"}, loss="loss"), needs_initial=False)
    oracle = Oracle(step)

    compiled = compile_step(step, tmp_path / "out", "1x2", "data=2", "global")

    assert oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0], 1e-5) is None
