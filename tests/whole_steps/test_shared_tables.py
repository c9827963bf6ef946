"""Tables that replicas share by rows are read and trained where they are, by everybody's ids."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Adam, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.passes.layouts import laid_out_graph
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)
from tests.sampling import sampled

NO_SIZES: Mapping[str, int] = {}
ROWS = 23  # and 5 columns: unevenly shared, so by rows
FORWARD = """
forward (int64[8] words, int64[8,3] bags, int64[5] negatives, double[8,4] x) => (double loss)
<double[23,5] table, double[23,5] other, double[4,5] W> {
    word = Gather (table, words)
    bag = Gather (table, bags)
    one = Constant <value_ints = [1]> ()
    mean = ReduceMean <keepdims = 0> (bag, one)
    drawn = Gather (other, negatives)
    y = MatMul (x, W)
    h = Add (word, y)
    t = Tanh (h)
    u = Mul (t, mean)
    across = Transpose <perm = [1, 0]> (drawn)
    scores = MatMul (u, across)
    square = Mul (scores, scores)
    loss = ReduceMean <keepdims = 0> (square)
}
"""
OPTIMIZERS = {"sgd": SGD(0.1), "momentum": Momentum(0.1), "adam": Adam(0.01), "adagrad": Adagrad(0.1)}
CASES = [
    (cluster, strategy, optimizer)
    for cluster, strategy in (
        ("1x2", "fsdp"),
        ("1x3", "fsdp"),
        ("2x2", "fsdp"),
        ("2x2", "fsdp,tensor=2"),
        ("2x2", "pipeline=2,fsdp"),
        ("1x2", "fsdp,microbatches=2"),
    )
    for optimizer in OPTIMIZERS
]


# Each place and each optimizer.
OFTEN = [place for place, case in enumerate(CASES) if case[2] == "adagrad" or case[:2] == ("1x3", "fsdp")]


def compiled_tables(
    folder: Path,
    cluster: str,
    strategy: str | Strategy,
    optimizer: str,
    batch: str = "global",
    text: str = FORWARD,
    sizes: Mapping[str, int] = NO_SIZES,
) -> Compiled:
    model = parse(text)
    rng = np.random.default_rng(0)
    for name, shape in {"table": (ROWS, 5), "other": (ROWS, 5), "W": (4, 5)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    del model.graph.value_info[:]
    step = build_training_graph(model, loss="loss", optimizer=OPTIMIZERS[optimizer])
    return compile_step(import_training_graph(step), folder, cluster, strategy, batch, sizes=sizes)


@pytest.mark.parametrize(("cluster", "strategy", "optimizer"), sampled(CASES, OFTEN))
def test_rows_are_looked_up_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, strategy: str, optimizer: str
) -> None:
    """Also of an uneven number of rows, by ids of samples, by several of each, and by ids that all share."""
    monkeypatch.setattr(laid_out_graph, "LOOKUP_BYTES", -(1 << 20))

    compiled = compiled_tables(tmp_path / "out", cluster, strategy, optimizer)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 4, high=ROWS))


def test_replicas_of_a_batch_of_their_own_look_up_what_all_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laid_out_graph, "LOOKUP_BYTES", -(1 << 20))

    compiled = compiled_tables(tmp_path / "out", "1x2", "fsdp", "sgd", "per-replica")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 4, high=ROWS))


OTHERWISE_DIVIDED = {
    "samples, by both axes": {"Gather:bag": {"out:0": "tensor"}},
    "words, by both axes": {"Gather:word": {"out:0": "tensor"}},
    "columns, unevenly": {"Gather:word": {"out:1": "tensor"}},
}


@pytest.mark.parametrize("splits", OTHERWISE_DIVIDED)
def test_lookups_that_another_axis_divides_are_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, splits: str
) -> None:
    monkeypatch.setattr(laid_out_graph, "LOOKUP_BYTES", -(1 << 20))
    strategy = Strategy(
        MESH_STRATEGY_FORMAT,
        "global",
        {},
        mesh={"data": 2, "tensor": 2},
        variables={name: {"data": AxisSplit(0)} for name in ("table", "other")},
        ops=tuple(OpConfig(op, split=split) for op, split in OTHERWISE_DIVIDED[splits].items()),
    )

    compiled = compiled_tables(tmp_path / "out", "2x2", strategy, "sgd")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 4, high=ROWS))


def test_samples_whose_number_is_open_are_looked_up_in_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laid_out_graph, "LOOKUP_BYTES", -(1 << 20))
    text = FORWARD.replace("int64[8]", "int64[N]").replace("[8,", "[N,")

    compiled = compiled_tables(tmp_path / "out", "1x2", "fsdp", "sgd", text=text, sizes={"N": 8})

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 4, high=ROWS))


def test_no_rank_has_a_table_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its slots, whose rows updates read and write where they are."""
    gathered = {}
    for lookup_bytes in (-(1 << 20), 1 << 20):
        monkeypatch.setattr(laid_out_graph, "LOOKUP_BYTES", lookup_bytes)
        compiled = compiled_tables(tmp_path / str(lookup_bytes), "1x2", "fsdp", "adagrad")
        lowered = compiled.compilation.lowered.nodes
        sent = [node.inputs[0].name for node in lowered if node.op in ("AllGather", "AllGatherRows")]
        gathered[lookup_bytes] = {"table", "other", "W"} & {name.partition(".")[0] for name in sent}

    assert list(gathered.values()) == [{"W"}, {"table", "other", "W"}]
