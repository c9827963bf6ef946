"""Random graphs, any node on any devices and split in any way: what is trained is the single device's."""

from pathlib import Path

import pytest

from partc.compiler.importing.import_training import import_training_graph
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.compiled_steps import compile_step, random_batches, verified
from tests.builders.plans.random_meshes import random_devices

BATCHES = ("global", "per-replica")


def check(seed: int, folder: Path) -> None:
    batch = BATCHES[seed % 2]
    training = import_training_graph(random_step(seed))
    cluster, strategy = random_devices(training, batch, seed)

    compiled = compile_step(training, folder / "out", cluster, strategy, batch)
    report = verified(compiled, random_batches(compiled.plan, 2, seed))

    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing


@pytest.mark.parametrize("seed", range(12))
def test_a_random_choice_of_devices_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
