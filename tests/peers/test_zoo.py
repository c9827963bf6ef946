"""The zoo: exports of other people's models, each through grad, compile and verify, and beside PyTorch.

`make zoo` runs the same trials and writes the table of docs/training-graphs.md.
"""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

from tests.peers.zoo.as_torch import BesideTorch, Differs  # noqa: E402
from tests.peers.zoo.catalogue import MODELS  # noqa: E402
from tests.peers.zoo.export import export  # noqa: E402
from tests.peers.zoo.exported import read_exported  # noqa: E402
from tests.peers.zoo.model import BATCH  # noqa: E402
from tests.peers.zoo.run import run_trial  # noqa: E402
from tests.peers.zoo.trial import trials_of  # noqa: E402

SAMPLED = ("tied_lstm", "two_towers")  # in make test-peers

# What partc refuses, and why: a refusal for another reason is one that nobody has looked at.
KNOWN_REFUSALS = ("stops the gradient at .*, which the exporter's optimiser removed",)


@pytest.mark.parametrize(
    "name", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_an_export_is_trained_right_or_refused(name: str, tmp_path: Path) -> None:
    export(MODELS[name], tmp_path)

    records = [run_trial(trial, tmp_path) for trial in trials_of(name)]

    for record in records:
        assert record.outcome != "failed", record
        if record.outcome == "refused":
            assert record.at, record
            assert record.fix, record
            assert any(re.search(reason, record.message) for reason in KNOWN_REFUSALS), record


def test_steps_that_are_not_pytorchs_are_told(tmp_path: Path) -> None:
    model = MODELS["perceptron"]
    export(model, tmp_path)
    exported = read_exported("perceptron", "raw", tmp_path)
    batch = {name: value.numpy() for name, value in model.draw(0).items()} | {
        "targets": np.zeros((BATCH, 3), "f")
    }
    beside = BesideTorch(model, exported, exported.comparable, "sgd", 0.1)

    with pytest.raises(Differs, match="6 of 6 parameters"):
        beside.hold("no training", beside.initial(), [batch])


def test_the_zoo_is_large_enough() -> None:
    assert len(MODELS) >= 60
    assert len({model.family for model in MODELS.values()}) >= 8
