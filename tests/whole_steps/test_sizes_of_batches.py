"""What a step makes of its batch's sizes is the same for all micro-batches, and is made once."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    random_batches,
    verified,
)
from tests.sampling import sampled

# Heads of h [n, 3] whose gradients are sizes alone, for some parameter: p [3].
HEADS = {
    "a mean": "y = Add (h, p) loss = ReduceMean <keepdims = 0> (y)",
    "likelihood": "q = Mul (h, h) w = Mul (q, p) y = Add (w, p) loss = ReduceMean <keepdims = 0> (y)",
    "a sum by its size": "y = Add (h, p) t = ReduceSum <keepdims = 0> (y) n = Size (y) "
    "c = CastLike (n, t) loss = Div (t, c)",
    "samples counted": "y = Add (h, p) t = ReduceSum <keepdims = 0> (y) s = Shape <start = 0, end = 1> (x) "
    "e = Squeeze (s) c = CastLike (e, t) loss = Div (t, c)",
    "a mean and a norm": "y = Tanh (h) m = ReduceMean <keepdims = 0> (y) q = Mul (p, p) "
    "r = ReduceMean <keepdims = 0> (q) loss = Add (m, r)",
}
STRATEGIES = (
    ("1x2", "pipeline=2,microbatches=2", "global"),
    ("1x2", "pipeline=2,microbatches=3", "per-replica"),
    ("1x2", "microbatches=3", "global"),
    ("1x2", "microbatches=2", "per-replica"),
    ("1x1", "microbatches=6", "global"),
    ("2x2", "pipeline=2,data=2,microbatches=3", "global"),
    ("1x2", "tensor=2,microbatches=2", "global"),
)


def step(head: str, batch: str) -> onnx.ModelProto:
    model = parse(f"forward (double[{batch},4] x) => (double loss) {{ h = MatMul (x, W) {HEADS[head]} }}")
    rng = np.random.default_rng(0)
    for name, shape in {"W": (4, 3), "p": (3,)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    choice = ParameterChoice(train=("W", "p"))
    return build_training_graph(model, loss="loss", optimizer=Momentum(0.1), parameters=choice)


CASES = list(product(HEADS, STRATEGIES, ("12", "n")))


@pytest.mark.parametrize(("head", "way", "batch"), sampled(CASES, range(0, len(CASES), 5)))
def test_updates_run_once_a_step(head: str, way: tuple[str, str, str], batch: str, tmp_path: Path) -> None:
    training = import_training_graph(step(head, batch))

    compiled = compile_step(training, tmp_path / "out", *way, sizes={"n": 12} if batch == "n" else {})

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))


COUNTING = """
step (double[6,4] x, double[4,3] W, int64 seen) => (double loss, double[4,3] W_next, int64 seen_next, TOLD)
<double rate = {0.1}> {
    y = MatMul (x, W)
    loss = ReduceMean <keepdims = 0> (y)
    xt = Transpose <perm = [1, 0]> (x)
    g = MatMul (xt, y)
    part = Mul (g, rate)
    W_next = Sub (W, part)
    samples = Shape <start = 0, end = 1> (y)
    one = Squeeze (samples)
    seen_next = Add (seen, one)
    NODES
}
"""
TOLD = {
    "double told": "size = Size (x) told = Cast <to = 11> (size)",
    "int64 told": "told = Size (y)",
    "int64[2] told": "told = Shape (x)",
    "int64[1] told": "told = Shape <start = 1> (y)",
}
WAYS = (
    ("1x2", "microbatches=3", "global"),
    ("1x2", "pipeline=2,microbatches=2", "per-replica"),
    ("1x2", "allreduce", "per-replica"),
    ("1x3", "ps", "per-replica"),
    ("1x2", "allreduce", "global"),
    ("2x2", "fsdp", "per-replica"),
)


@pytest.mark.parametrize(("told", "way"), sampled(product(TOLD, WAYS), range(0, 24, 5)))
def test_sizes_are_counted_and_told_once_a_step(told: str, way: tuple[str, str, str], tmp_path: Path) -> None:
    model = parse(COUNTING.replace("TOLD", told).replace("NODES", TOLD[told]))
    state = {"W": "W_next", "seen": "seen_next"}
    options = GraphOptions(state=state, loss="loss", sample_axes={"x": 0})
    initial = {"W": np.ones((4, 3)), "seen": np.array(0, np.int64)}
    for name, value in initial.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))

    compiled = compile_step(import_training_graph(model, options), tmp_path / "out", *way)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))


def test_positions_of_samples_pick_from_another_axis(tmp_path: Path) -> None:
    """Of Gather's gradient the shape has a size that the op finds, though inference does not know it."""
    model = parse(
        "forward (int64[6,2] i, float[3,6,2] t) => (float loss) "
        "{ y = Gather <axis = 1> (E, i) d = Sub (y, t) e = Mul (d, d) loss = ReduceMean <keepdims = 0> (e) }"
    )
    table = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "E"))
    choice = ParameterChoice(train=("E",))
    training = import_training_graph(
        build_training_graph(model, loss="loss", optimizer=SGD(0.1), parameters=choice)
    )

    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=5))


