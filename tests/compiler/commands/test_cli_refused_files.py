"""Models, clusters and strategies that the command line refuses, and how it says so."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.builders.graphs.foreign_steps import SGD, parse, with_zeros
from tests.checks.command_line import CLUSTER, done, refused

Change = Callable[[dict], object]


pytestmark = pytest.mark.usefixtures("_nothing_is_harmed")


COMPILE = ("compile", "train.onnx", "-c", CLUSTER, "-o", "new")


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("change", "what", "at", "fix"),
    [
        (("(x, W)", "(x, V)"), "'V' is made by no node", "node MatMul -> 'y'", "add the node"),
        (("Sub (y, t)", "Sub (sq, t)"), "2 nodes wait for each other", "Sub -> 'd'", "cut the cycle"),
        (("Transpose", "Trnspose"), "unknown op 'Trnspose'", "-> 'xt'", "correct the op"),
        (("W_next = Sub", "W_gone = Sub"), "'W_next'", "outputs", "add the node that makes 'W_next'"),
        (("dW = MatMul (xt,", "dW = MatMul (x,"), "MatMul_6", "shape inference", "mend the node"),
    ],
)
def test_a_malformed_graph_is_refused(
    folder: Path, tmp_path: Path, change: tuple[str, str], what: str, at: str, fix: str
) -> None:
    model = with_zeros(parse(SGD.replace(*change)), "W")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    state = ("--state", "W=W_next")

    refused("inspect", tmp_path / "m.onnx", *state, what=what, at=at, fix=fix)
    refused("compile", tmp_path / "m.onnx", *state, *COMPILE[2:], what=what, at=at, fix=fix)


@pytest.mark.parametrize(
    ("state", "what", "fix"),
    [
        ("W=gone", "a variable without an update: 'W' expects 'gone'", "make 'gone' an output"),
        ("V=W_next", "an update without a variable: 'W_next' updates 'V'", "one of the inputs W, t, x"),
        ("W=W_next,x=W_next", "next value of both 'W' and 'x'", "an output of its own"),
        ("t=W_next", "variable 't' has no initial value", "--initial FILE.npz"),
    ],
)
def test_bindings_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, state: str, what: str, fix: str
) -> None:
    onnx.save(with_zeros(parse(SGD), "W"), tmp_path / "m.onnx")

    refused("compile", tmp_path / "m.onnx", "--state", state, *COMPILE[2:], what=what, fix=fix)


def test_a_truncated_model_is_refused_with_its_size(folder: Path, tmp_path: Path) -> None:
    data = (folder / "train.onnx").read_bytes()[:-100]
    (tmp_path / "cut.onnx").write_bytes(data)

    refused(
        *("compile", tmp_path / "cut.onnx", *COMPILE[2:]), at=f"({len(data)} bytes)", fix="copy or export"
    )


def test_an_oversized_model_is_refused_with_its_size(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "big.onnx").open("wb") as file:
        file.truncate(2**31)  # sparse: takes no room

    refused("compile", tmp_path / "big.onnx", *COMPILE[2:], what="2147483648", fix="save_as_external_data")


# ---------------------------------------------------------------- clusters


def _edited(change: Change) -> str:
    cluster = json.loads(Path(CLUSTER).read_text())
    change(cluster)
    return json.dumps(cluster)


def _set_ends(cluster: dict) -> None:
    cluster["links"][0]["ends"] = ["host0", "gpu7"]


def _starve(cluster: dict) -> None:
    for host in cluster["hosts"]:
        host["memory_bytes"] = 100


@pytest.mark.parametrize(
    ("text", "what", "at", "fix"),
    [
        (_edited(_set_ends), "unknown device, host or switch 'gpu7'", "links[0]", "'host1'"),
        (
            _edited(lambda c: c["links"][0].pop("bytes_per_s")),
            "bytes_per_s",
            "links[0]",
            "cluster.schema.json",
        ),
        (
            _edited(lambda c: c["links"][0].update(bytes_per_s=0)),
            "without bandwidth: 0.0",
            "bytes_per_s",
            "1 Gbit/s is 125e6",
        ),
        (_edited(lambda c: c.update(links=[])), "no path from 'host0' to 'host1'", "hosts[1]", "add a link"),
        (
            _edited(lambda c: c["hosts"][0]["devices"][0].update(profile="abacus")),
            "abacus",
            "devices[0]",
            "cpu-core",
        ),
        (_edited(lambda c: c.update(hosts=[])), "no hosts", "hosts", "one host at least"),
        ("[]", "object", "c.json", "cluster.schema.json"),
        ("{nope", "not JSON", "c.json", "syntax"),
    ],
)
def test_a_wrong_cluster_is_refused(
    folder: Path, tmp_path: Path, text: str, what: str, at: str, fix: str
) -> None:
    (tmp_path / "c.json").write_text(text)

    refused(
        *("compile", "train.onnx", "-c", tmp_path / "c.json", "-o", tmp_path / "new"),
        what=what,
        at=at,
        fix=fix,
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("nowhere.json", "path of a cluster file"),
        ("folder", "path of a cluster file"),
        ("bytes.json", "mend the file's syntax"),
        ("train.onnx", "give a cluster.json"),
    ],
)
def test_what_is_no_cluster_file_is_refused(folder: Path, name: str, fix: str) -> None:
    refused("compile", "train.onnx", "-c", name, "-o", "new", at=name, fix=fix)


def test_a_variable_larger_than_every_server_is_named_with_what_is_missing(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(_edited(_starve))
    compile_with = ("compile", "train.onnx", "-c", tmp_path / "c.json", "-o", tmp_path / "new")

    refused(*compile_with, "--strategy", "ps", what="332 bytes", at="layer0.weight", fix="by 132")


# ---------------------------------------------------------------- strategies and batches


def test_a_batch_of_fewer_samples_than_replicas_is_refused(folder: Path, tmp_path: Path) -> None:
    options = ("--set", "sizes=6,8,3", "--set", "batch=3")
    done("model", "mlp", *options, "-o", tmp_path / "f.onnx")
    done("grad", tmp_path / "f.onnx", "--loss", "mse", "-o", tmp_path / "t.onnx")
    compile_it = ("compile", tmp_path / "t.onnx", "-c", CLUSTER, "-o", tmp_path / "new", "--batch", "global")

    refused(*compile_it, what="batch of 3", at="'x'", fix="multiple of 4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.onnx", "t.onnx"]


def _strategy(folder: Path, change: Change) -> str:
    strategy = json.loads((folder / "out" / "strategy.json").read_text())
    change(strategy)
    return json.dumps(strategy)


def _shards(*bounds: tuple[int, int]) -> Change:
    shards = [{"host": f"host{h}", "start": a, "stop": b} for h, (a, b) in enumerate(bounds)]
    entry = {"method": "servers", "shards": shards}
    return lambda strategy: strategy["parameters"].update({"layer0.weight": entry})


def _set_method(method: str) -> Change:
    return lambda strategy: strategy["parameters"]["layer0.weight"].update(method=method)


@pytest.mark.parametrize(
    ("change", "what", "at", "fix"),
    [
        (
            lambda s: s["parameters"].update(gone={"method": "all_reduce"}),
            "'gone'",
            "parameters",
            "layer0.weight",
        ),
        (_shards((0, 2), (3, 6)), "[2, 3) belong to nobody", "layer0.weight: shards[1]", "write 2"),
        (_shards((0, 4), (3, 6)), "[3, 4) belong to two", "layer0.weight: shards[1]", "write 4"),
        (_shards((0, 3), (3, 5)), "[5, 6) belong to nobody", "layer0.weight", "stop at 6"),
        (_shards((0, 3), (3, 6), (6, 6)), "unknown server 'host2'", "shards[2].host", "'host1'"),
        (_set_method("all_gather"), "dense gradient", "layer0.weight", "all_reduce"),
        (_set_method("pigeon"), "pigeon", "method", "strategy.schema.json"),
        (lambda s: s.update(format="partc-strategy/9"), "partc-strategy/9", "format", "--strategy auto"),
        (lambda s: s.pop("batch"), "`batch`", "s.json", "strategy.schema.json"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, change: Change, what: str, at: str, fix: str
) -> None:
    (tmp_path / "s.json").write_text(_strategy(folder, change))

    refused(*COMPILE, "--strategy", tmp_path / "s.json", what=what, at=at, fix=fix)


@pytest.mark.parametrize(
    ("strategy", "fix"),
    [
        ("fast", "auto, hybrid, allreduce, ps"),
        ("nowhere.json", "path of a strategy file"),
        ("garbage.json", "strategy.schema.json"),
        ("bytes.json", "strategy.schema.json"),
        (CLUSTER, "strategy.schema.json"),
    ],
)
def test_what_is_no_strategy_is_refused(folder: Path, strategy: str, fix: str) -> None:
    refused(*COMPILE, "--strategy", strategy, fix=fix)


def test_a_strategy_of_another_batch_reading_is_refused(folder: Path) -> None:
    refused(*COMPILE, "--strategy", "out/strategy.json", "--batch", "global", fix="leave --batch out")
