"""The law of the compiler: N ranks train as one device does on the same total batch.

Ten steps of every kind of training step, on clusters of every shape, under every strategy and both
readings of the batch, against the user's own graph in plain onnxruntime (compiler/verification). In
float64 sums in another order differ by about 1e-15 and a missing average by about 1, so the tolerance,
1e-9, needs no tuning. Every pair of choices is tried but those of a step and a cluster; the full product is
marked long.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import combinations, product
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.in_process import train_in_process
from tests.builders.graphs.foreign_steps import SQUARED, TABLE, parse
from tests.builders.graphs.training_models import IGNORED, MODELS, training_model
from tests.builders.plans.compiled_steps import (
    Batch,
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    forced,
    import_text,
    random_batches,
)
from tests.sampling import sampled

CLUSTERS = ("1x2", "1x3", "1x4", "2x2", "2x4", "3x1", "2x2s", "1x8")
STRATEGIES = ("allreduce", "ps", "hybrid", "auto")
BATCHES = ("per-replica", "global")
CHOICES = (tuple(MODELS), CLUSTERS, STRATEGIES, BATCHES)
# As many pairs as a step and a cluster make would take twice as many cases.
PAIRED = [pair for pair in combinations(range(len(CHOICES)), 2) if pair != (0, 1)]
STEPS = 10


def pairwise(
    choices: Sequence[Sequence[str]], paired: Sequence[tuple[int, int]] = PAIRED
) -> list[tuple[str, ...]]:
    """Return cases in which every pair of two such choices occurs: greedily, each case covers most."""

    def pairs(case: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        return {(i, case[i], j, case[j]) for i, j in paired}

    cases = list(product(*choices))
    missing = set().union(*map(pairs, cases))
    chosen: list[tuple[str, ...]] = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def imported(name: str) -> TrainingGraph:
    return import_training_graph(onnx.ModelProto.FromString(training_model(name)))


def batches_for(name: str, compiled: Compiled) -> list[Batch]:
    """Draw batches in which ids occur often; of the labels, those of the first half do not count."""
    batches = random_batches(compiled.plan, STEPS, high=7)
    if "ignored" in name:
        for batch in batches:
            labels = next(array for array in batch.values() if array.dtype.kind == "i")
            labels[: len(labels) // 2] = IGNORED
            labels[:: max(1, len(labels) // compiled.plan.replicas)] = 0
    return batches


def check(name: str, cluster: str, strategy: str, batch: str, folder: Path) -> None:
    compiled = compile_step(imported(name), folder / "out", cluster, strategy, batch)

    assert_trains_as_one_device(compiled, batches_for(name, compiled))


@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), pairwise(CHOICES))
def test_ten_steps_match_one_device(
    name: str, cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    check(name, cluster, strategy, batch, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), list(product(*CHOICES)))
def test_ten_steps_match_one_device_in_every_combination(
    name: str, cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    check(name, cluster, strategy, batch, tmp_path)


def test_every_pair_of_choices_is_tried() -> None:
    cases = pairwise(CHOICES)

    for one, other in PAIRED:
        assert {(case[one], case[other]) for case in cases} == set(product(CHOICES[one], CHOICES[other]))


@pytest.mark.parametrize(("strategy", "batch"), [("ps", "global"), ("allreduce", "per-replica")])
def test_a_symbolic_batch_may_be_of_another_size_than_assumed(
    strategy: str, batch: str, tmp_path: Path
) -> None:
    forward = build_model("mlp", dtype="float64", sizes=[6, 8, 5], batch=8)
    model = build_training_graph(
        forward, loss="softmax_cross_entropy", optimizer=Adagrad(0.5), batch_size="dynamic"
    )
    training = import_training_graph(model)
    sizes = {str(size) for data in training.data_inputs.values() for size in data.shape[:1]}

    compiled = compile_step(training, tmp_path / "out", "2x2", strategy, batch, dict.fromkeys(sizes, 8))

    for actual in (8, 24):
        plan = msgspec.structs.replace(compiled.plan, sizes=dict.fromkeys(sizes, actual))
        assert_trains_as_one_device(compiled, random_batches(plan, 2))


# ---------------------------------------------------------------- by hand


LINEAR = """
step (double[4,3] x, double[4,2] t, double[3,2] W, double[3,2] v)
    => (double loss, double[3,2] W_next, double[3,2] v_next)
