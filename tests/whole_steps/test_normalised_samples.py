"""Ops that normalise over the samples, written in primitives: ranks sum statistics, and gather no samples."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.graph.expand_normalised import can_expand, expand
from partc.passes.graph.infer_facts import infer_facts
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

FORWARD = """
forward (double[8,6] x, int64[1,5] winners) => (double loss)
<double[6,5] W, double[5] s, int64[1] first = {0}, double half = {0.5}> {
    h = MatMul (x, W)
    NORMALISE
    square = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (square)
}
"""
NORMALISED = {
    "Softmax": "p = Softmax <axis = 0> (h) y = Mul (p, h)",
    "LogSoftmax": "p = LogSoftmax <axis = 0> (h) y = Mul (p, s)",
    "LayerNormalization": "n = LayerNormalization <axis = 0> (h, x5) y = Sub (n, s)",
    "ReduceLogSumExp": "e = ReduceLogSumExp (h, first) y = Sub (h, e)",
    "ReduceL2": "e = ReduceL2 (h, first) d = Div (h, e) y = Sub (d, s)",
    "GatherElements": "e = GatherElements <axis = 0> (h, winners) y = Sub (h, e)",
}


@pytest.mark.parametrize("op", NORMALISED)
def test_a_sample_axis_is_normalised_in_parts(op: str, tmp_path: Path) -> None:
    text = FORWARD.replace("NORMALISE", NORMALISED[op])
    if op == "LayerNormalization":
        text = text.replace("int64[1,5] winners", "double[8,5] x5")
    elif op != "GatherElements":
        text = text.replace(", int64[1,5] winners", "")
    model = parse(text)
    rng = np.random.default_rng(0)
    for name, shape in {"W": (6, 5), "s": (5,)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    del model.graph.value_info[:]
    choice = ParameterChoice(train=("*",))
    step = build_training_graph(model, loss="loss", optimizer=Momentum(0.1), parameters=choice)
    axes = {"x": 0, "x5": 0, "winners": None}
    given = {name.name: axes[name.name] for name in model.graph.input}
    training = import_training_graph(step, GraphOptions(sample_axes=given))
    facts = infer_facts(training, {})
    nodes = [node.name for node in training.graph.nodes if can_expand(node, facts)]
    assert op in {node.op for node in training.graph.nodes if node.name in nodes}
    expand(training, nodes, facts)

    compiled = compile_step(training, tmp_path / "out", "2x2", "allreduce", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3, high=8))
    gathers = ("all_gather", "gather_rows", "all_gather_rows", "all_to_all_rows")
    assert not [label for kind in gathers for label in compiled.started(kind)]


# Each sample's own pair is its class: the labels are constants of the graph, 7 .. 0.
PAIRS = """
forward (double[8,6] x, double[8,6] z) => (double loss)
<double[6,5] W, double[6,5] V, int64[1] last = {1}> {
    labels = Constant <value = int64[8] {7, 6, 5, 4, 3, 2, 1, 0}> ()
    h = MatMul (x, W)
    g = MatMul (z, V)
    gt = Transpose <perm = [1, 0]> (g)
    scores = MatMul (h, gt)
    logs = LogSoftmax <axis = 1> (scores)
    column = Unsqueeze (labels, last)
    picked = GatherElements <axis = 1> (logs, column)
    mean = ReduceMean <keepdims = 0> (picked)
    loss = Neg (mean)
}
"""


def test_scores_are_divided_along_classes_that_constants_name(tmp_path: Path) -> None:
    model = parse(PAIRS)
    rng = np.random.default_rng(0)
    for name in ("W", "V"):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(6, 5)), name))
    training = import_training_graph(build_training_graph(model, loss="loss", optimizer=Momentum(0.1)))
    scores = next(node.name for node in training.graph.nodes if node.outputs[0].name == "scores")
    split = OpConfig(scores, {"out:1": "tensor"})
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 1, "tensor": 2}, ops=(split,))

    compiled = compile_step(training, tmp_path / "out", "1x2", strategy, "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))


BATCHES = """
forward (double[8,6] x) => (double loss)
<double[6,5] W> {
    h = MatMul (x, W)
    n, mean_next, variance_next = BatchNormalization <training_mode = 1> (h, scale, shift, mean, variance)
    t = Tanh (n)
    square = Mul (t, t)
    loss = ReduceMean <keepdims = 0> (square)
}
"""


@pytest.mark.parametrize("cluster", ["1x2", "1x3"])
def test_scales_that_are_shared_are_gathered_ahead_and_their_products_are_not(
    cluster: str, tmp_path: Path
) -> None:
    """What every rank has of a batch's statistics it multiplies by the whole scale."""
    model = parse(BATCHES)
    rng = np.random.default_rng(0)
    sizes = {"W": (6, 5), "scale": (5,), "shift": (5,), "mean": (5,), "variance": (5,)}
    for name, shape in sizes.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(0.5 + rng.random(shape), name))
    choice = ParameterChoice(train=("W", "scale", "shift"))
    training = import_training_graph(
        build_training_graph(model, loss="loss", optimizer=Momentum(0.1), parameters=choice)
    )

    compiled = compile_step(training, tmp_path / "out", cluster, "fsdp", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))
    assert not compiled.started("all_gather_rows")
    assert len(compiled.started("all_gather")) == 1, "W, scale and shift"
