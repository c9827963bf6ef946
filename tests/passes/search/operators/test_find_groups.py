"""Operator groups: what is listed, and that whatever is listed compiles as it is copied."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.api import compile, inspect
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy, write_strategy
from partc.passes.search.operators.find_groups import OperatorGroup
from partc.runtime.errors import BadStrategy
from tests.builders.graphs.attention_block import attention_step
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import cluster_of, random_batches

TEXT = """
forward (double[8,6] x) => (double[8,4] logits) {
    a = MatMul (x, W1)
    h = Add (a, c1)
    r = Tanh (h)
    logits = Gemm <transB = 1> (r, W2, c2)
}
"""
SHAPES = {"W1": (6, 12), "c1": (12,), "W2": (4, 12), "c2": (4,)}


@cache
def mlp() -> onnx.ModelProto:
    """Return a perceptron whose first layer has a name as exporters write them."""
    forward = parse(TEXT)
    forward.graph.node[0].name = "/layers[0]/MatMul"
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        values = rng.normal(scale=0.4, size=shape)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


@cache
def block() -> onnx.ModelProto:
    return attention_step(SGD(0.1))


@cache
def groups_of(model: Callable[[], onnx.ModelProto]) -> tuple[OperatorGroup, ...]:
    return inspect(model()).groups


ENTRIES = [
    pytest.param(model, group.node, dimension, parts, id=f"{group.node} {dimension}")
    for model in (mlp, block)
    for group in groups_of(model)
    for dimension, parts in group.splits.items()
]


def strategy_file(folder: Path, op: str, dimension: str, parts: int) -> Path:
    strategy = Strategy(
        MESH_STRATEGY_FORMAT,
        "global",
        {},
        mesh={"data": 1, "tensor": parts},
        ops=(OpConfig(op, {dimension: parts}),),
    )
    path = folder / "strategy.json"
    write_strategy(strategy, path)
    return path


def test_a_perceptron_has_a_group_for_each_layer() -> None:
    first, second = groups_of(mlp)[:2]

    assert (first.node, first.op, first.shape) == ("/layers[0]/MatMul", "MatMul", (8, 12))
    assert (first.reads, first.light) == (("W1",), 2)
    assert first.splits == {"out:0": 8, "out:1": 12, "in:0:1": 6}
    assert (second.op, second.reads) == ("Gemm", ("W2", "c2"))
    assert {"out:0": 8, "out:1": 4}.items() <= second.splits.items()


def test_normalisations_and_products_of_activations_are_groups_and_point_by_point_ops_are_not() -> None:
    groups = {group.node: group for group in groups_of(block)}
    ops = [group.op for group in groups.values()]

    assert ops.count("LayerNormalization") == 2
    assert ops.count("MatMul") >= 9
    assert not {"Add", "Tanh", "Reshape", "Transpose", "Softmax"} & set(ops)


def test_a_listed_dimension_has_the_factors_of_its_axis() -> None:
    attended = next(g for g in groups_of(block) if g.shape == (8, 4, 6, 6))

    assert attended.reads == ()
    assert attended.splits == {"out:0": 8, "out:1": 4, "out:2": 6, "out:3": 6, "in:0:3": 4}


@pytest.mark.parametrize(("model", "op", "dimension", "parts"), ENTRIES[::5])
def test_what_is_listed_compiles_and_trains(
    model: Callable[[], onnx.ModelProto], op: str, dimension: str, parts: int, tmp_path: Path
) -> None:
    check(model, op, dimension, parts, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("model", "op", "dimension", "parts"), ENTRIES)
def test_whatever_is_listed_compiles_and_trains(
    model: Callable[[], onnx.ModelProto], op: str, dimension: str, parts: int, tmp_path: Path
) -> None:
    check(model, op, dimension, parts, tmp_path)


def check(model: Callable[[], onnx.ModelProto], op: str, dimension: str, parts: int, tmp_path: Path) -> None:
    path = strategy_file(tmp_path, op, dimension, parts)

    folder = compile(model(), cluster_of(f"1x{parts}"), tmp_path / "out", strategy=str(path))

    batches = random_batches(folder.plan, 1, high=3)
    assert verify(folder, steps=1, data=batches, launcher=launch_in_process).passed


@pytest.mark.parametrize(
    ("dimension", "parts", "what"),
    [
        ("out:1", 13, "cannot split out:1 into 13 parts: it has 12 entries"),
        ("out:2", 2, "has no dimension out:2"),
        ("in:1:3", 2, "has no dimension in:1:3"),
        ("in:2:0", 2, "has no operand 2"),
    ],
)
def test_what_is_not_listed_is_refused(dimension: str, parts: int, what: str, tmp_path: Path) -> None:
    path = strategy_file(tmp_path, "/layers[0]/MatMul", dimension, parts)

    with pytest.raises(BadStrategy, match=what):
        compile(mlp(), cluster_of(f"1x{parts}"), tmp_path / "out", strategy=str(path))
