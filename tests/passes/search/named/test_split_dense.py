"""One weird trick: convolutions divide samples, dense layers columns; no dense gradient is summed."""

from collections import Counter
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import read_strategy
from partc.runtime.errors import BadUsage
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Start
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)

DENSE = {"W1": (32, 24), "c1": (24,), "W2": (8, 24), "c2": (8,)}
SHAPES = {"K": (4, 2, 3, 3), "k": (4,), **DENSE}
FORWARD = """
forward (float[8,2,4,8] x) => (float[8,8] logits) {
    a = Conv <pads = [1, 1, 1, 1]> (x, K, k)
    r = Relu (a)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    flat = Flatten (p)
    y = MatMul (flat, W1)
    h = Add (y, c1)
    z = Relu (h)
    logits = Gemm <transB = 1> (z, W2, c2)
}
"""


NO_DENSE = """
forward (float[8,2,4,8] x) => (float[8,4] logits) {
    a = Conv (x, K, k)
    pooled = GlobalAveragePool (a)
    logits = Flatten (pooled)
}
"""


@cache
def conv_net(text: str = FORWARD) -> onnx.ModelProto:
    forward = parse(text)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        if not any(name in node.input for node in forward.graph.node):
            continue
        values = rng.normal(scale=0.4, size=shape).astype(np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.05))


def compiled_net(
    folder: Path, cluster: str, strategy: object = "one-weird-trick", batch: str = "global"
) -> Compiled:
    training = import_training_graph(conv_net())
    return compile_step(training, folder / "out", cluster, strategy, batch)  # type: ignore[arg-type]


def sent(compiled: Compiled) -> Counter[tuple[str, int]]:
    """Return (kind, payload bytes) of all communications."""
    starts = [i for i in compiled.plan.instructions if isinstance(i, Start)]
    return Counter((start.kind, start.payload_bytes) for start in starts)


@pytest.mark.parametrize(
    "cluster", ["1x2", "2x2", "1x3", "1x5"]
)  # 3 and 5 divide neither samples nor columns
def test_a_convolutional_net_trains_as_one_device(cluster: str, tmp_path: Path) -> None:
    compiled = compiled_net(tmp_path, cluster)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=3))


@pytest.mark.parametrize(("cluster", "workers"), [("1x2", 2), ("2x2", 4)])
def test_a_worker_keeps_columns_of_dense_layers_and_whole_kernels(
    cluster: str, workers: int, tmp_path: Path
) -> None:
    compiled = compiled_net(tmp_path, cluster)

    shapes = {variable.name: variable.shape for variable in compiled.plan.variables}
    parts = {
        piece.variable: prod(shapes[piece.variable]) // prod(local_shape(shapes[piece.variable], piece.box))
        for piece in compiled.plan.ranks[-1].pieces
        if shapes[piece.variable]
    }
    for name in SHAPES:
        kept = {variable: count for variable, count in parts.items() if variable.split(".")[0] == name}
        assert set(kept.values()) == {workers if name in DENSE else 1}


@pytest.mark.parametrize("cluster", ["1x2", "2x2"])
def test_no_gradient_of_a_dense_layer_is_summed_between_workers(cluster: str, tmp_path: Path) -> None:
    compiled = compiled_net(tmp_path, cluster)

    kernels_bytes = sum(prod(shape) for name, shape in SHAPES.items() if name not in DENSE) * 4
    passed_back = {("reduce_scatter", 8 * 24 * 4), ("reduce_scatter", 8 * 32 * 4)}  # to each layer's input
    summed = {(kind, n) for kind, n in sent(compiled) if kind in ("all_reduce", "reduce_scatter")}
    loss_bytes = 4  # in a bucket with kernels, for nobody waits for either
    assert summed == {("all_reduce", kernels_bytes + loss_bytes), *passed_back}
    # What is gathered is activations: none is as large as the smaller weight.
    workers = len(compiled.plan.ranks)
    gathered = sorted(n for kind, n in sent(compiled).elements() if kind == "all_gather_rows" and n)
    assert gathered == [8 * 24 * 4 // workers, 8 * 32 * 4 // workers]
    # Of logits and of their gradient each worker has columns, and wants samples: what it lacks of these.
    exchanged = [n for kind, n in sent(compiled).elements() if kind == "exchange"]
    assert exchanged == [8 * 8 * 4 * (workers - 1) // workers] * 2


def test_each_layer_gathers_its_input_once_for_both_ways(tmp_path: Path) -> None:
    compiled = compiled_net(tmp_path, "1x2")

    gathered = [label.removeprefix("AllGatherRows ") for label in compiled.started("all_gather_rows")]
    assert [name.partition(".")[0] for name in gathered] == ["flat", "z"]
    exchanged = [label.removeprefix("Exchange ") for label in compiled.started("exchange")]
    assert exchanged == ["logits", "loss/LogSoftmax/gradient/Sub"]


def test_the_name_is_written_as_an_ordinary_strategy(tmp_path: Path) -> None:
    named = compiled_net(tmp_path / "named", "1x2")

    again = compiled_net(tmp_path / "again", "1x2", read_strategy(named.folder.path / "strategy.json"))

    strategy = named.compilation.strategy
    assert strategy.mesh == {"data": 2}
    assert {name: splits["data"].axis for name, splits in strategy.variables.items()} == {
        "W1": 1,
        "c1": 0,
        "W2": 0,
        "c2": 0,
    }
    assert {op.op: op.split for op in strategy.ops}["MatMul:y"] == {"out:1": "data"}
    assert again.plan.instructions == named.plan.instructions


@pytest.mark.parametrize(
    ("cluster", "strategy", "batch", "what", "fix"),
    [
        ("1x2", "one-weird-trick", "per-replica", "samples of all workers together", "leave --batch out"),
        ("1x2", "one-weird-trick,tensor=2", "global", "no strategy", "write one-weird-trick alone"),
        ("1x2", "fsdp,one-weird-trick", "global", "no strategy", "write one-weird-trick alone"),
        ("1x2", "one-weird-trick=2", "global", "no strategy", "write one-weird-trick alone"),
    ],
)
def test_what_it_cannot_mean_is_refused(
    cluster: str, strategy: str, batch: str, what: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(BadUsage) as refused:
        compiled_net(tmp_path, cluster, strategy, batch)

    assert what in refused.value.what
    assert "--strategy" in refused.value.at
    assert fix in refused.value.fix


def test_a_step_without_dense_layers_is_refused(tmp_path: Path) -> None:
    training = import_training_graph(conv_net(NO_DENSE))

    with pytest.raises(BadUsage, match="no dense layer has columns") as refused:
        compile_step(training, tmp_path / "out", "1x2", "one-weird-trick", "global")

    assert "data=2" in refused.value.fix


def test_a_weight_that_is_added_to_a_constant_is_left_whole(tmp_path: Path) -> None:
    model = parse(
        "step (float[8,4] x) => (float loss) <float[4,4] W, float[4,4] shift> "
        "{ w = Add (shift, W) y = MatMul (x, w) z = Mul (y, y) loss = ReduceMean <keepdims = 0> (z) }"
    )
    for name in ("W", "shift"):
        model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), name))
    choice = ParameterChoice(train=("W",))
    step = build_training_graph(model, loss="loss", optimizer=SGD(0.1), parameters=choice)

    with pytest.raises(BadUsage, match="no dense layer has columns"):
        compile_step(import_training_graph(step), tmp_path / "out", "1x2", "one-weird-trick", "global")
