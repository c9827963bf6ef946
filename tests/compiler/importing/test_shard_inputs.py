"""Graphs that choose their own part of the data, by the number of shards and the replica's own."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import partc
from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.importing.shard_inputs import create_num_shards_and_shard_id
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.asynchronous.in_process import train_sessions_in_process
from partc.runtime.errors import BadModel, BadUsage
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.members import shard_values
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Run
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    cluster_of,
    compile_step,
    random_batches,
)

ROWS = 12
# Every replica reads its own rows of what the graph holds: rows [i k, (i + 1) k) with k = ROWS / n.
SHARDED = f"""
step (int64 n, int64 i, double[3,1] W) => (double loss, double[3,1] W_next)
<int64 all = {{{ROWS}}}, int64[1] axis = {{0}}, int64[1] one = {{1}}, double rate = {{0.1}}> {{
    k = Div (all, n)
    begin = Mul (i, k)
    end = Add (begin, k)
    begins = Reshape (begin, one)
    ends = Reshape (end, one)
    x = Slice (data, begins, ends, axis)
    y = MatMul (x, W)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, y)
    part = Mul (rate, dW)
    W_next = Sub (W, part)
}}
"""
DECLARED = {"n": "num_shards", "i": "shard_id"}
DATA = np.random.default_rng(0).normal(size=(ROWS, 3))
START = np.array([[1.0], [-2.0], [0.5]])


def sharded_model(shards: dict[str, str] | None = None, text: str = SHARDED) -> onnx.ModelProto:
    model = parse(text)
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(DATA, "data"), onnx.numpy_helper.from_array(START, "W")]
    )
    gradients = {"W": GradientTensors(dense="dW")}
    bindings = Bindings(state={"W": "W_next"}, loss="loss", gradients=gradients, shards=shards or DECLARED)
    write_bindings(model, bindings)
    return model


def sharded() -> TrainingGraph:
    return import_training_graph(sharded_model())


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("cluster", ["2x2", "1x3", "2x2s"])
def test_every_replica_reads_its_own_shard(strategy: str, cluster: str, tmp_path: Path) -> None:
    done = compile_step(sharded(), tmp_path / "out", cluster, strategy)

    after = train_in_process(done.folder, [{}]).variables["W"]

    expected = START - 0.1 * DATA.T @ (DATA @ START) / done.plan.replicas
    np.testing.assert_allclose(after, expected, rtol=1e-12)
    assert_trains_as_one_device(done, [{}] * 3)


def test_replicas_share_their_segments_and_nobody_feeds_the_shard(tmp_path: Path) -> None:
    done = compile_step(sharded(), tmp_path / "out", "2x2", "allreduce")

    assert done.plan.data_inputs == ()
    assert [tuple(shard_values(done.plan, rank).values()) for rank in done.plan.ranks] == [
        (4, 0),
        (4, 1),
        (4, 2),
        (4, 3),
    ]
    runs = [i for i in done.plan.instructions if isinstance(i, Run)]
    assert len({run.segment for run in runs}) == len(list((done.folder.path / "segments").iterdir()))


def test_a_forward_graph_declares_them_and_grad_keeps_them(tmp_path: Path) -> None:
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=4, dtype="float64")
    number, own = create_num_shards_and_shard_id()
    forward.graph.input.extend([number, own])
    # Each replica scales its samples by its own number, from 1.
    forward.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "one"))
    double = onnx.TensorProto.DOUBLE
    (x,) = [value.name for value in forward.graph.input if value.name not in (number.name, own.name)]
    nodes = [
        helper.make_node("Add", [own.name, "one"], ["place"]),
        helper.make_node("Cast", ["place"], ["factor"], to=double),
        helper.make_node("Mul", [x, "factor"], ["scaled"]),
    ]
    for node in forward.graph.node:
        node.input[:] = ["scaled" if name == x else name for name in node.input]
    rest = list(forward.graph.node)
    del forward.graph.node[:]
    forward.graph.node.extend([*nodes, *rest])
    train = partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.Momentum(0.1))

    done = compile_step(import_training_graph(train), tmp_path / "out", "2x2", "ps")

    assert {given.name for given in done.plan.shard_inputs} == {own.name, number.name}
    assert_trains_as_one_device(done, random_batches(done.plan, 3))


def test_one_batch_for_all_has_no_shards(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="leave --batch out"):
        compile_step(sharded(), tmp_path / "out", batch="global")


def test_a_shard_that_is_no_input_is_refused() -> None:
    with pytest.raises(BadModel, match="name inputs among"):
        import_training_graph(sharded_model({"k": "shard_id"}))


def test_asynchronous_workers_read_shards_of_their_own(tmp_path: Path) -> None:
    """Each is alone in its session, and still one of several; at a rate of zero the order does not matter."""
    still = import_training_graph(sharded_model(text=SHARDED.replace("rate = {0.1}", "rate = {0.0}")))
    options = Options(strategy="ps", asynchronous=True)
    compile_graph(still, cluster_of("1x3"), tmp_path / "out", options)

    losses = train_sessions_in_process(read_plan_folder(tmp_path / "out"), [{}]).losses

    of_rows = (DATA @ START) ** 2
    for worker in range(3):
        assert losses[worker] == [pytest.approx(of_rows[4 * worker : 4 * worker + 4].mean())]
