"""Parallax's interface, in the words of its paper and its manual."""

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import partc
from partc.compiler.graph_runner import Training
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.checks.command_line import EXAMPLES, PAIR, refused

REPLICAS = 2


@pytest.fixture(scope="module")
def train() -> onnx.ModelProto:
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=4, dtype="float64")
    return partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.SGD(0.5))


def batches(seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    while True:
        yield {"x": random.normal(size=(4, 6)), "labels": random.integers(0, 3, 4)}


def read_shard(num_shards: int, shard_id: int) -> Iterator[dict[str, np.ndarray]]:
    """Read as a file reader of one shard would."""
    yield from islice(batches(), shard_id, None, num_shards)


def totals(steps: int) -> list[dict[str, np.ndarray]]:
    stream = batches()
    rows = [list(islice(stream, REPLICAS)) for _ in range(steps)]
    return [{name: np.concatenate([batch[name] for batch in row]) for name in row[0]} for row in rows]


def loss_alone(
    train: onnx.ModelProto, variables: dict[str, np.ndarray], batch: dict[str, np.ndarray]
) -> float:
    """Return the loss of one device that has these variables, on one replica's batch, by onnxruntime."""
    session = ort.InferenceSession(train.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {info.name for info in session.get_inputs()}
    feeds = {name: array for name, array in (variables | batch).items() if name in wanted}
    return float(session.run(["loss"], feeds)[0])


def assert_trained_on(plan: Path, variables: dict[str, np.ndarray], steps: int) -> None:
    expected = train_in_process(read_plan_folder(plan), totals(steps)).variables
    assert expected.keys() == variables.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(variables[name], value, rtol=1e-9)


def test_the_manual_s_run_function_feeds_a_list_per_replica_and_fetches_one(
    train: onnx.ModelProto, tmp_path: Path
) -> None:
    seen: dict[str, object] = {}

    def run(session: Training, num_workers: int, worker_id: int, replicas: int) -> None:
        stream = islice(batches(), worker_id, None, num_workers)
        for _ in range(3):
            row = list(islice(stream, replicas))
            feeds = {name: [batch[name] for batch in row] for name in row[0]}
            before = session.variables()
            seen["loss"], seen["logits"] = session.run(["loss", "logits"], feeds)
        seen["alone"] = [loss_alone(train, before, batch) for batch in row]
        seen["variables"] = session.variables()
        seen["place"] = (num_workers, worker_id, replicas)

    partc.parallel_run(train, run, PAIR, partc.ParallaxConfig(out=tmp_path / "out"))

    assert seen["place"] == (1, 0, REPLICAS)
    np.testing.assert_allclose(seen["loss"], seen["alone"], rtol=1e-9)
    assert len(set(map(float, seen["loss"]))) == REPLICAS
    assert [logits.shape for logits in seen["logits"]] == [(4, 3)] * REPLICAS
    assert not np.array_equal(seen["logits"][0], seen["logits"][1])
    assert_trained_on(tmp_path / "out", seen["variables"], 3)


MODULE = """
from itertools import islice
import numpy as np

def batches():
    random = np.random.default_rng(0)
    while True:
        yield {"x": random.normal(size=(4, 6)), "labels": random.integers(0, 3, 4)}

def read_shard(num_shards, shard_id):
    yield from islice(batches(), shard_id, None, num_shards)
"""


@pytest.mark.parametrize("way", ["batches", pytest.param("function", marks=pytest.mark.long), "by name"])
def test_every_replica_reads_a_shard_of_its_own(
    train: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / f"reader_{way[0]}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    given = {"batches": batches(), "function": read_shard, "by name": "reader_b:read_shard"}[way]
    config = partc.ParallaxConfig(out=tmp_path / "out")

    with partc.get_runner(train, PAIR, config, data=partc.shard(given)) as runner:
        for _ in range(3):
            runner.run("loss")
        variables = runner.variables()

    assert_trained_on(tmp_path / "out", variables, 3)


def test_partc_run_reads_shards_and_verify_joins_them(
    train: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reader_v.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    plan = partc.compile(train, PAIR, tmp_path / "out")

    result = partc.Runner(plan).train("reader_v:read_shard", 3)

    assert_trained_on(tmp_path / "out", result.variables, 3)
    assert partc.verify(plan, steps=2, data="reader_v:read_shard").passed


def test_sums_and_fetched_gradients(train: onnx.ModelProto, tmp_path: Path) -> None:
    name = "layer0.weight"
    config = partc.ParallaxConfig(average_dense=False, fetch_gradients=(name,), out=tmp_path / "out")

    with partc.get_runner(train, PAIR, config, data=partc.shard(batches())) as runner:
        runner.run("loss")
        before = runner.variables()[name]
        gradients = runner.run(f"{name}.aggregated")
        after = runner.variables()[name]

    assert read_plan_folder(tmp_path / "out").plan.aggregation.average_dense is False
    for gradient in gradients:
        np.testing.assert_allclose(gradient, (before - after) / 0.5, rtol=1e-9)


def test_asynchronous_replicas_train_a_number_of_steps_each(train: onnx.ModelProto, tmp_path: Path) -> None:
    config = partc.ParallaxConfig(sync=False, out=tmp_path / "out")

    with partc.get_runner(train, PAIR, config, data=partc.shard(batches())) as runner:
        with pytest.raises(BadUsage, match="call train"):
            runner.run("loss")
        runner.train(2)
        changed = runner.variables()

    assert runner.num_replicas_per_worker == REPLICAS
    assert all(np.abs(value).max() > 0 for value in changed.values())


def test_partitions_are_searched_from_the_fewest_or_not_at_all() -> None:
    fewest = partc.get_partitioner(2)

    assert partc.ParallaxConfig(partitioner=fewest).partitions() == fewest
    off = partc.ParallaxConfig(partitioner=fewest, search_partitions=False).partitions()
    assert off is not None and (off.min_partitions, off.search) == (2, "off")


def test_data_that_ends_says_after_how_many_steps(train: onnx.ModelProto) -> None:
    few = partc.shard(list(islice(batches(), REPLICAS + 1)))

    with partc.get_runner(train, PAIR, data=few) as runner:
        runner.run("loss")
        with pytest.raises(BadData, match=f"ends after 1 steps of {REPLICAS} replicas"):
            runner.run("loss")
        with pytest.raises(BadUsage, match="give get_runner no data"):
            runner.run("loss", {"x": []})


def test_a_training_is_saved_profiled_and_goes_on_where_it_was(
    train: onnx.ModelProto, tmp_path: Path
) -> None:
    def config(**fields: object) -> partc.ParallaxConfig:
        checkpoints = partc.CheckpointConfig(tmp_path / "saved", save_ckpt_steps=2)
        return partc.ParallaxConfig(out=tmp_path / "out", force=True, checkpoints=checkpoints, **fields)

    profile = partc.ProfileConfig(tmp_path / "profile", profile_range=(2, 3), profile_worker=1)
    first = config(profile=profile, redirect_path=tmp_path / "logs")
    with partc.get_runner(train, PAIR, first, data=partc.shard(batches())) as runner:
        runner.train(3)
        for bad in (None, 7, ["loss", None], {"loss": 1}):
            with pytest.raises(BadUsage, match="fetches"):
                runner.run(bad)  # type: ignore[arg-type]
            with pytest.raises(BadUsage, match=r"no name of an output(.|\n)*at:  fetches"):
                runner.training.run(bad, None)  # type: ignore[arg-type]
        with pytest.raises(BadUsage, match="0 steps"):
            runner.train(0)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "step-0000000002",
        "step-0000000003",  # at the end
    ]
    events = json.loads((tmp_path / "profile/trace.json").read_bytes())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 1 host1/cpu0: predicted", "rank 1 host1/cpu0: measured"}
    assert {event["name"] for event in events if event["name"].startswith("step ")} == {"step 2", "step 3"}
    files = {path.name for path in (tmp_path / "logs").iterdir()}
    assert {f"rank-{rank}.log" for rank in range(REPLICAS)} <= files

    with partc.get_runner(train, PAIR, config(), data=partc.shard(batches())) as runner:
        assert runner.steps == 3
        runner.train(1)
        variables = runner.variables()

    assert_trained_on(tmp_path / "out", variables, 4)


def test_feeds_of_a_wrong_kind_are_refused(train: onnx.ModelProto) -> None:
    with partc.get_runner(train, PAIR) as runner:
        for feeds, what in (
            ([1, 2], "list, where names of data inputs"),
            ({"x": np.zeros((4, 6))}, f"ndarray for {REPLICAS} replicas"),
            (
                {"x": [np.full((4, 6), "a")] * REPLICAS, "labels": [np.zeros(4, np.int64)] * REPLICAS},
                "replica 0",
            ),
            ({3: []}, "data for '3', which is no input"),
        ):
            with pytest.raises(BadData, match=what):
                runner.training.run("loss", feeds)  # type: ignore[arg-type]
            with pytest.raises((BadData, BadUsage)):
                runner.run("loss", feeds)  # type: ignore[arg-type]


@pytest.mark.long
def test_asynchronous_training_is_saved_and_goes_on(train: onnx.ModelProto, tmp_path: Path) -> None:
    def config() -> partc.ParallaxConfig:
        checkpoints = partc.CheckpointConfig(tmp_path / "saved", save_ckpt_steps=2)
        out, logs = tmp_path / "out", tmp_path / "logs"
        return partc.ParallaxConfig(
            sync=False, out=out, force=True, checkpoints=checkpoints, redirect_path=logs
        )

    with partc.get_runner(train, PAIR, config(), data=partc.shard(batches())) as runner:
        runner.train(2)
        first = runner.variables()
        runner.train(2)
    assert {"worker-0.log", "worker-1.log"} <= {path.name for path in (tmp_path / "logs").iterdir()}
    with partc.get_runner(train, PAIR, config(), data=partc.shard(batches())) as runner:
        assert runner.steps == 4
        runner.train(1)
        assert runner.steps == 5
        assert any((runner.variables()[name] != value).any() for name, value in first.items())


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(BadData, match="shard once"):
        partc.shard(partc.shard(batches()))
    with pytest.raises(BadData, match="num_shards, shard_id"):
        partc.shard(f"{EXAMPLES.name}.parallax_figure_4:input_batches")


def test_other_machines_need_a_folder_that_they_see(train: onnx.ModelProto) -> None:
    with pytest.raises(BadUsage, match="a folder that all hosts see"):
        partc.get_runner(train, EXAMPLES / "resource-info.txt")


def test_a_device_iterates_over_all_that_is_sharded() -> None:
    whole = partc.shard([{"x": np.array(i)} for i in range(5)])

    assert [int(batch["x"]) for batch in whole] == [0, 1, 2, 3, 4]
    assert [int(batch["x"]) for batch in whole.shard(2, 1)] == [1, 3]


def run_example(figure: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"parallax_figure_{figure}.py")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )


def assert_learns(printed: str) -> None:
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines()]
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5]) / 4


