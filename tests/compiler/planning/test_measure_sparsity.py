"""Rows touched, counted in data: by a replica, by those of a host, by all."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.compiler.options import Sample
from partc.compiler.planning.measure_sparsity import measure_sparsity
from partc.cost.assignment.row_spread import spread_of
from partc.cost.network.two_level import distinct_rows
from partc.cost.sparsity import SPARSITY_FORMAT, Sparsity, TouchedRows, with_measured_rows
from partc.cost.strategy import SyncFacts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.roles.find_gradients import find_gradients
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.plans.compiled_steps import import_text
from tests.checks.command_line import CLUSTER, done, hashes_of, refused

STEP = """
step (int64[n,2] ids, float[n,2,4] t, float[10,4] E) => (float loss, float[10,4] E_next)
<float lr = {0.1}, int64[1] last = {-1}, int64[2] size = {10, 4}, int64 shift = {%(shift)s}> {
    moved = Sub (ids, shift)
    used = %(used)s
    e = Gather (E, used)
    d = Sub (e, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    zeros = ConstantOfShape (size)
    positions = Unsqueeze (used, last)
    dE = ScatterND <reduction = "add"> (zeros, positions, d)
    part = Mul (dE, lr)
    E_next = Sub (E, part)
}
"""
LARGEST = (
    "top = ArgMax <axis = 1, keepdims = 0> (E)\n    some = Gather (top, moved)\n    used = Identity (some)"
)


def step(shift: int = 0, used: str = "Identity (moved)") -> TrainingGraph:
    text = STEP % {"shift": shift, "used": used}
    training = import_text(text.replace(f"used = {LARGEST}", LARGEST))
    find_gradients(training)
    assert training.gradients["E"].is_sparse
    return training


def measured(folder: Path, ids: np.ndarray, training: TrainingGraph, steps: int = 1) -> Sparsity:
    """Measure on 2 hosts x 2 replicas of one sample each."""
    np.savez(folder / "s.npz", ids=ids.astype(np.int64), t=np.zeros((*ids.shape, 4), np.float32))
    return measure_sparsity(training, Sample(str(folder / "s.npz"), steps), {"n": 1}, "per-replica", {2, 4})


def test_distinct_rows_are_counted_per_replica_per_host_and_in_all(tmp_path: Path) -> None:
    ids = np.array([[3, 3], [3, 4], [9, 3], [9, 5]])  # a line per replica

    found = measured(tmp_path, ids, step()).parameters["E"]

    of_hosts = spread_of(np.array([0, 0, 0, 2, 1, 1, 0, 0, 0, 1]))
    assert found == TouchedRows(10, 2.0, ((1, (1 + 2 + 2 + 2) / 4), (2, (2 + 3) / 2), (4, 4.0)), of_hosts)


def test_steps_are_averaged(tmp_path: Path) -> None:
    ids = np.array([[1, 1]] * 4 + [[0, 1], [2, 3], [4, 5], [6, 7]])

    found = measured(tmp_path, ids, step(), steps=2).parameters["E"]

    assert found.distinct == ((1, 1.5), (2, 2.5), (4, 4.5))


def test_an_id_from_the_end_is_the_same_row(tmp_path: Path) -> None:
    ids = np.array([[2, 12], [2, 12], [2, 12], [2, 12]])  # less 10: -8 and 2, both row 2

    assert measured(tmp_path, ids, step(shift=10)).parameters["E"].distinct[-1] == (4, 1.0)


def test_ids_that_depend_on_a_variable_stay_assumed(tmp_path: Path) -> None:
    ids = np.zeros((4, 2))

    assert measured(tmp_path, ids, step(used=LARGEST)).parameters == {}


def test_measured_rows_replace_the_formula() -> None:
    fact = SyncFacts("E", rows=1000, row_bytes=4, slot_row_bytes=0, sparse=True, touched_rows=100)
    rows = TouchedRows(1000, 128.0, ((1, 20.0), (2, 25.0), (4, 27.0)))
    sparsity = Sparsity(SPARSITY_FORMAT, "words.npz", None, 8, {"E": rows})

    (known,) = with_measured_rows([fact], sparsity)

    assert known.touched_rows == 20.0
    assert [distinct_rows(known, replicas) for replicas in (1, 2, 4)] == [20.0, 25.0, 27.0]
    assert distinct_rows(fact, 2) == pytest.approx(1000 * (1 - 0.9**2))
    assert with_measured_rows([fact], Sparsity(SPARSITY_FORMAT, "s", None, 8, {})) == (fact,)


# ---------------------------------------------------------------- the whole way

LM = ("vocab=2000", "embedding=64", "cells=16", "projection=64", "batch=4", "steps=10", "samples=3000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, and a sample of words: few of them take most of the draws."""
    folder = tmp_path_factory.mktemp("sparsity")
    options = [word for option in LM for word in ("--set", option)]
    done("model", "lm", *options, "-o", folder / "f.onnx")
    done("grad", folder / "f.onnx", "--loss", "loss", "--optimizer", "sgd", "-o", folder / "t.onnx")
    rng = np.random.default_rng(0)
    words = {"x": (32, 10), "y": (32, 10), "sampled": (2, 3000)}
    zipf = {name: np.minimum(rng.zipf(1.3, shape) - 1, 1999) for name, shape in words.items()}
    np.savez(folder / "zipf.npz", **zipf)
    done("compile", folder / "t.onnx", "-c", CLUSTER, "-o", folder / "assumed")
    for name in ("out", "again"):
        compile_sampled(folder, name)
    return folder


def compile_sampled(folder: Path, out: str) -> None:
    sample = ("--sample-data", folder / "zipf.npz", "--sample-steps", 2)
    done("compile", folder / "t.onnx", "-c", CLUSTER, *sample, "-o", folder / out)


@pytest.mark.long
def test_words_touch_fewer_rows_than_equal_draws_and_the_choice_follows(folder: Path) -> None:
    """Drawn alike, 3000 samples touch most of 2000 rows: AllReduce. As words are drawn, they do not."""
    methods = [
        {variable.name: variable.method for variable in read_plan_folder(folder / out).plan.variables}
        for out in ("assumed", "out")
    ]

    assert [of_all["softmax.weight"] for of_all in methods] == ["all_reduce", "servers"]


def test_the_same_sample_gives_the_same_bytes(folder: Path) -> None:
    assert hashes_of(folder / "out") == hashes_of(folder / "again")


def test_the_measurement_lies_beside_the_plan_and_is_sealed_with_it(folder: Path) -> None:
    sparsity = msgspec.json.decode((folder / "out" / "sparsity.json").read_bytes(), type=Sparsity)

    assert "sparsity.json" in read_plan_folder(folder / "out").plan.files
    assert (sparsity.sample, sparsity.steps) == ("zipf.npz", 2)
    assert sparsity.parameters.keys() == {"embedding", "softmax.weight", "softmax.bias"}
    assert not (folder / "assumed" / "sparsity.json").exists()


def test_report_and_inspect_say_what_was_measured_and_what_is_assumed(folder: Path) -> None:
    report, assumed = ((folder / out / "report.html").read_text() for out in ("out", "assumed"))

    assert "measured from zipf.npz over 2" in report
    assert "as measured from sample data" in report
    assert "measured from" not in assumed and "if all were drawn alike" in assumed
    assert "see --sample-data" in done("inspect", folder / "t.onnx")
    sampled = done("inspect", folder / "t.onnx", "--sample-data", folder / "zipf.npz")
    assert "measured from zipf.npz over 8" in " ".join(sampled.split())  # lines break where paths are long


def test_a_sample_that_is_no_data_is_refused(folder: Path) -> None:
    command = ("compile", folder / "t.onnx", "-c", CLUSTER, "-o", folder / "x", "--sample-data")
    refused(*command, folder / "t.npz", what="no such file", fix="numpy.savez")
    refused(*command, "synthetically", what="no known form", fix="MODULE:FUNC")
