"""Sums that go by levels, though they are short: every tensor of every rank is the single device's."""

from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.network import sums
from partc.models.catalogue import build_model
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.program import Start
from tests.builders.graphs.soap_models import MODELS, OPTIMIZED
from tests.builders.plans import random_soap
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
    verified,
)
from tests.checks.float64_windows import open_in_float64
from tests.sampling import sampled
from tests.whole_steps import test_random_devices, test_random_meshes, test_random_soap


@pytest.fixture(autouse=True)
def by_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "has_levels", lambda *asked: True)
    monkeypatch.setattr(sums, "is_sooner_by_levels", lambda *asked: True)


def perceptron(folder: Path, cluster: str, strategy: str) -> Compiled:
    forward = build_model("mlp", sizes=[12, 24, 24, 10], batch=24, dtype="float64")
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))
    return compile_step(import_training_graph(step), folder, cluster, strategy, "global")


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [
        ("2x2", "data=2,tensor=2"),
        ("2x2", "tensor=4"),
        ("2x2", "data=4,microbatches=2"),
        ("2x2", "data=2,pipeline=2,microbatches=4"),
        ("2x4", "data=4,tensor=2"),
        ("3+1", "allreduce"),
        ("3+1", "data=4,microbatches=2"),
        ("1+3+2", "data=2,tensor=3"),
        ("2+1", "tensor=3"),
        ("4+2", "fsdp=3,tensor=2"),
    ],
)
def test_ranks_of_uneven_hosts_train_as_one_device(cluster: str, strategy: str, tmp_path: Path) -> None:
    compiled = perceptron(tmp_path, cluster, strategy)

    assert any(i.by_levels for i in compiled.plan.instructions if isinstance(i, Start))
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [("3+1", "data=2,tensor=2"), ("1+3+2", "data=3,tensor=2"), ("2x3", "data=3,tensor=2")],
)
def test_lines_that_lie_otherwise_on_hosts_stay_flat_and_train_as_one_device(
    cluster: str, strategy: str, tmp_path: Path
) -> None:
    compiled = perceptron(tmp_path, cluster, strategy)

    assert not any(i.by_levels for i in compiled.plan.instructions if isinstance(i, Start))
    batches = random_batches(compiled.plan, 2)
    assert_trains_as_one_device(compiled, batches)
    assert not verified(compiled, batches).disagreeing


DRAWN = list(enumerate(islice(cycle((*MODELS, *OPTIMIZED)), 240), 20_000))
SAMPLED = (20_013, 20_048, 20_056, 20_142)  # lines that copies are summed along lie otherwise on hosts
UNEQUAL = {"3+1": 0.2, "2+1": 0.2, "2x3": 0.2, "1+3+2": 0.2, "4+2": 0.1, "1+1+2": 0.1}


@pytest.mark.parametrize(
    ("seed", "model"),
    [pytest.param(seed, model, marks=() if seed in SAMPLED else pytest.mark.long) for seed, model in DRAWN],
)
def test_copies_of_random_degrees_on_unequal_hosts_are_equal_bit_for_bit(
    seed: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_soap, "CLUSTERS", UNEQUAL)
    open_in_float64(monkeypatch)
    test_random_soap.check(model, seed, tmp_path, are_equal=seed % 3 != 2)


@pytest.mark.parametrize("seed", sampled(range(0, 30, 3), range(0, 10, 3)))
def test_a_random_split_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    test_random_meshes.check(seed, tmp_path)


@pytest.mark.parametrize("seed", sampled(range(0, 30, 3), range(0, 10, 3)))
def test_a_random_choice_of_devices_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    test_random_devices.check(seed, tmp_path)


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    sampled([("2x2", "data=4,microbatches=2"), ("3+1", "data=2,tensor=2"), ("3+1", "tensor=4")], range(2)),
)
def test_daemons_train_as_one_process_does(cluster: str, strategy: str, tmp_path: Path) -> None:
    compiled = perceptron(tmp_path, cluster, strategy)
    batches = random_batches(compiled.plan, 2)

    actual = Runner(compiled.folder).train(batches, len(batches))

    expected = train_in_process(compiled.folder, batches)
    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-12)
    assert actual.disagreeing == ()
    assert actual.payload_bytes == expected.payload_bytes
