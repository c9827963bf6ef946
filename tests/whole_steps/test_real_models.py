"""Models that nobody here made, as they are, from the forward file to verified training on 2 x 2 daemons.

One step: from the second on, a ReLU whose input is zero but for rounding lets float32 runs part by more
than 1e-4. The long ones take a minute or more on two cores.
"""

import json
import re
from pathlib import Path

import onnx
import pytest

from tests.checks.command_line import PAIR, done

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
LOSS = ("--loss", "softmax_cross_entropy", "--optimizer", "momentum", "--reinit")


@pytest.mark.parametrize(
    ("name", "batch", "parameters"),
    [
        pytest.param("light_resnet50", 1, 161, marks=pytest.mark.long),
        pytest.param("light_inception_v1", 1, 116, marks=pytest.mark.long),
        pytest.param("light_bvlc_alexnet", 1, 16, marks=pytest.mark.long),
        pytest.param("light_resnet50", 2, 161, marks=pytest.mark.long),
        pytest.param("light_bvlc_alexnet", 2, 16, marks=pytest.mark.long),
        pytest.param("light_inception_v1", 2, 116, marks=pytest.mark.long),
    ],
)
def test_an_old_model_trains_on_four_ranks_as_on_one_device(
    tmp_path: Path, name: str, batch: int, parameters: int
) -> None:
    train, out = tmp_path / "train.onnx", tmp_path / "out"
    done("grad", LIGHT / f"{name}.onnx", *LOSS, "--batch-size", batch, "-o", train)
    # A batch of one proves nothing of larger ones: the reading must be said.
    shown = done("compile", train, "-c", PAIR, "--batch", "per-replica", "-o", out)
    told = re.search(r"parameters: (.*)", shown)
    assert told and sum(map(int, re.findall(r"(\d+) by", told[1]))) == parameters

    verified = done("verify", out, "--steps", "1")

    assert f"all {2 * parameters} variables equal" in verified  # each has its velocity
    shown = re.search(r"and (\d+) more, (\d+) of them equal", verified)
    assert shown is None or shown[1] == shown[2]


@pytest.mark.long
def test_a_batch_left_open_gets_its_size_when_compiled(tmp_path: Path) -> None:
    train, out = tmp_path / "train.onnx", tmp_path / "out"
    done("grad", LIGHT / "light_squeezenet.onnx", *LOSS, "--batch-size", "dynamic", "-o", train)
    assert "batch x 3 x 224 x 224" in done("inspect", train)

    done("compile", train, "-c", PAIR, "--size", "batch=1", "-o", out)

    assert json.loads((out / "plan.json").read_text())["sizes"] == {"batch": 1}
    assert "verified: 2 ranks" in done("verify", out, "--steps", "1")
