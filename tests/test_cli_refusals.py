"""What the command line refuses: exit code 2, three parts, the repair; nothing is written or harmed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.command_line import CLUSTER, done, hashes_of, make_mlp, refused
from tests.foreign_steps import SGD, parse, with_zeros

Change = Callable[[dict], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_mlp(tmp_path_factory.mktemp("refusals"))
    done("compile", folder / "train.onnx", "-c", CLUSTER, "-o", folder / "out")
    (folder / "garbage.json").write_text("{nope")
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00\x81")
    (folder / "text.onnx").write_text("hello, I am no model\n")
    (folder / "text.npz").write_text("hello, I am no archive\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "diary.txt").write_text("dear diary")
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files above, in the current folder; whatever a test does, they must stay as they are."""
    monkeypatch.chdir(made)
    return made


@pytest.fixture(autouse=True)
def _nothing_is_harmed(made: Path) -> Iterator[None]:
    before = hashes_of(made)
    yield
    (made / "out" / "run.log").unlink(missing_ok=True)
    assert hashes_of(made) == before
    assert not [path for path in made.iterdir() if path.name.startswith(".")]


COMPILE = ("compile", "train.onnx", "-c", CLUSTER, "-o", "new")


@pytest.mark.parametrize(
    ("command", "what", "fix"),
    [
        ("nonsense", "no such command 'nonsense'", "partc --help"),
        ("model", "missing argument 'name'", "partc model --help"),
        ("model mlp", "missing option", "partc model --help"),
        ("model mlp --nope -o n.onnx", "no such option: --nope", "partc model --help"),
        ("model nope -o n.onnx", "no model 'nope'", "'resnet50'"),
        ("model mlp --set width=4 -o n.onnx", "`width`", "'sizes'"),
        ("model mlp --set sizes -o n.onnx", "'sizes' is not key=value", "batch=8"),
        ("model mlp --set batch=many -o n.onnx", "batch", "options are"),
        ("model mlp --set batch=-4 -o n.onnx", ">= 1", "options are"),
        ("model mlp -o folder", "the output is a folder", "name a file"),
        ("model mlp -o forward.onnx/n.onnx", "'forward.onnx' is a file", "another folder"),
        ("model mlp -o /proc/nowhere/n.onnx", "No such file", "can read and write"),
        ("grad nowhere.onnx --loss mse -o n.onnx", "no such file", "path of an ONNX model"),
        ("grad folder --loss mse -o n.onnx", "no such file", "path of an ONNX model"),
        ("grad text.onnx --loss mse -o n.onnx", "not an ONNX model", "copy or export"),
        ("grad forward.onnx -o n.onnx", "missing option '--loss'", "partc grad --help"),
        ("grad forward.onnx --loss hinge -o n.onnx", "'hinge'", "'logits'"),
        ("grad forward.onnx --loss logits -o n.onnx", "shape is [4, 3]", "reduce it to a scalar"),
        ("grad forward.onnx --loss mse --lr fast -o n.onnx", "'fast'", "'fed'"),
        ("grad forward.onnx --loss mse --lr -0.1 -o n.onnx", "'-0.1' is not a positive", "'fed'"),
        ("grad forward.onnx --loss mse --lr nan -o n.onnx", "'nan'", "'fed'"),
        ("grad forward.onnx --loss mse --optimizer adam -o n.onnx", "'adagrad'", "partc grad --help"),
        ("grad forward.onnx --loss mse --batch-size two -o n.onnx", "'two'", "'dynamic'"),
        ("grad forward.onnx --loss mse --clip-global-norm -3 -o n.onnx", "-3.0", "positive number"),
        ("grad forward.onnx --loss mse --reinit --seed -1 -o n.onnx", "-1", "seed from 0"),
        ("grad forward.onnx --loss mse -o folder", "the output is a folder", "name a file"),
        ("inspect nowhere.onnx", "no such file", "path of an ONNX model"),
        ("inspect forward.onnx", "nothing says which outputs", "partc grad"),
        ("inspect train.onnx --state W", "'W' is not NAME=NAME", "W=W_next"),
        ("inspect train.onnx --state W=loss", "an update without a variable", "bind 'loss'"),
        ("inspect train.onnx --sample-axis x", "'x' is not NAME=AXIS", "rate=none"),
        ("inspect train.onnx --sample-axis q=0", "unknown tensor 'q'", "labels"),
        ("inspect train.onnx --sample-axis x=7", "sample axis 7", "from 0 to 1"),
        ("inspect train.onnx --loss gain", "unknown tensor 'gain'", "logits, loss"),
        ("inspect train.onnx --size batch", "'batch' is not NAME=N", "batch=16"),
        ("inspect train.onnx --size batch=0", "'batch=0'", "batch=16"),
        ("inspect train.onnx --size hour=3", "no symbolic size 'hour'", "leave it out"),
        ("inspect train.onnx --initial nowhere.npz", "no such file", ".npz or .safetensors"),
        ("inspect train.onnx --initial text.npz", "cannot be read", "write"),
        ("run nowhere --steps 1", "no plan", "partc compile -o"),
        ("run folder --steps 1", "no plan", "partc compile -o"),
        ("run train.onnx --steps 1", "no plan", "partc compile -o"),
        ("run out", "missing option '--steps'", "partc run --help"),
        ("run out --steps 0", "0 steps", "at least one"),
        ("run out --steps 1 --timeout 0", "timeout", "more than 0"),
        ("run out --steps 1 --on-nan pray", "'continue'", "partc run --help"),
        ("verify nowhere", "no plan", "partc compile -o"),
        ("verify out --steps 0", "0 steps", "at least one"),
        ("verify out --rtol -1", "-1.0", "from 0 on"),
        ("executor nowhere", "no job", "partc run"),
        ("executor out", "no job", "partc run"),
    ],
)
def test_a_wrong_command_is_refused(folder: Path, command: str, what: str, fix: str) -> None:
    refused(*command.split(), what=what, fix=fix)


