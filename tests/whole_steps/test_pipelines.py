"""Pipelines and micro-batches: what is trained, what a rank keeps, what goes over a cut, what is refused."""

from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from partc.runtime.data.initial import InitialValues
from partc.runtime.errors import BadStrategy, BadUsage, UnsupportedModel
from partc.runtime.execution import device as device_module
from partc.runtime.execution.device import ExecutionDevice, Sessions
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor
from partc.runtime.plan.program import Run, Start, Wait
from partc.runtime.transports.in_memory import Board, InMemoryTransport
from tests.builders.graphs.attention_block import POSITIONS, SAMPLES, WIDTH, attention_step
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
    verified,
)


def compiled_block(folder: Path, cluster: str, strategy: str | Strategy, batch: str = "global") -> Compiled:
    training = import_training_graph(attention_step(Adam(0.01), clip_global_norm=0.5))
    return compile_step(training, folder / "out", cluster, strategy, batch)


@pytest.mark.parametrize(
    ("cluster", "strategy", "batch"),
    [
        ("1x2", "pipeline=2,microbatches=4", "global"),
        ("1x3", "pipeline=3,microbatches=2", "per-replica"),
        ("2x2", "pipeline=2,data=2,microbatches=2", "global"),
        ("2x2", "pipeline=2,tensor=2,microbatches=8", "global"),
        ("2x2", "pipeline=2,fsdp=2,microbatches=2", "per-replica"),
        ("1x2", "data", "global"),
        ("1x1", "microbatches=8", "global"),
        ("1x2", "tensor=2,microbatches=4", "per-replica"),
        ("1x2", "fsdp=2,microbatches=4", "global"),
    ],
)
def test_a_block_trains_as_on_one_device(cluster: str, strategy: str, batch: str, tmp_path: Path) -> None:
    compiled = compiled_block(tmp_path, cluster, strategy, batch)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, seed=1))


@pytest.mark.parametrize(
    "model",
    [
        "mlp, ignored labels",
        "mlp, momentum, clipped",
        "convolutions, float32",
        "tied embedding",
        "lm, adagrad, clipped",
        "lm, sgd, time-major, weighed",
        "averages and a counter",
        "foreign, clipped",
    ],
)
def test_models_train_as_on_one_device(model: str, tmp_path: Path) -> None:
    """Sampled classes and clipping, tied weights that two stages read, statistics of a whole batch."""
    training = import_training_graph(onnx.load_from_string(training_model(model)))
    compiled = compile_step(training, tmp_path / "out", "1x2", "pipeline=2,microbatches=2", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, seed=2))


def test_rows_of_all_replicas_are_in_blocks_of_micro_batches(tmp_path: Path) -> None:
    """Slices of [steps, samples] made one axis: a replica's micro-batch has every step's part of it."""
    sizes = {"vocab": 50, "embedding": 8, "cells": 8, "projection": 8, "steps": 3, "samples": 16}
    forward = build_model("lm", batch=8, **sizes)
    training = import_training_graph(build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1)))
    strategy = "pipeline=2,data=2,microbatches=2"
    compiled = compile_step(training, tmp_path / "out", "2x2", strategy, "per-replica")

    report = verified(compiled, random_batches(compiled.plan, 2, seed=3))
    assert report.passed, report.summary()


def test_a_rank_keeps_the_variables_of_its_stage_alone(tmp_path: Path) -> None:
    compiled = compiled_block(tmp_path, "1x2", "pipeline=2,microbatches=4")

    held = [Counter(piece.variable for piece in rank.pieces) for rank in compiled.plan.ranks]
    shared = {name for name in held[0] if name in held[1]}
    shapes = {variable.name: variable.shape for variable in compiled.plan.variables}
    assert all(shapes[name] == () for name in shared)  # the count of steps
    assert held[0].keys() | held[1].keys() == shapes.keys()
    assert all(count == 1 for of_rank in held for count in of_rank.values())


