"""Random graphs, any node at any stage, any micro-batches: what is trained is the single device's."""

from pathlib import Path

import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.microbatches import cut_behind_messages
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.compiled_steps import compile_step, random_batches, verified
from tests.builders.plans.random_meshes import on_some_devices, random_pipeline
from tests.checks.oracle import Oracle
from tests.sampling import sampled

BATCHES = ("global", "per-replica")


@pytest.fixture(autouse=True)
def are_cut_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what no message waits for run apart, wherever that is as quick, in these small steps too."""
    monkeypatch.setattr(cut_behind_messages, "SLOT_S", 0.0)


def check(
    seed: int,
    folder: Path,
    samples: int = 8,
    width: int = 4,
    are_equal: bool = True,
    of_some: bool = False,
) -> None:
    batch = BATCHES[seed % 2]
    training = import_training_graph(random_step(seed, samples=samples, width=width))
    oracle = Oracle(training)
    sizes = [
        entry.shape[entry.sample_axis]
        for entry in training.data_inputs.values()
        if entry.sample_axis is not None
    ]
    assert sizes[0] == samples
    cluster, strategy = random_pipeline(training, batch, samples, seed, are_equal)
    if of_some:
        cluster, strategy = on_some_devices(cluster, strategy, seed)

    compiled = compile_step(training, folder / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 2, seed)
    assert oracle.first_wrong(compiled, batches[0]) is None
    report = verified(compiled, batches)

    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing


@pytest.mark.parametrize("seed", sampled(range(12), range(0, 12, 3)))
def test_a_random_pipeline_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 400))
def test_any_pipeline_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.parametrize("seed", sampled(range(12), range(1, 12, 4)))
def test_stages_of_some_devices_train_as_one(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, of_some=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 300))
def test_any_stages_of_some_devices_train_as_one(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, of_some=True)


def check_uneven(seed: int, folder: Path) -> None:
    """Draw micro-batches of which earlier ones have one sample more."""
    check(seed, folder, (7, 10, 6)[seed // 2 % 3], (4, 5)[seed // 6 % 2], are_equal=False)


@pytest.mark.parametrize("seed", sampled(range(20), range(0, 20, 3)))
def test_micro_batches_of_any_sizes_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_uneven(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 600))
def test_many_micro_batches_of_any_sizes_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_uneven(seed, tmp_path)
