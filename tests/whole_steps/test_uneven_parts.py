"""Sizes that do not divide: earlier parts have one entry more, and means weigh true counts."""

from itertools import product
from pathlib import Path

import msgspec
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.models.catalogue import build_model
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import BadStrategy, UnsupportedModel
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Plan
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    forced,
    import_text,
    random_batches,
)
from tests.checks.oracle import Oracle
from tests.sampling import sampled

# Rows of four entries made one axis, of which some are read by place.
PICKED = """
step (double[10,4] x, double[4,3] W) => (double loss, double[4,3] W_next)
<int64[1] flat = {-1}, int64[3] places = {2, 13, 39}> {
    t = Tanh (x)
    entries = Reshape (t, flat)
    picked = Gather (entries, places)
    loss = ReduceSum <keepdims = 0> (picked)
    part = Mul (W, picked)
    W_next = Sub (W, part)
}
"""

# Rows of a table by words of several places, whose gradients replicas lay one behind the other.
WORDS = """
step (int64[6,5] ids, double[11,4] E) => (double loss, double[11,4] E_next)
<int64[2] flat = {-1, 4}, int64[2] column = {-1, 1}, int64[2] table = {11, 4}> {
    rows = Gather (E, ids)
    t = Tanh (rows)
    loss = ReduceSum <keepdims = 0> (t)
    slices = Reshape (t, flat)
    places = Reshape (ids, column)
    nothing = ConstantOfShape <value = double[1] {0}> (table)
    dE = ScatterND <reduction = "add"> (nothing, places, slices)
    E_next = Sub (E, dE)
}
"""

LM = {"vocab": 23, "embedding": 7, "cells": 5, "projection": 6, "steps": 3, "samples": 9, "dtype": "float64"}

# A mean over samples that no gradient rule divides: what each rank has counts by its samples.
MEANS = """
step (double[7,5] x, double[5,3] W, double[3] m) => (double loss, double[5,3] W_next, double[3] m_next)
<double rate = {0.1}, int64[1] samples = {0}, int64[2] both = {0, 1}> {
    y = MatMul (x, W)
    mean = ReduceMean <keepdims = 0> (y, samples)
    loss = ReduceMean <keepdims = 0> (y, both)
    m_next = Add (m, mean)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, y)
    part = Mul (dW, rate)
    W_next = Sub (W, part)
}
"""


def step(name: str, batch: int) -> TrainingGraph:
    if name == "lm":
        forward = build_model("lm", batch=batch, **LM)
        return import_training_graph(
            build_training_graph(forward, loss="loss", optimizer=Adagrad(0.5), clip_global_norm=0.1)
        )
    forward = build_model("mlp", dtype="float64", sizes=[6, 7, 5], batch=batch)
    return import_training_graph(
        build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.5))
    )


def check(training: TrainingGraph, cluster: str, strategy: str | Strategy, batch: str, folder: Path) -> Plan:
    oracle = Oracle(training)
    compiled = compile_step(training, folder / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 2, high=3)
    assert oracle.first_wrong(compiled, batches[0]) is None
    assert_trains_as_one_device(compiled, batches)
    return compiled.plan


STRATEGIES = ("data=4", "fsdp", "tensor=4", "data=2,tensor=2", "fsdp=2,tensor=2")


@pytest.mark.parametrize(("name", "strategy"), sampled(product(("mlp", "lm"), STRATEGIES), (0, 2, 4, 6, 8)))
def test_seven_samples_on_four_train_as_on_one_device(name: str, strategy: str, tmp_path: Path) -> None:
    plan = check(step(name, 7), "2x2", strategy, "global", tmp_path)

    assert plan.replicas == 1 or 7 % plan.replicas


@pytest.mark.parametrize("method", ["all_reduce", "all_gather", "servers"])
def test_seven_samples_without_a_mesh(method: str, tmp_path: Path) -> None:
    training = step("lm", 7)
    tables = {n: method for n, g in training.gradients.items() if g.is_sparse or method != "all_gather"}
    rest = dict.fromkeys(training.gradients.keys() - tables, "all_reduce")
    rows = {name: training.variables[name].shape[0] for name in training.gradients}

    check(training, "2x2", forced(tables | rest, rows, 2, "global"), "global", tmp_path)


def test_means_over_samples_weigh_true_counts(tmp_path: Path) -> None:
    plan = check(import_text(MEANS, sample_axes={"x": 0}), "2x2", "data=4", "global", tmp_path)

    assert [out.name for out in plan.outputs] == ["loss"]


def test_entries_are_read_where_parts_of_whole_rows_have_them(tmp_path: Path) -> None:
    training = import_text(PICKED, sample_axes={"x": 0})
    tanh = next(node.name for node in training.graph.nodes if node.op == "Tanh")

    check(training, "2x2", meshed({}, OpConfig(tanh, {"out:0": "tensor"})), "global", tmp_path)


