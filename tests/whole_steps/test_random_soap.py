"""Real steps, each group of operators on any devices and divided in any way: the single device's result.

Every intermediate tensor is held against the single device's. Gathering everything whole would pass too: no
device computes more than its part, nor reads more than its part and halo, and what the plan says is sent is
what the parts say has to be.
"""

import re
from pathlib import Path

import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.microbatches import cut_behind_messages
from partc.runtime.errors import NoPlacement
from tests.builders.graphs.soap_models import MODELS, OPTIMIZED, soap_model
from tests.builders.plans.compiled_steps import compile_as_allowed, random_batches, verified
from tests.builders.plans.random_soap import random_soap, samples_of
from tests.checks.counted_bytes import check_bytes
from tests.checks.counted_work import check_halos, check_work
from tests.checks.float64_windows import open_in_float64
from tests.checks.oracle import Oracle

BATCHES = ("global", "per-replica")
CLASSES = dict.fromkeys(("mlp", *OPTIMIZED, "convolutions", "odd images", "spread images"), 5) | {
    "clipped attention": 3
}


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    open_in_float64(monkeypatch)


@pytest.fixture(autouse=True)
def are_cut_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what no message waits for run apart, wherever that is as quick, in these small steps too."""
    monkeypatch.setattr(cut_behind_messages, "SLOT_S", 0.0)


def check(model: str, seed: int, folder: Path, are_equal: bool = True) -> None:
    batch = BATCHES[seed % 2]
    step = onnx.ModelProto.FromString(soap_model(model))
    training = import_training_graph(step)
    oracle = Oracle(training)
    cluster, strategy = random_soap(training, batch, samples_of(training), seed, are_equal)

    compiled = compile_as_allowed(step, folder / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 2, seed, high=CLASSES.get(model))

    wrong = oracle.first_wrong(compiled, batches[0], 1e-9)
    assert wrong is None, wrong
    report = verified(compiled, batches)
    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing
    check_work(compiled, oracle.pieces)
    check_halos(compiled, oracle.pieces)
    check_bytes(compiled)


# Every model is drawn equally here or unevenly below, so that both together have all.
EQUALLY = ("convolutions", "spread images", "gpt2", "clipped attention", *OPTIMIZED[::2])
SAMPLED = [
    *((model, 0) for model in EQUALLY),
    *(("mlp", seed) for seed in (0, 1, 4)),
    *(("tied embedding", seed) for seed in (1, 4)),
    ("bert", 21),  # stacks rows of replicas that are cut unevenly within their blocks
    ("tied translation", 202),  # a table of 22 rows is kept on two ranks, and its gradient made by three
    ("tied embedding", 118),  # of two entries for an operator the last holds
    ("mlp, adafactor", 13),  # next values of slots are sent together
    ("mlp", 122),  # its output goes from six ranks, which divide the samples, to five
]
ALL = [(model, seed) for model in (*MODELS, *OPTIMIZED) for seed in range(223)]


@pytest.mark.parametrize(("model", "seed"), SAMPLED)
def test_any_degrees_on_any_devices_train_as_one(model: str, seed: int, tmp_path: Path) -> None:
    check(model, seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [drawn for drawn in ALL if drawn not in SAMPLED])
def test_many_degrees_on_any_devices_train_as_one(model: str, seed: int, tmp_path: Path) -> None:
    check(model, seed, tmp_path)


def check_computed_again(model: str, seed: int, folder: Path) -> int:
    """Let values take four fifths of what they would, or what is possible; return how many are made again."""
    batch = BATCHES[seed % 2]
    step = onnx.ModelProto.FromString(soap_model(model))
    training = import_training_graph(step)
    oracle = Oracle(training)
    cluster, strategy = random_soap(training, batch, samples_of(training), seed)
    plain = compile_as_allowed(step, folder / "plain", cluster, strategy, batch, recompute_bytes=10**12)
    assert plain.plan.recomputed is not None
    limit = plain.plan.recomputed.before_bytes * 4 // 5
    try:
        made = compile_as_allowed(step, folder / "out", cluster, strategy, batch, recompute_bytes=limit)
    except NoPlacement as refusal:
        limit = int(re.findall(r"allow (\d+) bytes", str(refusal))[0])
        made = compile_as_allowed(step, folder / "out", cluster, strategy, batch, recompute_bytes=limit)
    assert made.plan.recomputed is not None
    assert made.plan.recomputed.after_bytes <= limit
    batches = random_batches(made.plan, 2, seed, high=CLASSES.get(model))
    wrong = oracle.first_wrong(made, batches[0], 1e-9)
    assert wrong is None, wrong
    assert {check.verdict for check in verified(made, batches).variables} == {"equal"}
    return made.plan.recomputed.values


# In convolutions/18 micro-batches read a statistic of all, which none of them can make again.
@pytest.mark.parametrize(("model", "seed"), [("mlp", 3), ("gpt2", 2), ("convolutions", 18)])
def test_with_values_computed_again(model: str, seed: int, tmp_path: Path) -> None:
    assert check_computed_again(model, seed, tmp_path) > 0


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [(model, seed) for model in MODELS for seed in range(30)])
def test_many_with_values_computed_again(model: str, seed: int, tmp_path: Path) -> None:
    check_computed_again(model, seed, tmp_path)


UNEVEN = [(model, seed) for model in (*MODELS, *OPTIMIZED) for seed in range(60)]
UNEVEN_SAMPLED = [(model, seed) for model, seed in UNEVEN if seed == 0 and model not in EQUALLY]
UNEVEN_SAMPLED += [("mlp", 1), ("convolutions", 0)]


@pytest.mark.parametrize(("model", "seed"), UNEVEN_SAMPLED)
def test_parts_of_parts_of_any_sizes_train_as_one(model: str, seed: int, tmp_path: Path) -> None:
    check(model, seed, tmp_path, are_equal=False)


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [drawn for drawn in UNEVEN if drawn not in UNEVEN_SAMPLED])
def test_many_parts_of_parts_of_any_sizes_train_as_one(model: str, seed: int, tmp_path: Path) -> None:
    check(model, seed, tmp_path, are_equal=False)
