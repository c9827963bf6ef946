"""Sizes that do not divide: earlier parts have one entry more, and means weigh true counts."""

from itertools import product
from pathlib import Path

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


@pytest.mark.parametrize(("name", "strategy"), product(("mlp", "lm"), STRATEGIES))
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


def test_a_vocabulary_of_which_earlier_ranks_have_one_row_more(tmp_path: Path) -> None:
    training = step("lm", 8)
    table = max(training.gradients, key=lambda name: training.variables[name].shape[0])
    strategy = meshed({table: {"tensor": AxisSplit(0)}})

    plan = check(training, "2x2", strategy, "global", tmp_path)

    shapes = [
        local_shape(training.variables[held.variable].shape, held.box)[0]
        for rank in plan.ranks
        for held in rank.held
        if held.variable == table
    ]
    assert shapes == [6, 6, 6, 5]


def test_fsdp_keeps_parts_of_what_does_not_divide(tmp_path: Path) -> None:
    training = step("mlp", 8)
    plan = check(training, "2x2", "fsdp", "per-replica", tmp_path)

    shapes = {
        (held.variable, rank.rank): local_shape(training.variables[held.variable].shape, held.box)
        for rank in plan.ranks
        for held in rank.held
    }
    weight = next(name for name in training.gradients if training.variables[name].shape == (6, 7))
    assert [shapes[weight, rank.rank] for rank in plan.ranks] == [(2, 7), (2, 7), (1, 7), (1, 7)]


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
    with pytest.raises(BadStrategy, match=r"(?s)cannot split out:1 into 4 parts.*fix: "):
        compile_step(training, tmp_path / "out", "2x2", strategy, "global")


def test_more_replicas_than_samples_are_refused(tmp_path: Path) -> None:
    training = step("mlp", 3)
    with pytest.raises(UnsupportedModel, match=r"(?s)a batch of 3 does not divide among 4.*at:.*fix: "):
        compile_step(training, tmp_path / "out", "2x2", "data=4", "global")