def test_figure_4_trains_on_one_device() -> None:
    assert_learns(run_example(4).stdout)


def test_figure_5_trains_on_a_cluster_and_logs_what_the_environment_asks_for() -> None:
    ran = run_example(5, PARTC_LOG_LEVEL="INFO")

    assert_learns(ran.stdout)
    assert "choose a strategy" in ran.stderr
    assert "layer0.weight: all_reduce" in ran.stderr
    assert "starting 4 ranks" in ran.stderr
    assert ".onnx:" not in ran.stderr


def test_figure_5_changes_few_lines_of_the_script() -> None:
    def body(figure: int) -> list[str]:
        return (EXAMPLES / f"parallax_figure_{figure}.py").read_text().partition("def main")[2].splitlines()

    changed = [line for line in difflib.ndiff(body(4), body(5)) if line[0] in "+-" and line[1:].strip()]

    assert [line[0] for line in changed].count("+") <= 3
    assert [line[0] for line in changed].count("-") <= 1


def test_a_log_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTC_LOG_LEVEL", "loud")
    refused("ops", at="PARTC_LOG_LEVEL", fix="DEBUG, INFO")


def test_the_manuals_way_of_writing_shard_is_there() -> None:
    api: Any = partc
    batch = {"x": np.zeros(3)}

    (own,) = api.shard.shard([batch]).shard(1, 0)
    names = [value.name for value in api.shard.create_num_shards_and_shard_id()]
    assert own is batch
    assert names == [value.name for value in partc.create_num_shards_and_shard_id()]
