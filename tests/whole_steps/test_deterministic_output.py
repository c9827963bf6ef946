"""Compiling twice gives byte-identical folders."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import compile_step


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


STEPS = (
    ("lm, adagrad, clipped", "per-replica"),
    ("mlp, momentum, clipped", "global"),
    ("foreign adam", "global"),
)
STRATEGIES = ("auto", "hybrid", "allreduce", "ps")
QUICK = {("auto", 0), ("hybrid", 1), ("allreduce", 2), ("ps", 1)}


@pytest.mark.reports
@pytest.mark.parametrize(
    ("strategy", "name", "batch"),
    [
        pytest.param(strategy, *step, marks=() if (strategy, number) in QUICK else pytest.mark.long)
        for strategy in STRATEGIES
        for number, step in enumerate(STEPS)
    ],
)
def test_compiling_twice_gives_the_same_bytes(strategy: str, name: str, batch: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        training = import_training_graph(onnx.ModelProto.FromString(training_model(name)))
        compile_step(training, tmp_path / folder / "out", "2x2", strategy, batch)

    one, two = (files_of(tmp_path / folder / "out") for folder in ("one", "two"))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
