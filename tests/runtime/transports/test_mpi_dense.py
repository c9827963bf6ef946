"""Sums between processes that are long enough to be made in two collectives, in several chunks."""

from pathlib import Path

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.planning import order_step
from partc.cost.strategy import STRATEGY_FORMAT, Shard, Strategy, Synchronisation
from partc.models.catalogue import build_model
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.program import Rounding, Start
from partc.runtime.transports.communication import LONG_SUM_BYTES, ROW_KINDS
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.sampling import sampled

SUMS = ("all_reduce", "reduce")
SIZES = {"vocab": 90, "embedding": 67, "cells": 601, "projection": 67, "batch": 3, "steps": 4, "samples": 16}


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    sampled([("3x1", "hybrid"), ("2x2", "allreduce"), ("3x1", "allreduce"), ("1x4", "allreduce")], range(2)),
)
def test_daemons_sum_long_values_as_one_process_does(tmp_path: Path, cluster: str, strategy: str) -> None:
    """Rows are on their way at the same time, in the same groups."""
    train = build_training_graph(build_model("lm", **SIZES), loss="loss", optimizer=SGD(0.1))
    done = compile_step(import_training_graph(train), tmp_path / "out", cluster, strategy)
    batches = random_batches(done.plan, 3, high=7)
    starts = [instruction for instruction in done.plan.instructions if isinstance(instruction, Start)]
    assert any(start.kind in SUMS and start.payload_bytes > 2 * LONG_SUM_BYTES for start in starts)
    assert any(start.kind in ROW_KINDS for start in starts)

    actual = Runner(done.folder).train(batches, len(batches))

    expected = train_in_process(done.folder, batches)
    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-5, atol=1e-7)
    assert actual.disagreeing == ()
    assert actual.payload_bytes == expected.payload_bytes


def test_a_daemon_that_owns_nothing_is_sent_the_parts_of_those_that_do(tmp_path: Path) -> None:
    train = build_training_graph(
        build_model("mlp", sizes=(16, 12, 8), batch=12), loss="softmax_cross_entropy", optimizer=SGD(0.1)
    )
    owned = Synchronisation("servers", (Shard("host0", 0, 5), Shard("host2", 5, 16)))
    strategy = Strategy(STRATEGY_FORMAT, "global", {"layer0.weight": owned})
    done = compile_step(import_training_graph(train), tmp_path / "out", "3x1", strategy, "global")
    batches = random_batches(done.plan, 3)
    counts = [i.counts for i in done.plan.instructions if isinstance(i, Start) and i.kind == "all_gather"]
    assert counts
    assert all(0 in each for each in counts)

    actual = Runner(done.folder).train(batches, len(batches))

    expected = train_in_process(done.folder, batches)
    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-5, atol=1e-7)
    assert actual.payload_bytes == expected.payload_bytes


@pytest.mark.parametrize(("cluster", "rounds"), [("2x2", ""), ("3+1", ""), ("2x2", "bfloat16")])
def test_daemons_sum_by_levels_as_one_process_does(cluster: str, rounds: Rounding, tmp_path: Path) -> None:
    """Several sums are under way at once, each at a level of its own."""
    sizes = (64, *[400] * 6, 8)
    train = build_training_graph(
        build_model("mlp", sizes=sizes, batch=12), loss="softmax_cross_entropy", optimizer=SGD(0.1)
    )
    strategy = Strategy(STRATEGY_FORMAT, "global", {}, round_sums=rounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_step, "BUCKET_BYTES", 700_000)
        patch.setattr(order_step, "LEAST_BUCKET_BYTES", 700_000)
        done = compile_step(import_training_graph(train), tmp_path / "out", cluster, strategy, "global")
    batches = random_batches(done.plan, 4)
    starts = [i for i in done.plan.instructions if isinstance(i, Start) and i.by_levels]
    assert len(starts) >= 5
    assert all(bool(start.rounds_to) == bool(rounds) for start in starts)

    actual = Runner(done.folder).train(batches, len(batches))

    atol = 1e-4 if rounds else 1e-6  # where terms are added in another order, a rounded sum may be the next
    expected = train_in_process(done.folder, batches)
    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-4, atol=atol)
    assert actual.disagreeing == ()
    assert actual.payload_bytes == expected.payload_bytes


@pytest.mark.parametrize("cluster", ["2x2", "3+1", pytest.param("3x2", marks=pytest.mark.long)])
def test_daemons_scatter_long_sums_as_one_process_does(tmp_path: Path, cluster: str) -> None:
    """By levels where hosts have as many members each."""
    train = build_training_graph(
        build_model("mlp", sizes=(240, 601, 96), batch=12), loss="softmax_cross_entropy", optimizer=SGD(0.1)
    )
    done = compile_step(import_training_graph(train), tmp_path / "out", cluster, "fsdp", "global")
    batches = random_batches(done.plan, 3)
    scattered = [i for i in done.plan.instructions if isinstance(i, Start) and i.kind == "reduce_scatter"]
    assert max(start.payload_bytes for start in scattered) >= LONG_SUM_BYTES

    actual = Runner(done.folder).train(batches, len(batches))

    expected = train_in_process(done.folder, batches)
    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-4, atol=1e-6)
    assert actual.disagreeing == ()
    assert actual.payload_bytes == expected.payload_bytes
