"""Runners of scripts: asynchronous trainings in parts, as one device trains, and saved files, which stay."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import partc
from partc.compiler.graph_runner import GraphRunner
from partc.cost.cluster.cluster import encode_cluster
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.errors import BadData
from tests.builders.graphs.exported_models import stored_model
from tests.builders.plans.compiled_steps import cluster_of

Batches = Iterable[dict[str, np.ndarray]]

DROPPING = """
forward (double[8,6] x) => (double[8,3] logits) <double r = {0.25}, bool training = {1}> {
    h = Tanh (x)
    d = Dropout (h, r, training)
    logits = MatMul (d, W)
}
"""


@pytest.fixture(scope="module")
def dropping() -> onnx.ModelProto:
    forward = stored_model(DROPPING, {"W": np.random.default_rng(0).normal(size=(6, 3))})
    return partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.Momentum(0.1))


def read_shard(num_shards: int, shard_id: int) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    while True:
        batch = {"x": random.normal(size=(8, 6)), "labels": random.integers(0, 3, 8)}
        if shard_id == 0:
            yield batch


def ten() -> list[dict[str, np.ndarray]]:
    return list(islice(read_shard(1, 0), 10))


def train_in_parts(
    train: onnx.ModelProto,
    data: Batches | Callable[[int, int], Batches] | str,
    *parts: int,
    sync: bool = False,
    saved: Path | None = None,
) -> dict[str, np.ndarray]:
    checkpoints = partc.CheckpointConfig(saved, save_ckpt_steps=2 if saved else None)
    config = partc.ParallaxConfig(sync=sync, checkpoints=checkpoints, session=partc.SessionConfig(seed=7))
    with partc.get_runner(train, cluster_of("1x1"), config, data=partc.shard(data)) as runner:
        for steps in parts:
            runner.train(steps)
        return dict(runner.variables())


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "kind", ["list", "generator", pytest.param("function", marks=pytest.mark.long), "by name"]
)
def test_a_second_training_goes_on_behind_the_first(
    dropping: onnx.ModelProto, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = "from collections.abc import Iterator\nimport numpy as np\n"
    (tmp_path / "reads_on.py").write_text(imports + inspect.getsource(read_shard))
    monkeypatch.chdir(tmp_path)
    data = {"list": ten(), "generator": iter(ten()), "function": read_shard, "by name": "reads_on:read_shard"}

    parts = train_in_parts(dropping, data[kind], 3, 2)  # type: ignore[arg-type]

    assert_same(parts, train_in_parts(dropping, ten(), 5, sync=True))


@pytest.mark.parametrize("read_once", [False, True])
def test_with_checkpoints_it_goes_on_in_this_process_and_in_the_next(
    dropping: onnx.ModelProto, read_once: bool, tmp_path: Path
) -> None:
    def data() -> Batches:
        return iter(ten()) if read_once else ten()

    train_in_parts(dropping, data(), 2, 1, saved=tmp_path)

    rest = train_in_parts(dropping, data(), 1, 2, saved=tmp_path)

    assert_same(rest, train_in_parts(dropping, ten(), 6, sync=True))


def test_what_a_failed_training_read_is_read_again_where_it_can_be(dropping: onnx.ModelProto) -> None:
    runs = []
    for data in (ten(), iter(ten())):
        config = partc.ParallaxConfig(sync=False, session=partc.SessionConfig(seed=7))
        runs.append(partc.get_runner(dropping, cluster_of("1x1"), config, data=partc.shard(data)))
        with pytest.raises(BadData, match="10 batches for 20 steps"):
            runs[-1].train(20)
    of_list, of_generator = runs

    of_list.train(3)

    assert of_list.steps == 3
    assert_same(of_list.variables(), train_in_parts(dropping, ten(), 3, sync=True))
    with pytest.raises(BadData, match="10 batches were read, of which 0 are trained"):
        of_generator.train(3)


SAVING = """
import sys, numpy as np, partc

data = partc.shard([{"x": np.zeros((8, 6)), "labels": np.zeros(8, np.int64)}] * 4)
config = partc.ParallaxConfig(sync=sys.argv[1] == "sync")
runner = partc.get_runner("train.onnx", "cluster.json", config, data=data)
for _ in range(2):
    runner.train(1)
    print(runner.save())
"""


@pytest.mark.parametrize("way", ["sync", "async"])
def test_what_is_saved_outlasts_the_process_and_its_plan(
    dropping: onnx.ModelProto, way: str, tmp_path: Path
) -> None:
    onnx.save(dropping, tmp_path / "train.onnx")
    (tmp_path / "cluster.json").write_bytes(encode_cluster(cluster_of("1x1")))

    ran = subprocess.run(
        [sys.executable, "-c", SAVING, way],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    first, second = ran.stdout.splitlines()
    assert first == second
    assert "W" in read_arrays(Path(second))
    assert list(tmp_path.glob("partc-*")) == [Path(second).parent]


@pytest.fixture(scope="module")
def rated() -> onnx.ModelProto:
    """A step whose learning rate is fed."""
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=4)
    return partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.SGD("fed"))


@pytest.fixture(scope="module")
def two(rated: onnx.ModelProto) -> Iterator[GraphRunner]:
    with partc.get_runner(rated, cluster_of("1x2")) as runner:
        yield runner


def fed_rate(rate: object) -> dict[str, Any]:
    x, labels = np.ones((4, 6), np.float32), np.zeros(4, np.int64)
    return {"x": x, "labels": labels, "learning_rate": rate}


def test_scalars_of_numpy_are_fed_as_arrays_are(rated: onnx.ModelProto, tmp_path: Path) -> None:
    plan = partc.compile(rated, cluster_of("1x1"), tmp_path / "out")
    scalar, array = (fed_rate(rate) for rate in (np.float32(0.1), np.array(0.1, np.float32)))

    of_array = partc.Runner(plan).train([array], 1).variables
    of_scalar = partc.Runner(plan).train([scalar], 1).variables
    with partc.get_runner(rated, cluster_of("1x1")) as runner:
        runner.run("loss", {name: [value] for name, value in scalar.items()})
        assert_same(runner.variables(), of_array)
    with partc.get_runner(rated, cluster_of("1x1"), data=partc.shard([scalar])) as runner:
        runner.train(1)
        assert_same(runner.variables(), of_array)

    assert_same(of_scalar, of_array)
    assert partc.verify(plan, steps=1, data=[scalar]).passed


@pytest.mark.parametrize(
    ("name", "wrong", "what"),
    [
        ("x", [[1.0, 2.0], [3.0, 4.0]], r"float64\[2\] for one replica"),
        ("x", [[[1.0], [2.0, 3.0]]] * 2, "no array can be made of what is given"),
        ("x", np.zeros((8, 6), np.float32), "ndarray for 2 replicas"),
        ("labels", None, "NoneType for 2 replicas"),
        ("learning_rate", [0.1] * 2, r"float64\[\] for one replica, which reads float32"),
        ("learning_rate", 0.1, "float for 2 replicas"),
    ],
)
def test_a_wrong_feed_is_named(two: GraphRunner, name: str, wrong: object, what: str) -> None:
    good = {key: [value] * 2 for key, value in fed_rate(np.float32(0.1)).items()}

    for run in (two.run, two.training.run):
        with pytest.raises(BadData, match=f"{what}(.|\n)*data input '{name}'"):
            run("loss", {**good, name: wrong})
