"""Steps that join parts of different sizes and compute along the joined axis: every part may be divided.

Networks are drawn: how many parts and how large, what is computed of them together, which are picked at the
end, and which of them are divided among how many ranks. Every tensor of every rank is the single device's.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from partc.passes.search.named import divide_products
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import compile_as_allowed, random_batches, verified
from tests.checks.oracle import Oracle
from tests.sampling import sampled

SAMPLES, WIDTH = 8, 6
POINTS = ("Tanh", "Sigmoid", "Neg")
NORMALISED = ("LogSoftmax <axis = AXIS>", "Softmax <axis = AXIS>")


def random_network(seed: int) -> onnx.ModelProto:
    """Draw a loss of parts [8, n] that are joined, normalised and perhaps picked again."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.permutation([*rng.integers(1, 3, 1), *rng.integers(4, 13, 2)])]
    axis = int(rng.integers(0, 2))  # [n, 8] or [8, n]
    shapes = {"v": (WIDTH, WIDTH)} | {f"w{part}": (WIDTH, size) for part, size in enumerate(sizes)}
    lines = [f"p{part} = MatMul (h, w{part})" for part in range(len(sizes))]
    parts = [f"p{part}" for part in range(len(sizes))]
    if axis == 0:
        lines += [f"t{part} = Transpose <perm = [1, 0]> ({name})" for part, name in enumerate(parts)]
        parts = [f"t{part}" for part in range(len(sizes))]
    lines.append(f"y0 = Concat <axis = {axis - 2 * int(rng.integers(0, 2))}> ({', '.join(parts)})")
    for step in range(int(rng.integers(1, 4))):
        lines.append(f"y{step + 1} = {_next(rng, f'y{step}', axis)}")
    last = lines[-1].split(" = ")[0]
    lines += _end(rng, last, axis, sizes)
    numbers = f"int64[1] joined = {{{axis}}}, int64[{len(sizes)}] sizes = {{{', '.join(map(str, sizes))}}}"
    body = "\n".join(["h0 = MatMul (x, v)", "h = Tanh (h0)", *lines])
    inputs = ", ".join(f"double[{a},{b}] {name}" for name, (a, b) in shapes.items())
    model = parse(
        f"net (double[{SAMPLES},{WIDTH}] x, {inputs}) => (double loss)\n"
        f"<double half = {{0.5}}, {numbers}> {{\n{body}\n}}"
    )
    for name, shape in shapes.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    return model


def _next(rng: np.random.Generator, read: str, axis: int) -> str:
    kind = rng.integers(0, 4)
    if kind == 0:
        return f"{rng.choice(POINTS)} ({read})"
    if kind == 1:
        return f"Mul ({read}, half)"
    return f"{rng.choice(NORMALISED).replace('AXIS', str(axis))} ({read})"


def _end(rng: np.random.Generator, last: str, axis: int, sizes: list[int]) -> list[str]:
    """Make a loss of one part, of all of them by Split, of sums along the axis, or of the whole."""
    kind = int(rng.integers(0, 4))
    if kind == 0:
        results = ", ".join(f"s{part}" for part in range(len(sizes)))
        picked = f"s{int(rng.integers(0, len(sizes)))}"
        lines = [f"{results} = Split <axis = {axis}> ({last}, sizes)"]
    elif kind == 1:
        picked = "s"
        lines = [f"q = Mul ({last}, {last})", "s = ReduceSum <keepdims = 0> (q, joined)"]
    elif kind == 2:
        picked, part = "s", int(rng.integers(0, len(sizes)))
        start = sum(sizes[:part])
        lines = [
            f"start = Constant <value_ints = [{start}]> ()",
            f"stop = Constant <value_ints = [{start + sizes[part]}]> ()",
            f"s = Slice ({last}, start, stop, joined)",
        ]
    else:
        picked, lines = last, []
    return [*lines, f"square = Mul ({picked}, {picked})", "loss = ReduceMean <keepdims = 0> (square)"]


def check(seed: int, folder: Path) -> None:
    """Divide some of the products that are joined, and hold every tensor of every rank to the whole."""
    rng = np.random.default_rng(1000 + seed)
    step = build_training_graph(random_network(seed), loss="loss", optimizer=Momentum(0.1))
    training = import_training_graph(step)
    oracle = Oracle(training)
    ranks = int(rng.choice([2, 3, 4]))
    products = {
        node.name: training.variables[node.inputs[1].name].shape[1]
        for node in training.graph.nodes
        if node.op == "MatMul" and node.inputs[1].name.startswith("w")
    }
    ops = tuple(
        OpConfig(name, split={"out:1": "tensor"})
        for name, size in products.items()
        if size >= ranks and rng.random() < 0.7
    )
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 1, "tensor": ranks}, ops=ops)
    compiled = compile_as_allowed(step, folder / "out", f"1x{ranks}", strategy, "global")
    batches = random_batches(compiled.plan, 2, seed)
    wrong = oracle.first_wrong(compiled, batches[0], 1e-9)
    assert wrong is None, wrong
    report = verified(compiled, batches)
    assert report.passed, report.summary()


@pytest.mark.parametrize("seed", sampled(range(400), range(8)))
def test_parts_of_any_sizes_are_divided(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


NAMES = [
    ("1x2", "tensor=2", "global"),
    ("2x2", "data=2,tensor=2", "per-replica"),
    ("2x2", "data=2,tensor=2", "global"),
    ("1x3", "tensor=3", "global"),
    ("1x4", "tensor=4,microbatches=2", "global"),
    ("2x2", "pipeline=2,tensor=2,microbatches=2", "global"),
    ("2x2", "data=2,tensor=2,microbatches=2", "per-replica"),
]


@pytest.mark.parametrize(("shape", "strategy", "batch"), sampled(NAMES, range(2)))
def test_scores_of_sampled_words_are_divided(
    shape: str, strategy: str, batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank is sent the rows of its words alone, and scores these: here, where messages take no time."""
    monkeypatch.setattr(divide_products, "MESSAGE_S", 0.0)
    sizes = {"vocab": 60, "embedding": 16, "cells": 32, "projection": 16, "samples": 24, "steps": 3}
    forward = build_model("lm", batch=8, dtype="float64", **sizes)
    step = build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1))
    compiled = compile_as_allowed(step, tmp_path / "out", shape, strategy, batch)

    (scores,) = [config for config in compiled.compilation.options.chosen_strategy().ops if config.split]
    assert scores.split == {"batch": "data", "out:1": "tensor"}
    batches = random_batches(compiled.plan, 2, high=20)
    assert Oracle(import_training_graph(step)).first_wrong(compiled, batches[0], 1e-9) is None
    assert verified(compiled, batches).passed
    product = next(n for n in compiled.compilation.training.graph.nodes if n.name == scores.op)
    rows = product.inputs[1].inputs[0].inputs[0].name
    assert any(rows in label for label in compiled.started("reduce_scatter"))
    assert not any(rows in label for label in compiled.started("all_reduce"))
