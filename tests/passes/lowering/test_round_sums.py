"""Sums of gradients are rounded, and no others, whatever their shape."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Start
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import cluster_of

# Statistics are shaped like the scale and the bias, and the backward pass reads the bias's gradient.
NORMALISED = """
forward (float[16,8] x) => (float[16,4] o) <float[8,1024] w1, float[1024] s, float[1024] b, float[1024] m,
    float[1024] v, float[1024,4] w2> {
    a = MatMul (x, w1)
    c, m_next, v_next = BatchNormalization <training_mode = 1> (a, s, b, m, v)
    d = Relu (c)
    o = MatMul (d, w2)
}
"""
SHAPES = {"w1": (8, 1024), "s": (1024,), "b": (1024,), "m": (1024,), "v": (1024,), "w2": (1024, 4)}

# Rows are added to the table's dense gradient once it is summed.
TIED = """
forward (int64[16,2] i) => (float[16,300] o) <float[300,64] e, float[128,64] v, int64[2] flat = {16, 128}> {
    a = Gather (e, i)
    b = Reshape (a, flat)
    c = MatMul (b, v)
    d = Tanh (c)
    t = Transpose <perm = [1, 0]> (e)
    o = MatMul (d, t)
}
"""
SHAPES_OF_TIED = {"e": (300, 64), "v": (128, 64)}


def starts_of(
    folder: Path,
    strategy: str,
    batch: str,
    optimizer: Optimizer,
    text: str = NORMALISED,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> list[Start]:
    """Return the sums of a step's plan under --round-sums."""
    model = parse(text, opset=17)
    for name, shape in shapes.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    step = build_training_graph(model, loss="softmax_cross_entropy", optimizer=optimizer)
    options = Options(strategy=strategy, batch=batch, round_sums="float16")  # type: ignore[arg-type]
    compile_graph(import_training_graph(step), cluster_of("2x1"), folder, options)
    program = read_plan_folder(folder).plan.instructions
    return [i for i in program if isinstance(i, Start) and i.kind in ("all_reduce", "reduce_scatter")]


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.1)], ids=["sgd", "adam"])
def test_statistics_shaped_like_a_parameter_are_not_rounded(
    tmp_path: Path, strategy: str, optimizer: Optimizer
) -> None:
    starts = starts_of(tmp_path / "out", strategy, "global", optimizer)

    rounded = sum(start.payload_bytes for start in starts if start.rounds_to)
    assert rounded == 2 * (8 * 1024 + 1024 * 4)
    assert sum(not start.rounds_to for start in starts) >= 2


def test_a_replicas_own_statistics_leave_all_gradients_to_round(tmp_path: Path) -> None:
    starts = starts_of(tmp_path / "out", "allreduce", "per-replica", SGD(0.1))

    rounded = sum(start.payload_bytes for start in starts if start.rounds_to)
    assert rounded == 2 * (8 * 1024 + 1024 * 4 + 2 * 1024)


@pytest.mark.parametrize("batch", ["global", "per-replica"])
def test_a_tied_tables_dense_gradient_is_rounded(tmp_path: Path, batch: str) -> None:
    starts = starts_of(tmp_path / "out", "allreduce", batch, SGD(0.1), TIED, SHAPES_OF_TIED)

    rounded = sum(start.payload_bytes for start in starts if start.rounds_to)
    assert rounded == 2 * (300 * 64 + 128 * 64)
