"""What a search finds compiles to its price, trains as one device, and is no slower than any name."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler import api
from partc.compiler.api import compile_step, search
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.options import Options
from partc.compiler.planning import search_strategies
from partc.compiler.planning.search_strategies import Priced, WholeSteps
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.cluster.cluster import encode_cluster
from partc.cost.strategy import read_strategy
from partc.runtime.errors import BadUsage, UnsupportedModel
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.checks.command_line import done, partc

FORWARD = """
forward (double[8,96] x) => (double[8,4] logits) {
    a = MatMul (x, W1)
    r = Tanh (a)
    logits = MatMul (r, W2)
}
"""
SHAPES = {"W1": (96, 768), "W2": (768, 4)}  # so wide that replicas of it are slow
GLOBAL = Options(batch="global")


@cache
def wide_mlp() -> onnx.ModelProto:
    forward = parse(FORWARD)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))


def test_what_is_found_compiles_to_its_price_and_trains_as_one_device(tmp_path: Path) -> None:
    found = search(wide_mlp(), cluster_of("2x2"), GLOBAL, budget_s=8.0)

    compiled = compile_step(
        wide_mlp(), cluster_of("2x2"), tmp_path / "out", replace(GLOBAL, strategy=found.best.strategy)
    )

    assert compiled.timeline.step_s == found.best.step_s
    assert found.best.step_s < found.data_parallel.step_s / 2, "weights are large, activations small"
    batches = random_batches(compiled.plan, 2, high=4)
    report = verify(tmp_path / "out", steps=2, data=batches, launcher=launch_in_process)
    assert {check.verdict for check in report.variables} == {"equal"}


@pytest.mark.parametrize("name", ["auto", "allreduce", "ps", "fsdp", "tensor=2", "tensor=4", "pipeline=2"])
def test_no_name_is_quicker(name: str, tmp_path: Path, found_by_names: Priced) -> None:
    compiled = compile_step(wide_mlp(), cluster_of("2x2"), tmp_path / "out", replace(GLOBAL, strategy=name))

    assert found_by_names.step_s <= compiled.timeline.step_s


@pytest.fixture(scope="module", autouse=True)
def all_names_are_tried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_strategies, "NAMED_SHARE", 1e9)
        yield


@pytest.fixture(scope="module")
def found_by_names() -> Priced:
    return search(wide_mlp(), cluster_of("2x2"), GLOBAL, budget_s=0.1).best


def test_a_batch_per_replica_keeps_its_replicas() -> None:
    options = Options(batch="per-replica")

    found = search(wide_mlp(), cluster_of("1x2"), options, budget_s=4.0)

    mesh = found.best.strategy.mesh
    assert not mesh or mesh["data"] == 2, "tensor=2 has one replica, and half the samples"
    assert found.best.strategy.batch == "per-replica"


def test_ctrl_c_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    price, calls = WholeSteps.__call__, []

    def interrupted(self: WholeSteps, name: str, strategy: object) -> Priced | None:
        calls.append(name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return price(self, name, strategy)  # type: ignore[arg-type]

    monkeypatch.setattr(WholeSteps, "__call__", interrupted)

    found = search(wide_mlp(), cluster_of("2x2"), GLOBAL, budget_s=60.0)

    assert (found.best.name, found.priced) == ("tensor=4", 3)


def test_what_data_parallelism_is_refused_with_is_raised() -> None:
    forward = parse(FORWARD.replace("8,", "7,"))
    for name, shape in SHAPES.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape), name))
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))

    with pytest.raises(UnsupportedModel, match="batch of 7"):
        search(step, cluster_of("2x4"), GLOBAL, budget_s=1.0)


def test_compile_searches_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "SEARCH_S", 0.1)

    compiled = compile_step(
        wide_mlp(), cluster_of("2x2"), tmp_path / "out", replace(GLOBAL, strategy="search")
    )

    assert compiled.strategy.has_meshes
    with pytest.raises(BadUsage, match="do not wait"):
        compile_step(
            wide_mlp(),
            cluster_of("2x2"),
            tmp_path / "other",
            replace(GLOBAL, strategy="search", asynchronous=True),
        )


def test_the_command_writes_a_strategy_that_compile_takes(tmp_path: Path) -> None:
    train, cluster, strategy = (
        tmp_path / name for name in ("train.onnx", "cluster.json", "new/strategy.json")
    )
    onnx.save(wide_mlp(), train)
    cluster.write_bytes(encode_cluster(cluster_of("2x2")))
    asked = [str(train), "-c", str(cluster), "--batch", "global", "-o", str(strategy)]

    said = done("search", *asked, "--budget", "0.1s")

    assert "x as fast as data parallelism" in said
    assert "strategies priced" in said
    assert read_strategy(strategy).has_meshes
    done("compile", train, "-c", cluster, "--strategy", strategy, "-o", tmp_path / "out")
    refused = partc("search", *asked, "--budget", "soon")
    assert (refused.code, "'soon' is no time" in refused.error) == (2, True)
