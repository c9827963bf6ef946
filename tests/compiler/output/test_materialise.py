"""Every rank can make what it runs by itself, and makes the very bytes of the central compilation."""

import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options, Sample
from partc.compiler.output.materialise import Decisions, materialise, read_central_plan, read_decisions
from partc.compiler.pipeline import compile_graph
from partc.cost.cluster.cluster import read_cluster
from partc.cost.strategy import read_strategy, write_strategy
from partc.models.catalogue import build_model
from partc.passes.search.named import divide_products
from partc.runtime.plan.program import Aggregation, Run, instructions_of
from tests.builders.graphs.soap_models import MODELS, soap_model
from tests.builders.plans.compiled_steps import cluster_of, compile_as_allowed, compile_step
from tests.builders.plans.random_soap import random_soap
from tests.checks.command_line import CLUSTER, done, hashes_of, make_mlp, refused
from tests.checks.float64_windows import open_in_float64
from tests.sampling import sampled
from tests.whole_steps.test_distributed_numerics import imported

CASES = [
    ("mlp, momentum, clipped", "2x2", "allreduce", "per-replica"),
    ("lm, adagrad, clipped", "2x2", "auto", "per-replica"),
    ("lm, sgd", "3x1", "ps", "global"),
    ("lm, momentum, time-major", "2x2s", "hybrid", "per-replica"),
    ("foreign adam", "1x3", "ps", "per-replica"),
    ("lm, sgd", "2x2", "tensor=2", "global"),
    ("mlp, momentum, clipped", "2x2", "tensor=4", "global"),
]


