"""Random graphs, under both readings of the batch: every tensor of every rank is the single device's."""

from pathlib import Path

import pytest

from partc.compiler.importing.import_training import import_training_graph
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.compiled_steps import compile_step, random_batches, verified
from tests.checks.oracle import Oracle
from tests.sampling import sampled

CLUSTERS = ("1x2", "2x2", "2x1s", "2x4")
STRATEGIES = ("allreduce", "ps")
BATCHES = ("global", "per-replica")


def check(seed: int, folder: Path) -> None:
    cluster, strategy, batch = CLUSTERS[seed % 4], STRATEGIES[seed // 4 % 2], BATCHES[seed // 8 % 2]
    training = import_training_graph(random_step(seed))
    oracle = Oracle(training)

    compiled = compile_step(training, folder / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 2, seed)

    assert oracle.first_wrong(compiled, batches[0]) is None
    report = verified(compiled, batches)
    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing
    assert all(abs(check.loss - check.reference) < 1e-9 for check in report.losses)


@pytest.mark.parametrize("seed", sampled(range(16), range(0, 16, 3)))
def test_a_random_step_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16, 1000))
def test_many_random_steps_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