def test_a_vocabulary_of_which_earlier_ranks_have_one_row_more(tmp_path: Path) -> None:
    training = step("lm", 8)
    table = max(training.gradients, key=lambda name: training.variables[name].shape[0])
    strategy = meshed({table: {"tensor": AxisSplit(0)}})

    plan = check(training, "2x2", strategy, "global", tmp_path)

    shapes = [
        local_shape(training.variables[piece.variable].shape, piece.box)[0]
        for rank in plan.ranks
        for piece in rank.pieces
        if piece.variable == table
    ]
    assert shapes == [6, 6, 6, 5]


def test_fsdp_keeps_parts_of_what_does_not_divide(tmp_path: Path) -> None:
    training = step("mlp", 8)
    plan = check(training, "2x2", "fsdp", "per-replica", tmp_path)

    shapes = {
        (piece.variable, rank.rank): local_shape(training.variables[piece.variable].shape, piece.box)
        for rank in plan.ranks
        for piece in rank.pieces
    }
    weight = next(name for name in training.gradients if training.variables[name].shape == (6, 7))
    assert [shapes[weight, rank.rank] for rank in plan.ranks] == [(2, 7), (2, 7), (1, 7), (1, 7)]


def test_axes_that_cut_one_dimension_divide_what_those_before_left(tmp_path: Path) -> None:
    training = step("mlp", 10)
    weight = next(name for name in training.gradients if training.variables[name].shape == (6, 7))
    first = next(n.name for n in training.graph.nodes if weight in {tensor.name for tensor in n.inputs})
    both = {"data": AxisSplit(1), "tensor": AxisSplit(1)}
    strategy = meshed({weight: both}, OpConfig(first, {"out:1": "data*tensor"}), data=2)

    plan = check(training, "2x2", strategy, "global", tmp_path)

    assert columns_of(plan, weight) == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_axes_of_which_only_all_together_make_parts_that_differ(tmp_path: Path) -> None:
    training = step("mlp", 10)
    weight = next(name for name in training.gradients if training.variables[name].shape == (6, 7))
    last = next(name for name in training.gradients if training.variables[name].shape == (7, 5))
    variables = {
        weight: {"data": AxisSplit(0), "tensor": AxisSplit(0)},
        last: {"data": AxisSplit(0), "tensor": AxisSplit(1)},
    }

    plan = check(training, "2x2", meshed(variables, data=2), "global", tmp_path)

    rows = [
        piece.box.ranges[0][0]
        for rank in plan.ranks
        for piece in rank.pieces
        if piece.variable == weight and piece.box
    ]
    assert rows == [(0, 2), (2, 3), (3, 5), (5, 6)]


def test_slices_of_replicas_whose_parts_differ_by_two_axes_together(tmp_path: Path) -> None:
    training = import_text(WORDS, sample_axes={"ids": 0})
    tanh = next(node.name for node in training.graph.nodes if node.op == "Tanh")
    strategy = msgspec.structs.replace(
        meshed({}, OpConfig(tanh, {"out:0": "tensor"}), data=2), batch="per-replica", microbatches=2
    )

    plan = check(training, "2x2", strategy, "per-replica", tmp_path)

    assert (plan.replicas, plan.microbatches) == (2, 2)


def columns_of(plan: Plan, variable: str) -> list[tuple[int, int]]:
    held = [piece.box for rank in plan.ranks for piece in rank.pieces if piece.variable == variable]
    return [box.ranges[1][0] for box in held if box is not None]


@pytest.mark.parametrize(
    ("name", "samples", "strategy", "batch"),
    [
        ("mlp", 7, "data=1,tensor=4,microbatches=2", "global"),
        ("mlp", 7, "data=1,tensor=4,microbatches=4", "per-replica"),
        pytest.param("lm", 10, "data=2,tensor=2,microbatches=4", "global", marks=pytest.mark.long),
        ("mlp", 7, "fsdp=2,tensor=2,microbatches=3", "global"),
        ("lm", 7, "pipeline=2,data=2,microbatches=3", "global"),
        ("lm", 5, "pipeline=2,fsdp=2,microbatches=3", "per-replica"),
        ("mlp", 6, "pipeline=4,data=1,microbatches=5", "global"),
    ],
)
def test_micro_batches_of_which_earlier_ones_have_one_sample_more(
    name: str, samples: int, strategy: str, batch: str, tmp_path: Path
) -> None:
    plan = check(step(name, samples), "2x2", strategy, batch, tmp_path)

    assert samples % (plan.microbatches * (plan.replicas if batch == "global" else 1))


def meshed(variables: dict[str, dict[str, AxisSplit]], *ops: OpConfig, data: int = 1) -> Strategy:
    mesh = {"data": data, "tensor": 4 // data}
    return Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh=mesh, variables=variables, ops=ops)


