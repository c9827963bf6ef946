"""`partc profile` and `--profile`, from a graph to prices and back."""

import json
import re
from pathlib import Path

import pytest

from partc.compiler.commands import profile as command
from partc.compiler.kernel_times.time_kernels import Answer
from tests.checks.command_line import CLUSTER, EXAMPLES, done, make_mlp, partc, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny perceptron, its plan, and its kernels as they were measured."""
    folder = make_mlp(tmp_path_factory.mktemp("profile"))
    done("compile", folder / "train.onnx", "-c", CLUSTER, "-o", folder / "out")
    profiled = done(
        "profile", folder / "train.onnx", "-c", CLUSTER, "--strategy", "auto", "-o", folder / "profile.json"
    )
    assert "0 of them from before" in profiled
    return folder


def device(path: Path) -> dict:
    (found,) = json.loads(path.read_text())["devices"]
    return found


def slowed(folder: Path, tmp_path: Path) -> Path:
    """Return a profile that has a second for every kernel."""
    document = json.loads((folder / "profile.json").read_text())
    seconds = document["devices"][0]["seconds"]
    document["devices"][0]["seconds"] = dict.fromkeys(seconds, 1.0)
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(document))
    return path


def test_the_file_says_what_was_measured(folder: Path) -> None:
    found = device(folder / "profile.json")

    assert (found["kind"], found["profile"], found["threads"]) == ("cpu", "cpu-core", 1)
    assert found["versions"].keys() == {"onnxruntime", "onnx", "partc"}
    assert json.loads((folder / "profile.json").read_text())["unit"] == "s"
    assert "MatMul(float32[4,6], float32[6,8])" in found["seconds"]
    assert all(0 <= seconds < 1 for seconds in found["seconds"].values())


def test_what_is_in_the_file_is_not_measured_again(folder: Path, tmp_path: Path) -> None:
    slow = slowed(folder, tmp_path)
    kernels = len(device(slow)["seconds"])

    told = done("profile", folder / "train.onnx", "-c", CLUSTER, "--strategy", "auto", "-o", slow)

    assert f"{kernels} of {kernels} kernels, {kernels} of them from before" in told
    assert set(device(slow)["seconds"].values()) == {1.0}


def test_other_versions_are_measured_beside(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "profile.json").read_text())
    document["devices"][0]["versions"]["onnxruntime"] = "1.0.0"
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document))

    told = done("profile", folder / "train.onnx", "-c", CLUSTER, "--strategy", "auto", "-o", path)

    assert "0 of them from before" in told
    versions = [each["versions"]["onnxruntime"] for each in json.loads(path.read_text())["devices"]]
    assert len(versions) == 2
    assert versions[0] == "1.0.0"


def test_parts_of_operators_are_measured_too(folder: Path, tmp_path: Path) -> None:
    done("profile", folder / "train.onnx", "-c", CLUSTER, "-o", tmp_path / "all.json")

    keys = device(tmp_path / "all.json")["seconds"].keys()
    assert keys > device(folder / "profile.json")["seconds"].keys()
    assert "MatMul(float32[4,6], float32[6,4])" in keys, "half of the hidden layer"
    assert "MatMul(float32[1,6], float32[6,8])" in keys, "one sample"


def test_prices_are_made_of_it(folder: Path, tmp_path: Path) -> None:
    slow = ("--profile", slowed(folder, tmp_path))
    train = folder / "train.onnx"

    simulated = done("simulate", folder / "out", *slow)
    compiled = done("compile", train, "-c", CLUSTER, *slow, "-o", tmp_path / "out")
    searched = done(
        "search", train, "-c", CLUSTER, *slow, "--proposals", "5", "-o", tmp_path / "strategy.json"
    )

    assert re.search(r"\d\s[mµ]s$", done("simulate", folder / "out").splitlines()[0])
    assert re.search(r"\d\ss$", simulated.splitlines()[0])
    assert re.search(r"\d{4,}\.\d ms/step", compiled)
    assert re.search(r"\d\ss a step", searched)
    plans = [json.loads((at / "out" / "plan.json").read_text()) for at in (folder, tmp_path)]
    assert plans[0]["cost_cache_sha256"] != plans[1]["cost_cache_sha256"]


def test_what_was_measured_is_kept_when_it_is_interrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(keys: list[str], *_: object) -> object:
        yield Answer(keys[0], 0.5)
        yield Answer(keys[1], unmeasured="it is a test")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure_kernels", interrupted)

    told = done("profile", folder / "train.onnx", "-c", CLUSTER, "-o", tmp_path / "p.json")

    assert "interrupted" in told
    assert "1 cannot be run by themselves" in told
    assert "it is a test" in told
    assert "not yet" in told
    assert list(device(tmp_path / "p.json")["seconds"].values()) == [0.5]


def test_times_of_other_versions_are_warned_of(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = json.loads((folder / "profile.json").read_text())
    document["devices"][0]["versions"]["onnxruntime"] = "1.0.0"
    (tmp_path / "old.json").write_text(json.dumps(document))

    done("simulate", folder / "out", "--profile", tmp_path / "old.json")

    assert "onnxruntime 1.0.0" in caplog.text


def test_a_profile_of_other_devices_is_refused(folder: Path, tmp_path: Path) -> None:
    profile = ("--profile", folder / "profile.json")
    other = EXAMPLES / "cluster-8x6-titanxp.json"
    document = json.loads((folder / "profile.json").read_text())
    document["devices"][0]["threads"] = 3
    (tmp_path / "three.json").write_text(json.dumps(document))

    answer = partc("simulate", folder / "out", "--profile", tmp_path / "three.json")
    assert answer.code == 2
    assert "threads: 3" in answer.error
    assert "fix: measure" in answer.error
    train = folder / "train.onnx"
    told = partc("compile", train, "-c", other, *profile, "--decisions-only", "-o", tmp_path / "decided")
    assert told.code == 0, "its servers are CPUs, and GPUs keep the roofline"


@pytest.mark.parametrize("command_", ["compile", "search", "simulate", "profile"])
def test_a_damaged_profile_is_refused(folder: Path, tmp_path: Path, command_: str) -> None:
    (tmp_path / "p.json").write_text('{"format": "partc-profile/1", "devices": [{"kind": "cpu"}]}')
    train, at = folder / "train.onnx", str(tmp_path / "p.json")
    arguments = {
        "compile": (train, "-c", CLUSTER, "--profile", at, "-o", tmp_path / "out"),
        "search": (train, "-c", CLUSTER, "--profile", at, "-o", tmp_path / "s.json"),
        "simulate": (folder / "out", "--profile", at),
        "profile": (train, "-c", CLUSTER, "-o", at),
    }

    refused(command_, *arguments[command_], what="missing required field", at=at, fix="partc profile")


def test_what_this_machine_does_not_have_is_not_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "source_here", lambda kind: None)

    answer = partc("profile", folder / "train.onnx", "-c", CLUSTER, "-o", tmp_path / "p.json")

    assert answer.code == 2
    assert "none of the cluster's devices can be measured here" in answer.error
    assert not (tmp_path / "p.json").exists()