<double quarter = {0.25}, double lr = {0.1}, double kept = {0.9}> {
    y = MatMul (x, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    dy = Mul (d, quarter)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    squared = Mul (dW, dW)
    grown = Mul (kept, v)
    v_next = Add (grown, squared)
    root = Sqrt (v_next)
    scaled = Div (dW, root)
    part = Mul (lr, scaled)
    W_next = Sub (W, part)
}
"""


@pytest.mark.parametrize(("cluster", "strategy"), [("1x3", "allreduce"), ("2x2", "hybrid"), ("2x2s", "ps")])
def test_a_step_without_a_gradient_trains_on_one_batch(cluster: str, strategy: str, tmp_path: Path) -> None:
    compiled = compile_step(import_text(SQUARED), tmp_path / "out", cluster, strategy, "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, STEPS))


@pytest.mark.parametrize(("batch", "cluster"), [("per-replica", "2x2"), ("global", "1x2")])
def test_both_readings_match_numpy(batch: str, cluster: str, tmp_path: Path) -> None:
    compiled = compile_step(import_text(LINEAR, loss="loss"), tmp_path / "out", cluster, "auto", batch)
    batches = random_batches(compiled.plan, STEPS)
    first = InitialValues(compiled.folder)
    W, v = first.part("W"), np.abs(first.part("v"))

    result = train_in_process(compiled.folder, batches, {"W": W, "v": v})

    samples = 4 if batch == "global" else 16  # of one step; the graph divides by 4
    for step in batches:
        gradient = step["x"].T @ (step["x"] @ W - step["t"]) / samples
        v = 0.9 * v + gradient**2
        W = W - 0.1 * gradient / np.sqrt(v)
    np.testing.assert_allclose(result.variables["W"], W, rtol=1e-9)
    np.testing.assert_allclose(result.variables["v"], v, rtol=1e-9)


# ---------------------------------------------------------------- foreign sparse gradients

GROWN = {
    "float": "double",
    "[6]": "[24]",
    "[2,3]": "[12,2]",
    "[6,4]": "[24,4]",
    "{6, 4}": "{24, 4}",
    "ConstantOfShape": "ConstantOfShape <value = double[1] {0.0}>",
}
TABLE_OF_24 = reduce(lambda text, name: text.replace(name, GROWN[name]), GROWN, TABLE)


# Each method on each cluster, and with each reading.
ASKED = sampled(
    product(("all_reduce", "all_gather", "servers"), BATCHES, ("2x2", "2x2s", "3x1")),
    (0, 2, 4, 7, 9, 11, 12, 14, 16),
)


@pytest.mark.parametrize(("method", "batch", "cluster"), ASKED)
def test_a_method_that_is_asked_for_is_used(method: str, batch: str, cluster: str, tmp_path: Path) -> None:
    strategy = forced({"E": method}, {"E": 10}, int(cluster[0]), batch)
    axes = {"ids": 0, "more": 0, "t": 0}
    training = import_text(TABLE_OF_24, loss="loss", sample_axes=axes)

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, batch)

    assert compiled.methods == {"E": method}
    gathered = compiled.started("all_gather_rows")
    assert bool(gathered) == (method == "all_gather")
    assert bool(compiled.started("all_to_all_rows")) == (method == "servers")
    reduced = [label for kind in ("all_reduce", "reduce") for label in compiled.started(kind)]
    assert any("loss" not in label or "more" in label for label in reduced) == (method == "all_reduce")
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, STEPS, high=4))


# The gradient of a sum is the same for all that is added: rows of one tensor, under two ids.
ADDED = """
forward (int64[8] users, int64[8] items, double[8,1] t) => (double loss)
<double[7,1] U = {U7}, double[9,1] I = {I9}> {
    u = Gather (U, users)
    i = Gather (I, items)
    s = Add (u, i)
    d = Sub (s, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("methods", [("all_reduce",) * 2, ("servers",) * 2, ("all_gather", "servers")])
def test_tables_that_are_added_up_have_rows_in_common_but_no_ids(
    tmp_path: Path, methods: tuple[str, str], batch: str
) -> None:
    values = {f"{{{n}{rows}}}": f"{{{', '.join(['0.5'] * rows)}}}" for n, rows in (("U", 7), ("I", 9))}
    text = reduce(lambda text, name: text.replace(name, values[name]), values, ADDED)
    step = build_training_graph(parse(text), loss="loss", optimizer=Adagrad(0.1))
    strategy = forced(dict(zip("UI", methods, strict=True)), {"U": 7, "I": 9}, 2, batch)

    compiled = compile_step(import_training_graph(step), tmp_path / "out", "2x2", strategy, batch)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))