def test_more_parts_than_rows_are_refused(tmp_path: Path) -> None:
    training = import_text(MEANS, sample_axes={"x": 0})
    strategy = meshed({"m": {"tensor": AxisSplit(0)}})
    with pytest.raises(BadStrategy, match=r"(?s)more parts than entries.*at:.*variables: m.*fix: "):
        compile_step(training, tmp_path / "out", "2x2", strategy, "global")


def test_more_parts_than_an_op_has_entries_are_refused(tmp_path: Path) -> None:
    training = import_text(MEANS, sample_axes={"x": 0})
    product_of = next(node.name for node in training.graph.nodes if node.op == "MatMul")
    strategy = meshed({}, OpConfig(product_of, {"out:1": "tensor"}))
    with pytest.raises(BadStrategy, match=r"(?s)cannot split out:1 into 4 parts: it has 3 entries\n.*fix: "):
        compile_step(training, tmp_path / "out", "2x2", strategy, "global")


# As many rows of a table as the data says are added to what is split.
COUNTED_ROWS = """
step (double[8,5] x, int64[1] n, double[6,5] a, double[5,3] W) => (double loss, double[5,3] W_next)
<double rate = {0.1}, int64[1] none = {0}, int64[1] rows = {0}> {
    some = Slice (a, none, n, rows)
    y = MatMul (some, W)
    loss = ReduceSum <keepdims = 0> (y)
    xs = ReduceSum <keepdims = 0> (x)
    part = Mul (W, rate)
    scaled = Mul (part, xs)
    W_next = Sub (W, scaled)
}
"""


def test_parts_of_different_sizes_beside_a_size_of_the_data_are_refused_so(
    tmp_path: Path,
) -> None:
    training = import_text(COUNTED_ROWS, sample_axes={"x": 0, "a": None, "n": None})
    product_of = next(node.name for node in training.graph.nodes if node.op == "MatMul")
    strategy = meshed({}, OpConfig(product_of, {"out:1": "tensor"}), data=2)
    what = r"(?s)out:1 into 2 parts of different sizes: .* by the data alone.*at:.*out:1.*fix: .*divides it"
    with pytest.raises(BadStrategy, match=what):
        compile_step(training, tmp_path / "out", "2x2", strategy, "global")


def test_more_replicas_than_samples_are_refused(tmp_path: Path) -> None:
    training = step("mlp", 3)
    with pytest.raises(UnsupportedModel, match=r"(?s)a batch of 3 does not divide among 4.*at:.*fix: "):
        compile_step(training, tmp_path / "out", "2x2", "data=4", "global")


def test_more_parts_of_parts_than_rows_are_refused(tmp_path: Path) -> None:
    training = import_text(MEANS, sample_axes={"x": 0})
    strategy = meshed({"m": {"data": AxisSplit(0), "tensor": AxisSplit(0)}}, data=2)
    with pytest.raises(BadStrategy, match=r"(?s)more parts than entries.*at:.*variables: m.*fix: "):
        compile_step(training, tmp_path / "out", "2x2", strategy, "global")


def test_more_parts_of_parts_than_an_op_has_entries_are_refused(tmp_path: Path) -> None:
    training = import_text(MEANS, sample_axes={"x": 0})
    product_of = next(node.name for node in training.graph.nodes if node.op == "MatMul")
    strategy = meshed({}, OpConfig(product_of, {"out:1": "data*tensor"}), data=2)
    with pytest.raises(BadStrategy, match=r"(?s)cannot split out:1 into 4 parts: it has 3 entries\n.*fix: "):
        compile_step(training, tmp_path / "out", "2x2", strategy, "global")


@pytest.mark.parametrize(
    ("strategy", "batch", "what"),
    [
        ("data=4,microbatches=2", "global", "a replica's batch of 1 does not divide into 2"),
        ("data=4,microbatches=8", "per-replica", "a replica's batch of 7 does not divide into 8"),
    ],
)
def test_more_micro_batches_than_samples_are_refused(
    strategy: str, batch: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"(?s){what} micro-batches.*at:.*input.*fix: .*a multiple of 8"
    ):
        compile_step(step("mlp", 7), tmp_path / "out", "2x2", strategy, batch)


@pytest.mark.parametrize("strategy", ["tensor=2", "own devices"])
def test_a_batch_of_one_trains_on_two_that_divide_something_else(strategy: str, tmp_path: Path) -> None:
    """Whoever asks where samples lie divides them among nobody: the report does, and a search."""
    forward = build_model("mlp", sizes=(6, 8, 4), batch=1, dtype="float64")
    training = import_training_graph(
        build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))
    )
    node = next(node.name for node in training.graph.nodes if node.op in ("MatMul", "Gemm"))
    own = Strategy(
        MESH_STRATEGY_FORMAT,
        "global",
        {},
        ops=(OpConfig(node, {"out:1": 2}, devices=("host0/cpu0", "host0/cpu1")),),
    )
    compiled = compile_step(
        training, tmp_path / "out", "1x2", own if strategy == "own devices" else strategy, "global"
    )

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=4))