@pytest.mark.parametrize("command", ["verify out --steps 1", "run out --steps 1"])
@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        ("nope", "'nope' is of no known form", "FILE.npz, synthetic or MODULE:FUNC"),
        ("nowhere.npz", "no such file", "numpy.savez"),
        ("folder", "'folder' is of no known form", "FILE.npz"),
        ("text.npz", "not an .npz file", "numpy.savez"),
        ("nomodule:f", "No module named 'nomodule'", "a function without arguments"),
        ("os:nofunction", "no attribute 'nofunction'", "a function without arguments"),
        ("os:getcwd", "gives str objects, not batches", "a dict of input name -> array"),
    ],
)
def test_wrong_data_is_refused(folder: Path, command: str, data: str, what: str, fix: str) -> None:
    refused(*command.split(), "--data", data, what=what, fix=fix)


@pytest.mark.parametrize(
    ("arrays", "what", "at", "fix"),
    [
        ({}, "no data for input 'labels'", "data", "['labels', 'x']"),
        ({"labels": np.zeros(16)}, "float64", "'labels'", "astype('int64')"),
        ({"labels": np.zeros((16, 2), np.int64)}, "[16, 2], the model reads [4]", "'labels'", "rank 1"),
        ({"labels": np.zeros(16, np.int64), "z": np.zeros(16)}, "'z'", "data", "nothing else"),
        ({"labels": np.zeros(0, np.int64)}, "[0]", "'labels'", "not empty"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, arrays: dict[str, np.ndarray], what: str, at: str, fix: str
) -> None:
    np.savez(tmp_path / "data.npz", allow_pickle=False, x=np.zeros((16, 6), np.float32), **arrays)

    refused("verify", "out", "--steps", "1", "--data", tmp_path / "data.npz", what=what, at=at, fix=fix)


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

    refused("inspect", tmp_path / "m.onnx", "--state", state, what=what, fix=fix)


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


def test_a_batch_that_does_not_divide_is_refused(folder: Path, tmp_path: Path) -> None:
    options = ("--set", "sizes=6,8,3", "--set", "batch=6")
    done("model", "mlp", *options, "-o", tmp_path / "f.onnx")
    done("grad", tmp_path / "f.onnx", "--loss", "mse", "-o", tmp_path / "t.onnx")
    compile_it = ("compile", tmp_path / "t.onnx", "-c", CLUSTER, "-o", tmp_path / "new", "--batch", "global")

    refused(*compile_it, what="batch of 6", at="'x'", fix="multiple of 4")
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
        (lambda s: s.pop("parameters"), "`parameters`", "s.json", "strategy.schema.json"),
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


@pytest.mark.parametrize(
    ("out", "what", "fix"),
    [
        ("folder", "not a plan's folder", "empty or new folder"),
        ("forward.onnx", "not a plan's folder", "empty or new folder"),
        (".", "current folder", "a folder of its own"),
        ("forward.onnx/new", "is a file", "another folder"),
    ],
)
def test_an_output_that_is_no_plan_is_not_replaced(folder: Path, out: str, what: str, fix: str) -> None:
    refused("compile", "train.onnx", "-c", CLUSTER, "-o", out, what=what, fix=fix)
