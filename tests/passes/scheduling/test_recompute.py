"""Values that are computed again: fewer at once, the same numbers."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.output.materialise import Decisions, materialise
from partc.cost.simulation.live_memory import live_bytes
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy, read_strategy
from partc.models.catalogue import build_model
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.scheduling.live_values import Life, lives_of
from partc.runtime.errors import NoPlacement
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.program import Plan
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    cluster_of,
    compile_step,
    random_batches,
)
from tests.checks.command_line import CLUSTER, done, make_mlp, refused

BATCH = 256
PLACES = ((0, 0), (0, 1), (1, 1), (1, 0))
SIZES = (16, 32, 64, 64, 64, 48, 48, 8)


def deep_mlp() -> TrainingGraph:
    forward = build_model("mlp", sizes=SIZES, batch=BATCH, dtype="float64")
    return import_training_graph(
        build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))
    )


def small_lm() -> TrainingGraph:
    sizes = {"vocab": 40, "embedding": 6, "cells": 6, "projection": 6, "steps": 4, "samples": 8}
    forward = build_model("lm", dtype="float64", batch=8, **sizes)
    return import_training_graph(build_training_graph(forward, loss="loss", optimizer=Adam(0.01)))


def nodes_of(text: str) -> list[gs.Node]:
    return list(gs.import_onnx(parse(text)).toposort().nodes)


def test_a_value_lives_from_its_node_to_its_last_reader() -> None:
    nodes = nodes_of(
        "g (float[4] x) => (float[4] d) { a = Neg (x)  b = Exp (a)  c = Neg (b)  d = Mul (c, a) }"
    )

    lives = lives_of(nodes, {"a": 4, "b": 16, "c": 64, "d": 256})

    assert lives.values["a"] == Life(0, (1, 3))
    assert lives.bytes_at == (4, 20, 4 + 16 + 64, 4 + 64 + 256)
    assert (lives.peak, lives.peak_bytes) == (3, 324)


# Layers by samples on two devices, by columns on two of which one is another, and by samples on all.
OWN_DEVICES = Strategy(
    MESH_STRATEGY_FORMAT,
    "global",
    {},
    ops=(
        OpConfig("MatMul:MatMul_3", devices=("host0/cpu0", "host0/cpu1")),
        OpConfig("MatMul:MatMul_19", {"out:1": 2}, devices=("host1/cpu0", "host0/cpu1")),
        OpConfig("MatMul:MatMul_30", {"batch": 4}, devices=tuple(f"host{h}/cpu{c}" for h, c in PLACES)),
    ),
)

CASES = [
    ("1x1", "auto", "per-replica", 0.8),
    pytest.param("1x1", "auto", "global", 0.8, marks=pytest.mark.long),
    pytest.param("1x2", "allreduce", "per-replica", 0.8, marks=pytest.mark.long),
    ("2x2", "ps", "global", 0.97),
    ("2x2s", "hybrid", "per-replica", 0.8),
    pytest.param("1x1", "microbatches=4", "global", 0.8, marks=pytest.mark.long),
    ("1x2", "pipeline=2,microbatches=4", "per-replica", 0.8),
    ("2x2", "pipeline=2,fsdp=2", "global", 0.6),
    ("2x2", OWN_DEVICES, "global", 0.9),
]


@pytest.mark.parametrize(("cluster", "strategy", "batch", "share"), CASES)
def test_less_at_once_trains_as_one_device(
    cluster: str, strategy: str | Strategy, batch: str, share: float, tmp_path: Path
) -> None:
    plain = compile_step(deep_mlp(), tmp_path / "plain", cluster, strategy, batch, recompute_bytes=10**9)
    assert plain.plan.recomputed is not None
    assert plain.plan.recomputed.values == 0
    limit = int(share * plain.plan.recomputed.before_bytes)

    made = compile_step(deep_mlp(), tmp_path / "out", cluster, strategy, batch, recompute_bytes=limit)

    told = made.plan.recomputed
    assert told is not None
    assert told.before_bytes == plain.plan.recomputed.before_bytes
    assert told.after_bytes <= limit
    assert told.values > 0
    assert most_at_once(made.plan) < most_at_once(plain.plan) or share > 0.9
    batches = random_batches(made.plan, 3)
    assert_trains_as_one_device(made, batches)
    found, wanted = (train_in_process(p.folder, batches).variables for p in (made, plain))
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-15, err_msg=name)


def most_at_once(plan: Plan) -> int:
    """Return the most that values take on any rank, buffers and variables left out."""
    return max(live_bytes(plan, rank).peak for rank in plan.ranks)


def test_no_segment_holds_a_value_and_its_copy(tmp_path: Path) -> None:
    """ONNX Runtime would merge the two, and keep the one until the other is read."""
    made = compile_step(deep_mlp(), tmp_path / "out", "1x1", recompute_bytes=700_000)

    copies = 0
    for path in (tmp_path / "out" / "segments").glob("*.onnx"):
        produced = [name for node in onnx.load(path).graph.node for name in node.output]
        originals = [name.partition("/again")[0] for name in produced]
        assert len(set(originals)) == len(originals), path
        copies += sum("/again" in name for name in produced)
    assert made.plan.recomputed is not None
    assert copies == made.plan.recomputed.values > 0


@pytest.mark.long
def test_recurrent_steps_train_as_one_device(tmp_path: Path) -> None:
    made = compile_step(small_lm(), tmp_path / "out", "2x2", "hybrid", recompute_bytes=20_000)

    assert made.plan.recomputed is not None
    assert made.plan.recomputed.values > 0
    assert_trains_as_one_device(made, random_batches(made.plan, 3))


@pytest.mark.parametrize(("model", "limit"), [(deep_mlp, 700_000), (small_lm, 20_000)])
def test_every_rank_makes_the_same_copies(model: object, limit: int, tmp_path: Path) -> None:
    made = compile_step(model(), tmp_path / "out", "2x2", "hybrid", recompute_bytes=limit)  # type: ignore[operator]

    strategy = read_strategy(tmp_path / "out" / "strategy.json")
    assert strategy.recompute_bytes == limit
    decisions = Decisions(model(), strategy, cluster_of("2x2"), made.plan.sizes)  # type: ignore[operator]
    assert materialise(decisions, 1, tmp_path / "rank1", made.plan)


def test_an_impossible_limit_names_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(NoPlacement, match="--recompute 1000") as caught:
        compile_step(deep_mlp(), tmp_path / "out", "1x1", recompute_bytes=1000)
    assert not (tmp_path / "out").exists()

    possible = re.search(r"allow (\d+) bytes", str(caught.value))
    assert possible is not None
    compile_step(deep_mlp(), tmp_path / "out", "1x1", recompute_bytes=int(possible[1]))


def test_an_impossible_limit_is_refused_where_it_is_given(tmp_path: Path) -> None:
    train, file = make_mlp(tmp_path) / "train.onnx", tmp_path / "limited.json"
    file.write_text(f'{{"format": "{MESH_STRATEGY_FORMAT}", "batch": "global", "recompute_bytes": 1}}')
    compile_ = ("compile", train, "-c", CLUSTER, "-o", tmp_path / "out")

    refused(*compile_, "--strategy", file, what="a step's values", at=f"{file}: recompute_bytes", fix="allow")
    refused(*compile_, "--recompute", "1", what="a step's values", at="--recompute 1", fix="allow")


def test_the_command_line_tells_what_is_computed_again(tmp_path: Path) -> None:
    train = make_mlp(tmp_path) / "train.onnx"

    told = done("compile", train, "-c", CLUSTER, "--recompute", "1GB", "-o", tmp_path / "out")

    assert "computed again: 0 values" in told
    wrong = ("compile", train, "-c", CLUSTER, "--recompute", "lots", "-o", tmp_path / "no")
    refused(*wrong, what="no size", at="--recompute", fix="2.5GB")
