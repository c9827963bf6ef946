"""`partc run --save-every`, `--resume`, and `partc checkpoint`."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.checks.command_line import PAIR, done, hashes_of, make_mlp, partc, refused
from tests.checks.held_folders import held_by_another


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny perceptron that was trained for 4 steps and saved after 2 and 4."""
    folder = make_mlp(tmp_path_factory.mktemp("saved"))
    done("compile", folder / "train.onnx", "-c", PAIR, "-o", folder / "out")
    done("run", folder / "out", "--steps", 4, "--save-every", 2, "--seed", 5)
    return folder


def test_checkpoints_are_listed_verified_and_exported(folder: Path) -> None:
    listed = done("checkpoint", "ls", folder / "out")
    verified = done("checkpoint", "verify", folder / "out")
    done("checkpoint", "export", folder / "out", "--step", 2, "-o", folder / "two.onnx")
    done("checkpoint", "export", folder / "out", "-o", folder / "four.onnx")

    rows = [line.split("│")[1:4] for line in listed.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row][:2] for row in rows] == [["2", "5"], ["4", "5"]]
    assert verified.count("as they were written") == 2
    models = {name: onnx.load(folder / f"{name}.onnx") for name in ("two", "four")}
    trained = onnx.load(folder / "out" / "trained.onnx")
    x = np.ones([d.dim_value or 4 for d in trained.graph.input[0].type.tensor_type.shape.dim], np.float32)
    results = [
        ort.InferenceSession(m.SerializeToString()).run(None, {m.graph.input[0].name: x})[0]
        for m in (models["two"], models["four"], trained)
    ]
    assert not np.array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[1], results[2])


def test_what_a_training_holds_nobody_else_writes(folder: Path, tmp_path: Path) -> None:
    out, held = folder / "out", {"what": "is training or writing in this folder", "fix": "wait for its end"}
    other = shutil.copytree(out, tmp_path / "other")
    before = hashes_of(out)

    with held_by_another(out), held_by_another(out / "checkpoints"):
        refused("run", out, "--steps", 9, "--resume", **held, at=str(out))
        refused("compile", folder / "train.onnx", "-c", PAIR, "-o", out, "--force", **held, at=str(out))
        refused("seal", out, **held, at=str(out))
        refused("checkpoint", "export", out, "-o", out / "model.onnx", **held, at=str(out))
        shared = ("--checkpoints", out / "checkpoints")
        refused("run", other, "--steps", 9, "--resume", *shared, **held, at=str(out / "checkpoints"))
        done("checkpoint", "export", out, "-o", tmp_path / "model.onnx")

    assert hashes_of(out) == before


def test_a_run_goes_on_in_another_plan(folder: Path) -> None:
    done("compile", folder / "train.onnx", "-c", PAIR, "--strategy", "ps", "-o", folder / "other")
    kept = folder / "out" / "checkpoints"

    told = done("run", folder / "other", "--steps", 6, "--resume", "--checkpoints", kept)

    lines = (folder / "other" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6]
    assert "6 steps, 4 of them before, " in told


def test_compiling_again_leaves_checkpoints(folder: Path) -> None:
    before = sorted((folder / "out" / "checkpoints").iterdir())
    done("compile", folder / "train.onnx", "-c", PAIR, "-o", folder / "out", "--force")

    assert sorted((folder / "out" / "checkpoints").iterdir()) == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)


def test_what_is_wrong_with_checkpoints_is_said(folder: Path, tmp_path: Path) -> None:
    out = folder / "out"
    refused("run", out, "--steps", 4, "--save-every", 2, what="of another training", fix="--resume")
    refused("run", out, "--steps", 9, "--save-every", "soon", what="'soon' is no interval", fix="90s")
    refused("run", out, "--steps", 9, "--save-every", "0", what="'0' is no interval", fix="90s")
    refused("run", out, "--steps", 3, "--resume", what="3 steps, of which 4 are trained", fix="in all")
    assert "4 steps, all of them before -> " in done("run", out, "--steps", 4, "--resume")
    refused("checkpoint", "ls", tmp_path, what="no checkpoints", fix="--save-every")
    refused("checkpoint", "verify", out, "--step", 3, what="no checkpoint of step 3", fix="2, 4")
    refused("checkpoint", "export", out, "-o", tmp_path, what="the output is a folder", fix="name a file")
    newest = max((out / "checkpoints").iterdir())

    flip(next(newest.glob("rank-*.safetensors")))

    broken = partc("checkpoint", "verify", out)
    assert "another SHA-256 than when it was written" in broken.error
    assert broken.code == 2
    assert "after step 2 " in done("checkpoint", "export", out, "-o", tmp_path / "model.onnx")
