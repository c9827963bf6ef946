"""Micro-batches wait for each other where layers' samples are read with what is made of all of them."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.passes.search.stages.batch_wide import is_batch_wide
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import compile_step
from tests.passes.layouts.test_place_nodes import analysed

FORWARD = """
forward (double[8,6] x, double[8] given) => (double loss)
<double[6,6] W, double[6] s, double[6] m, int64[1] first = {0}, int64[1] last = {1}> {
    h = MatMul (x, W)
    NODES
    square = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (square)
}
"""
CASES = {
    "normalised over the batch": (
        "n, m_next, s_next = BatchNormalization <training_mode = 1> (h, s, s, m, m) y = Tanh (n)",
        True,
    ),
    "a mean that is taken off": ("mean = ReduceMean (h, first) d = Sub (h, mean) y = Mul (d, s)", True),
    "every sample with every other": (
        "t = Transpose <perm = [1, 0]> (h) d = MatMul (h, t) y = Tanh (d)",
        True,
    ),
    "normalised by itself": ("n = LayerNormalization (h, s) y = Tanh (n)", False),
    "weighed by a share of what is given": (
        "sum = ReduceSum <keepdims = 0> (given) share = Div (given, sum) w = Unsqueeze (share, last) "
        "d = Mul (h, w) y = Mul (d, s)",
        False,
    ),
    "a mean that is told besides": ("mean = ReduceMean (h, first) d = Sub (mean, s) y = Mul (d, d)", False),
}


def step(nodes: str) -> onnx.ModelProto:
    model = parse(FORWARD.replace("NODES", nodes))
    if "given" not in nodes:
        del model.graph.input[1:]
    rng = np.random.default_rng(0)
    for name, shape in {"W": (6, 6), "s": (6,), "m": (6,)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(1 + rng.random(shape), name))
    del model.graph.value_info[:]
    choice = ParameterChoice(train=("W",))
    return build_training_graph(model, loss="loss", optimizer=SGD(0.1), parameters=choice)


@pytest.mark.parametrize("case", CASES)
def test_it_is_told(case: str, tmp_path: Path) -> None:
    nodes, is_wide = CASES[case]

    assert is_batch_wide(analysed(step(nodes), tmp_path)) == is_wide


@pytest.mark.parametrize(
    ("case", "microbatches"), [("normalised over the batch", 1), ("normalised by itself", 8)]
)
def test_such_a_batch_is_not_divided_by_a_name(case: str, microbatches: int, tmp_path: Path) -> None:

    training = import_training_graph(step(CASES[case][0]))

    compiled = compile_step(training, tmp_path / "out", "1x2", "pipeline=2", "global")

    assert compiled.plan.microbatches == microbatches