def test_a_rank_opens_the_segments_of_its_stage_and_holds_its_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two stages of two ranks that share variables: what an executor opens, and what it has memory for."""
    plan = compiled_block(tmp_path, "2x2", "pipeline=2,fsdp=2,microbatches=2").folder
    opened: list[str] = []
    load = device_module._load

    def load_and_note(path: Path, *more: object) -> object:
        opened.append(path.relative_to(plan.path).as_posix())
        return load(path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(device_module, "_load", load_and_note)
    by_stage: dict[str, set[str]] = {}
    held: Counter[str] = Counter()
    for rank in plan.plan.ranks:
        opened.clear()
        environment = Environment(plan.plan, rank, ExecutionDevice("cpu", 0, 1), InitialValues(plan, None))
        Executor(plan.plan, rank, environment, Sessions(plan), InMemoryTransport(Board()))
        (stage,) = [site for site in rank.sites if site.startswith("stage")]
        by_stage.setdefault(stage, set()).update(opened)
        for part in rank.pieces:
            held[part.variable] += environment.array(part.value).size

    runs = [i for i in plan.plan.instructions if isinstance(i, Run)]
    assert by_stage == {s: {i.segment for i in runs if i.site == s} for s in ("stage0", "stage1")}
    assert by_stage["stage0"] - by_stage["stage1"]
    assert by_stage["stage1"] - by_stage["stage0"]
    sizes = {variable.name: prod(variable.shape) for variable in plan.plan.variables if variable.shape}
    assert {name: held[name] for name in sizes} == sizes  # each entry once in the whole cluster


def test_activations_alone_go_over_a_cut(tmp_path: Path) -> None:
    compiled = compiled_block(tmp_path, "1x2", "pipeline=2,microbatches=4")

    whole = SAMPLES * POSITIONS * WIDTH * 8
    sent: Counter[str] = Counter()
    for start in compiled.plan.instructions:
        if isinstance(start, Start) and ">" in start.group and start.payload_bytes > 64:
            sent[start.group] += start.payload_bytes
    # What of the block is live where it is cut: the residual alone, or a branch beside it.
    assert sent["stage0>stage1"] in (whole, 2 * whole)
    assert sent["stage1>stage0"] == sent["stage0>stage1"]


def test_micro_batches_share_their_segments(tmp_path: Path) -> None:
    runs = {
        count: [
            i.segment
            for i in compiled_block(
                tmp_path / str(count), "1x2", f"pipeline=2,microbatches={count}"
            ).plan.instructions
            if isinstance(i, Run)
        ]
        for count in (4, 8)
    }

    assert len(set(runs[8])) == len(set(runs[4]))
    assert len(runs[8]) > len(runs[4])


def test_who_only_sends_waits_at_the_end_or_for_memory(tmp_path: Path) -> None:
    plan = compiled_block(tmp_path, "1x2", "pipeline=2,microbatches=4").plan

    senders = {start.tag_id: start for start in plan.instructions if isinstance(start, Start)}
    last_run = max(n for n, i in enumerate(plan.instructions) if isinstance(i, Run))
    memory = {buffer.name: buffer.memory or buffer.name for buffer in plan.buffers}
    memories = {buffer.memory for buffer in plan.buffers if buffer.memory is not None}
    for number, wait in enumerate(plan.instructions):
        if isinstance(wait, Wait) and wait.site is not None:
            start = senders[wait.tag_id]
            assert wait.site in (start.senders, start.receivers)
            is_taken_again = bool(memories & {memory.get(value) for value in start.writes})
            assert (number > last_run) == (wait.site == start.senders) or is_taken_again


def test_a_stage_sums_gradients_over_replicas_while_others_go_on(tmp_path: Path) -> None:
    plan = compiled_block(tmp_path, "2x2", "pipeline=2,data=2,microbatches=4").plan

    first_sum = min(
        n
        for n, i in enumerate(plan.instructions)
        if isinstance(i, Start) and i.kind == "all_reduce" and i.senders == "stage1" and "gradient" in i.label
    )
    behind = plan.instructions[first_sum:]
    assert any(isinstance(i, Wait) and i.site == "stage0" for i in behind)
    assert (
        sum(isinstance(i, Run) and i.site == "stage0" for i in behind) >= 2
    )  # the last turn, and the update


@pytest.mark.parametrize(
    ("cluster", "strategy", "batch"),
    [
        pytest.param("1x2", "fsdp=2", "global", marks=pytest.mark.long),
        ("2x2", "fsdp=2,tensor=2", "global"),
        pytest.param("2x2", "fsdp=2,pipeline=2", "global", marks=pytest.mark.long),
        ("2x2", "fsdp=2,pipeline=2", "per-replica"),
    ],
)
def test_shared_gradients_are_scattered_once_behind_the_last_micro_batch(
    cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    sent = {
        count: starts_of(
            compiled_block(tmp_path / str(count), cluster, f"{strategy},microbatches={count}", batch),
            "reduce_scatter",
        )
        for count in (1, 4)
    }

    assert sent[4]
    assert sum(start.payload_bytes for start in sent[4]) == sum(start.payload_bytes for start in sent[1])
    assert not any("#" in start.label for start in sent[4])


def starts_of(compiled: Compiled, kind: str) -> list[Start]:
    return [i for i in compiled.plan.instructions if isinstance(i, Start) and i.kind == kind]


def test_the_mean_over_valid_labels_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Micro-batches with unequal numbers of valid labels: a mean of their means would be wrong."""
    training = import_text(MASKED, loss="loss", sample_axes={"x": 0, "w": 0})
    compiled = compile_step(training, tmp_path / "out", "1x1", "microbatches=4", "global")
    rng = np.random.default_rng(0)
    weights = np.array([1, 1, 0, 0, 0, 0, 0, 1.0])
    batches = [{"x": rng.normal(size=(8, 3)), "w": weights} for _ in range(2)]

    assert_trains_as_one_device(compiled, batches)


