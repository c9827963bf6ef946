"""Models under named strategies and both readings of the batch: every tensor is the single device's."""

from itertools import product
from pathlib import Path

import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from tests.builders.graphs.training_models import MODELS, training_model
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.checks.oracle import Oracle

STRATEGIES = (("1x2", "tensor=2"), ("2x2", "data=2,tensor=2"), ("2x2", "fsdp"), ("2x2", "fsdp,tensor=2"))
CASES = list(product(sorted(MODELS), STRATEGIES, ("global", "per-replica")))


def check(name: str, cluster: str, strategy: str, batch: str, folder: Path) -> None:
    training = import_training_graph(onnx.ModelProto.FromString(training_model(name)))
    oracle = Oracle(training)

    compiled = compile_step(training, folder / "out", cluster, strategy, batch)

    batches = random_batches(compiled.plan, 2, high=3)
    if "float32" not in name:
        assert oracle.first_wrong(compiled, batches[0]) is None
    assert_trains_as_one_device(compiled, batches)


@pytest.mark.parametrize(("name", "where", "batch"), CASES[::9])
def test_a_model_is_trained_as_on_one_device(
    name: str, where: tuple[str, str], batch: str, tmp_path: Path
) -> None:
    check(name, *where, batch, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "where", "batch"), CASES)
def test_all_models_are_trained_as_on_one_device(
    name: str, where: tuple[str, str], batch: str, tmp_path: Path
) -> None:
    check(name, *where, batch, tmp_path)
