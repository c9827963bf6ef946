"""Real steps whose ranks share variables along any axes, in any buckets, gathered once or twice."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.planning import order_step
from partc.passes.scheduling import bucket_communications, order_by_time, schedule
from tests.builders.graphs.soap_models import MODELS, soap_model
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches, verified
from tests.builders.plans.random_meshes import random_shares
from tests.checks.float64_windows import open_in_float64
from tests.checks.oracle import Oracle
from tests.whole_steps.test_random_soap import BATCHES, CLASSES

NO_LIMIT = 10**12  # of what is computed again: variables are gathered late, and twice, all the same


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    open_in_float64(monkeypatch)


def check(model: str, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> Compiled:
    """Draw what shares a bucket, what is sent alone, where segments end, and whether it is gathered late."""
    rng = np.random.default_rng(seed)
    patch.setattr(order_step, "BUCKET_BYTES", int(rng.choice([1, 500, 10**7])))
    patch.setattr(bucket_communications, "IN_PLACE_BYTES", int(rng.choice([1, 300, 10**6])))
    small_bytes = int(rng.choice([1, 400, 10**6]))
    for ordering in (schedule, order_by_time):
        patch.setattr(ordering, "SMALL_BYTES", small_bytes)
    batch = BATCHES[seed % 2]
    training = import_training_graph(onnx.ModelProto.FromString(soap_model(model)))
    oracle = Oracle(training)
    (samples, *_) = [
        e.shape[e.sample_axis] for e in training.data_inputs.values() if e.sample_axis is not None
    ]
    assert isinstance(samples, int)
    cluster, strategy = random_shares(training, batch, samples, seed)
    limit = NO_LIMIT if rng.random() < 0.5 else None

    compiled = compile_step(training, folder / "out", cluster, strategy, batch, recompute_bytes=limit)
    batches = random_batches(compiled.plan, 2, seed, high=CLASSES.get(model))

    wrong = oracle.first_wrong(compiled, batches[0], 1e-9)
    assert wrong is None, wrong
    report = verified(compiled, batches)
    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing
    return compiled


SAMPLED = ("mlp", "convolutions", "bert", "tied translation", "tied embedding")


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("model", SAMPLED)
def test_shared_variables_train_as_on_one_device(
    model: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(model, seed, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [(m, seed) for m in MODELS for seed in range(m in SAMPLED, 60)])
def test_many_shared_variables_train_as_on_one_device(
    model: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(model, seed, tmp_path, monkeypatch)
