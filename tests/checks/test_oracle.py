"""The oracle finds no wrong tensor in right plans, and names the first wrong node of a broken one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.graph.facts import Facts
from partc.passes.rules import rules_elementwise as point
from partc.passes.rules import sharding_rules
from partc.passes.rules.sharding_rule import ShardingRule
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import Compiled, compile_step, import_text, random_batches
from tests.checks.oracle import Oracle, Wrong
from tests.sampling import sampled

CASES = [
    ("mlp, adagrad", "1x4", "allreduce", "global"),
    ("mlp, momentum, clipped", "2x2", "ps", "per-replica"),
    ("mlp, ignored labels", "1x3", "auto", "global"),
    ("tied embedding", "2x2s", "hybrid", "global"),
    ("lm, adagrad, clipped", "2x2", "hybrid", "global"),
    ("lm, adagrad, clipped", "2x2", "allreduce", "per-replica"),
    ("lm, momentum, time-major", "3x1", "ps", "per-replica"),
    ("lm, sgd, time-major, weighed", "2x4", "ps", "global"),
    ("averages and a counter", "1x2", "auto", "per-replica"),
    ("foreign adam", "2x2", "ps", "global"),
    ("foreign, clipped", "1x2", "allreduce", "global"),
]


@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), sampled(CASES, range(0, len(CASES), 2)))
def test_every_tensor_is_the_single_devices(
    name: str, cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    training = import_training_graph(onnx.ModelProto.FromString(training_model(name)))
    nodes = len(training.graph.nodes)
    oracle = Oracle(training)

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, batch)
    wrong = oracle.first_wrong(compiled, random_batches(compiled.plan, 1, high=7)[0])

    assert wrong is None
    assert oracle.compared > 0.4 * nodes  # the others are constants, or were never needed


# ---------------------------------------------------------------- broken on purpose

STEP = """
step (double[8,4] x, double[8,3] t, double[4,3] W) => (double loss, double[4,3] W_next)
<double lr = {0.1}, double eighth = {0.125}, int64[1] samples = {0}> {
    xs = Mul (x, x)
    mean = ReduceMean <keepdims = 1> (xs, samples)
    root = Sqrt (mean)
    scaled = Div (x, root)
    y = MatMul (scaled, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    st = Transpose <perm = [1, 0]> (scaled)
    dy = Mul (d, eighth)
    dW = MatMul (st, dy)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""


def first_wrong(tmp_path: Path) -> tuple[Wrong | None, Compiled]:
    training = import_text(STEP, loss="loss", sample_axes={"x": 0, "t": 0})
    oracle = Oracle(training)
    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", "global")
    return oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0]), compiled


def test_the_step_is_right_as_it_is(tmp_path: Path) -> None:
    assert first_wrong(tmp_path)[0] is None


def test_a_mean_that_forgets_its_share_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sharding_rules.RULES, "ReduceMean", point.reduce("sum"))

    wrong, _ = first_wrong(tmp_path)

    assert wrong is not None
    assert (wrong.op, wrong.tensor) == ("ReduceMean", "mean")


def test_a_product_that_sums_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(node: gs.Node, facts: Facts) -> ShardingRule:
        return replace(point.matmul(node, facts), combine={"k": "max"})

    monkeypatch.setitem(sharding_rules.RULES, "MatMul", forgetful)

    wrong, _ = first_wrong(tmp_path)

    assert wrong is not None
    assert (wrong.op, wrong.tensor) == ("MatMul", "dW")


def test_a_sum_taken_for_a_maximum_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sharding_rules.RULES, "ReduceMean", point.reduce("max"))

    wrong, _ = first_wrong(tmp_path)

    assert wrong is not None
    assert wrong.tensor == "mean"
    assert wrong.why.startswith("off by")


ROWS = """
step (double[8,1] x, double[3,2] W) => (double loss, double[3,2] W_next) <int64[1] first = {0}> {
    ids2 = Cast <to = 7> (x)
    last = Constant <value_ints = [1]> ()
    ids = Squeeze (ids2, last)
    rows = Gather <axis = 0> (W, ids)
    squares = Mul (rows, rows)
    loss = ReduceMean <keepdims = 0> (squares)
    part = ReduceMean <keepdims = 1> (rows, first)
    W_next = Sub (W, part)
}
"""


def test_a_rank_that_cannot_compute_its_part_ends_the_others_with_its_error(tmp_path: Path) -> None:
    training = import_text(ROWS, loss="loss", sample_axes={"x": 0})
    oracle = Oracle(training)
    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", "global")
    (batch,) = random_batches(compiled.plan, 1)
    batch["x"] = np.ones((8, 1))
    assert oracle.first_wrong(compiled, batch) is None

    batch["x"][7] = 5
    with pytest.raises(Exception, match=r"indices element out of data bounds, idx=5") as failure:
        oracle.first_wrong(compiled, batch)
    assert failure.value.__notes__ == ["raised by rank 1 of 2"]