@pytest.mark.parametrize("strategy", ["ps", "hybrid"])
def test_a_parameter_without_entries_is_kept_by_all(strategy: str, tmp_path: Path) -> None:
    model = parse(
        "forward (double[6,3] x) => (double loss) <int64[2] none = {6, 0}> { y = MatMul (x, W) "
        "empty = ConstantOfShape <value = double[1] {0.0}> (none) z = MatMul (empty, Z) s = Add (y, z) "
        "square = Mul (s, s) loss = ReduceMean <keepdims = 0> (square) }"
    )
    for name, value in {"W": np.ones((3, 4)), "Z": np.ones((0, 4))}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    choice = ParameterChoice(train=("W", "Z"))
    training = import_training_graph(
        build_training_graph(model, loss="loss", optimizer=SGD(0.1), parameters=choice)
    )

    compiled = compile_step(training, tmp_path / "out", "1x2", strategy, "global")

    assert verified(compiled, random_batches(compiled.plan, 2)).passed


ALIKE = """
forward (int64[6] i) => (double loss) {
    e = Gather <axis = 0> (E, i)
    loss = ReduceMean <keepdims = 0> (e)
}
"""


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    sampled(
        [
            *(("2x2", name) for name in ("allreduce", "fsdp,microbatches=2", "data=2,tensor=2", "hybrid")),
            *(("1x2", "ps"), ("2x2", "pipeline=2,data=2,microbatches=2"), ("1x3", "auto")),
        ],
        (0, 1, 2, 4),
    ),
)
def test_rows_of_a_gradient_may_be_alike_where_ids_are_not(
    cluster: str, strategy: str, tmp_path: Path
) -> None:
    """Each replica's ids go with rows of its own, though all have the same."""
    model = parse(ALIKE)
    table = np.random.default_rng(0).normal(size=(7, 4))
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "E"))
    choice = ParameterChoice(train=("E",))
    training = import_training_graph(
        build_training_graph(model, loss="loss", optimizer=Momentum(0.1), parameters=choice)
    )

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, "per-replica")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3, high=7))


@pytest.mark.parametrize("strategy", ["tensor=2", "pipeline=2", "workers=1"])
def test_one_replica_counts_in_integers(strategy: str, tmp_path: Path) -> None:
    text = (
        COUNTING.replace(", TOLD", "").replace("NODES", "").replace("Shape <start = 0, end = 1> (y)", "Hits")
    )
    text = text.replace(
        "samples = Hits", "p = Greater (y, y) q = Cast <to = 7> (p) samples = ReduceSum <keepdims = 1> (q)"
    )
    model = parse(text)
    for name, value in {"W": np.ones((4, 3)), "seen": np.array(0, np.int64)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    options = GraphOptions(state={"W": "W_next", "seen": "seen_next"}, loss="loss", sample_axes={"x": 0})

    compiled = compile_step(import_training_graph(model, options), tmp_path / "out", "1x2", strategy)

    assert verified(compiled, random_batches(compiled.plan, 2)).passed
