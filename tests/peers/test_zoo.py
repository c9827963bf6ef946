"""The zoo: exports of other people's models, each through grad, compile and verify, and beside PyTorch.

`make zoo` runs the same trials and writes the table of docs/training-graphs.md.
"""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

from tests.peers.zoo.catalogue import MODELS  # noqa: E402
from tests.peers.zoo.export import export  # noqa: E402
from tests.peers.zoo.run import run_trial  # noqa: E402
from tests.peers.zoo.trial import trials_of  # noqa: E402

SAMPLED = ("perceptron", "tied_lstm", "two_towers", "molecules")  # in make test-peers

# What partc refuses, and why: a refusal for another reason is one that nobody has looked at.
KNOWN_REFUSALS: tuple[str, ...] = ()


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


def test_the_zoo_is_large_enough() -> None:
    assert len(MODELS) >= 60
    assert len({model.family for model in MODELS.values()}) >= 8