@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), sampled(CASES, (0, 1, 3, 4, 6)))
def test_the_ranks_files_are_those_of_the_central_compilation(
    name: str, cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    training = imported(name)
    fetched = Aggregation(fetched=tuple(training.gradients)[:1])
    made = compile_step(training, tmp_path / "out", cluster, strategy, batch, aggregation=fetched)
    central = hashes_of(tmp_path / "out")

    found: dict[str, str] = {}
    for rank in made.plan.ranks:
        decisions = Decisions(
            import_training_graph(tmp_path / "out" / "train.onnx", needs_initial=False),
            read_strategy(tmp_path / "out" / "strategy.json"),
            read_cluster(tmp_path / "out" / "cluster.json"),
            made.plan.sizes,
        )
        files = materialise(decisions, rank.rank, tmp_path / f"rank{rank.rank}", made.plan)
        own = hashes_of(tmp_path / f"rank{rank.rank}")
        assert own.keys() == set(files)
        runs = [i for i in instructions_of(made.plan, rank) if isinstance(i, Run)]
        assert {run.segment for run in runs} == {file for file in files if file.startswith("segments/")}
        found |= own
    assert found.items() <= central.items()
    assert {name for name in central if name.startswith("segments/")} == {
        name for name in found if name.startswith("segments/")
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_mlp(tmp_path_factory.mktemp("materialise"))
    done("compile", folder / "train.onnx", "-c", CLUSTER, "--strategy", "ps", "-o", folder / "out")
    return folder


def decisions_in(folder: Path) -> tuple[object, ...]:
    return (
        *("--model", folder / "train.onnx", "--strategy", folder / "strategy.json"),
        *("--cluster", folder / "cluster.json"),
    )


def test_decisions_alone_are_enough(compiled: Path, tmp_path: Path) -> None:
    """No plan, no segments: a graph and two small files."""
    done(
        *("compile", compiled / "train.onnx", "-c", CLUSTER, "--strategy", "ps"),
        *("--decisions-only", "-o", tmp_path / "decided"),
    )

    told = done("executor", "--materialise", *decisions_in(tmp_path / "decided"), "-o", tmp_path / "rank0")

    assert {path.name for path in (tmp_path / "decided").iterdir()} == {
        *("train.onnx", "strategy.json", "cluster.json")
    }
    assert told.startswith("rank 0: ")
    assert hashes_of(tmp_path / "rank0").items() <= hashes_of(compiled / "out").items()


def test_hashes_are_compared_with_the_plan(compiled: Path, tmp_path: Path) -> None:
    plan = compiled / "out" / "plan.json"

    told = done(
        *("executor", "--materialise", *decisions_in(compiled / "out"), "--plan", plan),
        *("--rank", 3, "-o", tmp_path / "rank3"),
    )

    assert "equal to those of the plan" in told


def test_another_strategy_than_the_plan_s_is_noticed(compiled: Path, tmp_path: Path) -> None:
    done(
        "compile", compiled / "train.onnx", "-c", CLUSTER, "--strategy", "allreduce", "-o", tmp_path / "other"
    )

    refused(
        *("executor", "--materialise", *decisions_in(tmp_path / "other")),
        *("--plan", compiled / "out" / "plan.json", "-o", tmp_path / "rank0"),
        what="another file than the plan names",
        fix="from the plan's own folder",
    )
    assert not (tmp_path / "rank0").exists()


def test_missing_decisions_and_ranks_are_refused(compiled: Path, tmp_path: Path) -> None:
    refused("executor", "--materialise", "-o", tmp_path / "out", fix="give --model, --strategy")
    refused(
        *("executor", "--materialise", *decisions_in(compiled / "out"), "--rank", 4),
        *("-o", tmp_path / "rank4"),
        fix="from 0 to 3",
    )
    refused("executor", fix="use `partc run`")
    only = ("compile", compiled / "train.onnx", "-c", CLUSTER, "--decisions-only", "-o", tmp_path / "decided")
    refused(*only, "--asynchronous", fix="leave one of the two out")
    refused(*only, "--search-partitions", "measured", fix="leave one of the two out")
    refused(*only, "--what-if", what="says nothing with --decisions-only", fix="leave one of the two out")


def test_no_folder_that_holds_files_is_replaced(compiled: Path, tmp_path: Path) -> None:
    """Neither the plan that is read nor another: a rank's segments are less than these."""
    for name in ("read", "trained"):
        shutil.copytree(compiled / "out", tmp_path / name)
    (tmp_path / "trained" / "trained.safetensors").touch()
    before = hashes_of(tmp_path)

    for name in ("read", "trained"):
        refused(
            *("executor", "--materialise", *decisions_in(tmp_path / "read"), "-o", tmp_path / name),
            what="the output folder is not empty",
            at=name,
            fix="give a new one with -o",
        )

    assert hashes_of(tmp_path) == before


def test_an_asynchronous_session_is_made_alike(tmp_path: Path) -> None:
    options = Options(strategy="ps", asynchronous=True)
    compile_graph(imported("lm, sgd"), cluster_of("2x2"), tmp_path / "out", options)
    plan = read_central_plan(tmp_path / "out" / "plan.json")
    files = [tmp_path / "out" / name for name in ("train.onnx", "strategy.json", "cluster.json")]

    for rank in plan.ranks:
        decisions = read_decisions(*files, {}, plan)
        assert decisions.asynchronous
        assert materialise(decisions, rank.rank, tmp_path / f"rank{rank.rank}", plan)


def test_rows_that_were_measured_decide_the_order_of_what_servers_keep(tmp_path: Path) -> None:
    sizes = {"vocab": 2000, "embedding": 64, "cells": 64, "projection": 64, "steps": 4, "samples": 128}
    step = build_training_graph(build_model("lm", batch=16, **sizes), loss="loss", optimizer=SGD(0.1))
    inputs = import_training_graph(step).data_inputs
    np.savez(tmp_path / "same.npz", **{name: np.zeros(e.shape, e.dtype) for name, e in inputs.items()})
    sample = Sample(str(tmp_path / "same.npz"), 1)
    options = Options(strategy="hybrid", batch="global", sample=sample)
    compile_graph(import_training_graph(step), cluster_of("2x1"), tmp_path / "out", options)
    plan = tmp_path / "out" / "plan.json"
    made = ("executor", "--materialise", *decisions_in(tmp_path / "out"), "--plan", plan)

    assert "equal to those of the plan" in done(*made, "-o", tmp_path / "own")

    measured = (tmp_path / "out" / "sparsity.json").read_text()
    no_rows = re.sub(r'"distinct": \[.*?\]\s*\]', '"distinct": []', measured, count=1, flags=re.DOTALL)
    for damaged in ("[]", measured.replace("partc-sparsity/1", "cake/9"), no_rows):
        (tmp_path / "out" / "sparsity.json").write_text(damaged)
        refused(*made, "-o", tmp_path / "damaged", at="sparsity.json", fix="that `partc compile` wrote")
    (tmp_path / "out" / "sparsity.json").unlink()
    refused(*made, "-o", tmp_path / "assumed", what="another file than the plan names", fix="sparsity.json")


def test_a_strategy_that_leaves_something_open_is_refused(compiled: Path, tmp_path: Path) -> None:
    strategy = read_strategy(compiled / "out" / "strategy.json")
    name = next(iter(strategy.parameters))
    rest = {other: how for other, how in strategy.parameters.items() if other != name}
    write_strategy(msgspec.structs.replace(strategy, parameters=rest), tmp_path / "part.json")
    graph, cluster = compiled / "out" / "train.onnx", compiled / "out" / "cluster.json"

    refused(
        *("executor", "--materialise", "--model", graph, "--strategy", tmp_path / "part.json"),
        *("--cluster", cluster, "-o", tmp_path / "rank0"),
        what="left open",
        at=name,
        fix="that `partc compile` wrote",
    )


DRAWN = [(model, seed) for model in MODELS for seed in range(12)]
SAMPLED = [("mlp", 4), ("odd images", 0)]  # a grid, devices of their own


def check_drawn(model: str, seed: int, folder: Path) -> None:
    batch = ("global", "per-replica")[seed % 2]
    step = onnx.ModelProto.FromString(soap_model(model))
    training = import_training_graph(step)
    samples = next(e.shape[e.sample_axis] for e in training.data_inputs.values() if e.sample_axis is not None)
    assert isinstance(samples, int)
    cluster, strategy = random_soap(training, batch, samples, seed, are_equal=seed % 3 != 0)
    made = compile_as_allowed(step, folder / "out", cluster, strategy, batch)
    written = read_strategy(folder / "out" / "strategy.json")

    for rank in (made.plan.ranks[0], made.plan.ranks[-1]):
        decisions = Decisions(import_training_graph(step), written, cluster_of(cluster), made.plan.sizes)
        materialise(decisions, rank.rank, folder / f"rank{rank.rank}", made.plan)


@pytest.mark.parametrize(("model", "seed"), SAMPLED)
def test_any_degrees_on_any_devices_are_made_alike(
    model: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_in_float64(monkeypatch)
    check_drawn(model, seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [drawn for drawn in DRAWN if drawn not in SAMPLED])
def test_many_of_any_degrees_are_made_alike(
    model: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_in_float64(monkeypatch)
    check_drawn(model, seed, tmp_path)


@pytest.mark.parametrize("model", ["gpt2", "lm"])  # a Softmax, and parts of different sizes
def test_what_a_name_says_in_other_ops_is_made_alike(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_in_float64(monkeypatch)
    monkeypatch.setattr(divide_products, "MESSAGE_S", 0.0)
    step = onnx.ModelProto.FromString(soap_model(model))
    made = compile_step(import_training_graph(step), tmp_path / "out", "2x2", "tensor=4", "global")
    decisions = Decisions(import_training_graph(step), made.compilation.strategy, cluster_of("2x2"), {})

    assert materialise(decisions, 3, tmp_path / "own", made.plan)