MASKED = """
step (double[8,3] x, double[8] w, double[3,1] W) => (double loss, double[3,1] W_next)
<int64[1] one = {1}, double rate = {0.1}, int64[2] turned = {1, 8}> {
    y = MatMul (x, W)
    flat = Squeeze (y, one)
    square = Mul (flat, flat)
    weighted = Mul (square, w)
    total = ReduceSum <keepdims = 0> (weighted)
    count = ReduceSum <keepdims = 0> (w)
    loss = Div (total, count)
    two = Add (flat, flat)
    slope = Mul (two, w)
    part = Div (slope, count)
    column = Unsqueeze (part, one)
    x_t = Transpose (x)
    dW = MatMul (x_t, column)
    scaled = Mul (dW, rate)
    W_next = Sub (W, scaled)
}
"""


def file(**fields: object) -> Strategy:
    return Strategy(MESH_STRATEGY_FORMAT, "global", {}, **{"mesh": {"data": 1}, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "error", "what", "at"),
    [
        (file(stages=3), BadStrategy, "a mesh of 1 for each of 3 stages on 2 workers", "mesh"),
        (
            file(stages=2, ops=(OpConfig("*", stage=2),)),
            BadStrategy,
            "stage 2 of 2",
            r"ops\[0\]: stage",
        ),
        (
            file(stages=2, mesh={"microbatch": 1}),
            BadStrategy,
            "a mesh axis called 'microbatch'",
            "mesh",
        ),
        (file(stages=2, mesh={}), BadStrategy, "there is no mesh", "mesh"),
        ("pipeline=2,microbatches=9", UnsupportedModel, "8 does not divide into 9 micro-batches", "input"),
        ("pipeline=200,data=1", BadUsage, "does not make a grid of 2 workers", "--strategy"),
    ],
)
def test_what_cannot_be_is_refused(
    strategy: str | Strategy, error: type[Exception], what: str, at: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"(?s){what}.*at: .*{at}.*fix: "):
        compiled_block(tmp_path, "1x2", strategy)
    assert not (tmp_path / "out").exists()


def test_rows_of_unknown_number_are_joined_over_micro_batches(tmp_path: Path) -> None:
    """Replicas of a stage gather rows of tables in each micro-batch, before these are joined."""
    forward = build_model("lm", batch=8, vocab=2000, embedding=32, cells=64, projection=32)
    training = import_training_graph(build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1)))

    compiled = compile_step(training, tmp_path / "out", "2x2", "pipeline=2,microbatches=4", "global")

    report = verified(compiled, random_batches(compiled.plan, 2, seed=1))
    assert report.passed, report.summary()
