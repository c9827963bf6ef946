"""Small pieces that travel together: counted from plans, and the result of one device."""

from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.passes.lowering import join_pieces
from partc.runtime.plan.program import Start
from tests.builders.graphs.attention_block import attention_step
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)

KINDS = ("all_gather", "reduce_scatter")


def starts(compiled: Compiled, kind: str) -> list[Start]:
    return [i for i in compiled.plan.instructions if isinstance(i, Start) and i.kind == kind]


def parameter_bytes(compiled: Compiled) -> int:
    trained = [v for v in compiled.plan.variables if v.role == "parameter"]
    return sum(prod(v.shape) * np.dtype(v.dtype).itemsize for v in trained)


@pytest.mark.parametrize(
    ("cluster", "strategy", "batch"),
    [
        ("1x2", "fsdp", "global"),
        ("1x2", "fsdp", "per-replica"),
        ("2x2", "fsdp=2,tensor=2", "global"),
        ("1x2", "fsdp,microbatches=2", "global"),
        ("2x2", "pipeline=2,fsdp=2", "global"),
    ],
)
def test_steps_of_joined_pieces_train_as_one_device(
    tmp_path: Path, cluster: str, strategy: str, batch: str
) -> None:
    training = import_training_graph(attention_step(Adam(0.01)))

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, batch)

    assert any(" more" in start.label for start in starts(compiled, "all_gather"))
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, seed=1, high=3))


@pytest.mark.parametrize(("limit", "messages"), [(200_000, 1), (8 * 64 * 64, 4), (0, 8)])
def test_one_message_takes_all_that_is_small_and_each_byte_goes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, messages: int
) -> None:
    monkeypatch.setattr(join_pieces, "SMALL_BYTES", limit)
    forward = build_model("mlp", dtype="float64", sizes=[64, 66, 66, 64, 8], batch=8)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))

    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "fsdp", "global")

    assert Counter(len(starts(compiled, kind)) for kind in KINDS) == {messages: 2}
    for kind in KINDS:
        assert sum(start.payload_bytes for start in starts(compiled, kind)) == parameter_bytes(compiled)
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, seed=1))
