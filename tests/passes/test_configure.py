"""Strategies on meshes that do not fit the step are refused with what, where and fix; nothing is written."""

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy, Synchronisation
from partc.passes.layouts.layouts import Split
from partc.runtime.errors import BadStrategy
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import Compiled, compile_step, import_text
from tests.checks.training_steps import EVERYTHING

STEP = """
step (double[8,4] x, double[4,6] W, double[6] b) => (double loss, double[4,6] W_next, double[6] b_next)
<int64[1] samples = {0}> {
    y = MatMul (x, W)
    z = Add (y, b)
    p = Softmax <axis = -1> (z)
    loss = ReduceSum <keepdims = 0> (p)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, p)
    db = ReduceSum <keepdims = 0> (p, samples)
    W_next = Sub (W, dW)
    b_next = Sub (b, db)
}
"""
MESH = {"data": 2, "tensor": 2}


OF_TIMES = """
step (double[8,3,4] x, double[4,6] W) => (double loss, double[4,6] W_next)
<int64[2] inputs = {24, 4}, int64[2] outputs = {24, 6}> {
    y = MatMul (x, W)
    p = Mul (y, y)
    loss = ReduceSum <keepdims = 0> (p)
    dy = Add (y, y)
    rows = Reshape (x, inputs)
    columns = Transpose <perm = [1, 0]> (rows)
    gradients = Reshape (dy, outputs)
    dW = MatMul (columns, gradients)
    W_next = Sub (W, dW)
}
"""


def compiled(folder: Path, step: str = STEP, **fields: object) -> Compiled:
    training = import_text(step, loss="loss", sample_axes={"x": 0})
    asked = {"parameters": {}, "mesh": MESH, **fields}
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", **asked)  # type: ignore[arg-type]
    return compile_step(training, folder / "out", "2x2", strategy, "global")


def product(training: Compiled) -> str:
    nodes = training.compilation.training.graph.nodes
    return next(node.name for node in nodes if node.outputs[0].name == "y")


@pytest.mark.parametrize(
    ("fields", "what", "at"),
    [
        ({"mesh": {"data": 2, "tensor": 4}}, "a mesh of 2 x 4 on 4 workers", "mesh"),
        ({"mesh": {"data": 4, "tensor": 0}}, "a mesh of 4 x 0 on 4 workers", "mesh"),
        ({"mesh": {"data": 2, "a*b": 2}}, "a mesh axis 'a*b'", "mesh"),
        ({"ops": (OpConfig("*"),)}, "nothing is asked for '*'", "ops[0]"),
        (
            {"devices": ("host0/cpu0", "host1/cpu0")},
            "a mesh of 2 x 2 on 2 devices",
            "mesh",
        ),
        (
            {"mesh": {"data": 2}, "devices": ("host0/cpu0", "host0/gpu0")},
            "unknown device 'host0/gpu0'",
            "devices",
        ),
        (
            {"mesh": {"data": 2}, "devices": ("host0/cpu0", "host0/cpu0")},
            "device 'host0/cpu0' is named twice",
            "devices",
        ),
        (
            {"mesh": {}, "devices": ("host0/cpu0",), "ops": (OpConfig("*", devices=("host0/cpu0",)),)},
            "devices of a mesh, but no mesh",
            "devices",
        ),
        ({"mesh": {}, "devices": ("host0/cpu0",)}, "there is no mesh", "mesh"),
        ({"variables": {"V": {"tensor": AxisSplit(0)}}}, "unknown variable 'V'", "variables: V"),
        ({"variables": {"W": {"rows": AxisSplit(0)}}}, "unknown mesh axis 'rows'", "variables: W"),
        ({"variables": {"W": {"tensor": AxisSplit(-1)}}}, "axis -1 of a variable", "variables: W: tensor"),
        ({"mesh": {}, "variables": {"W": {"tensor": AxisSplit(0)}}}, "there is no mesh", "mesh"),
        ({"parameters": {"W": Synchronisation("servers")}}, "'W' on servers", "parameters: W: method"),
        ({"ops": (OpConfig("*", {"batch/2": "data"}),)}, "no dimension 'batch/2'", "split: batch/2"),
        ({"ops": (OpConfig("*", {"batch": "tensor"}),)}, "samples along 'tensor'", "split: batch"),
        ({"ops": (OpConfig("*", {"batch": "data*data"}),)}, "'data' splits two dimensions", "split: batch"),
        (
            {"ops": (OpConfig("MatMul*", {"out:0": "tensor", "out:1": "tensor"}),)},
            "'tensor' splits two dimensions",
            "split: out:1",
        ),
        (
            {"ops": (OpConfig("MatMul*", {"batch": "data", "out:1": "data"}),)},
            "'data' splits two dimensions",
            "split: out:1",
        ),
        ({"variables": {"W": {"tensor": AxisSplit(2)}}}, "axis 2 of a variable", "variables: W: tensor"),
        ({"variables": {"W": {"tensor": AxisSplit(1, 4)}}}, "axis 1 behind 4", "variables: W: tensor"),
        (
            {"variables": {"b": {"data": AxisSplit(0, 2), "tensor": AxisSplit(0, 2)}}},
            "cannot be cut so: more parts than entries",
            "variables: b",
        ),
        ({"ops": (OpConfig("none*", {"out:1": "tensor"}),)}, "no op is called 'none*'", "ops[0]: op"),
        ({"ops": (OpConfig("*", {"rows": "tensor"}),)}, "no dimension 'rows'", "ops[0]: split: rows"),
        ({"ops": (OpConfig("*", {"out:0": "model"}),)}, "unknown mesh axis 'model'", "ops[0]: split: out:0"),
        ({"ops": (OpConfig("*", {"out:0": 3}),)}, "no mesh axis of 3 parts is left", "ops[0]: split: out:0"),
        ({"ops": (OpConfig("*", {"in:5:0": 2}),)}, "has no operand 5", "ops[0]: split: in:5:0"),
        ({"ops": (OpConfig("*", {"out:7": 2}),)}, "has no dimension out:7", "ops[0]: split: out:7"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, object], what: str, at: str, tmp_path: Path) -> None:
    with pytest.raises(BadStrategy) as refused:
        compiled(tmp_path, **fields)

    assert what in refused.value.what
    assert at in refused.value.at
    assert refused.value.fix
    assert not list(tmp_path.iterdir())


def test_an_axis_that_an_op_keeps_whole_is_refused(tmp_path: Path) -> None:
    nodes = compiled(tmp_path).compilation.training.graph.nodes
    softmax = next(node.name for node in nodes if node.op == "Softmax")

    with pytest.raises(BadStrategy, match="cannot split out:1"):
        compiled(tmp_path / "again", ops=(OpConfig(softmax, {"out:1": "tensor"}),))


def test_of_a_pattern_and_a_name_the_last_holds(tmp_path: Path) -> None:
    name = product(compiled(tmp_path / "plain"))
    ops = (OpConfig("*", {"batch": "data"}), OpConfig(name, {"out:1": "tensor"}))

    placements = compiled(tmp_path / "out", ops=ops).compilation.lowered.native["y"].placements

    assert placements[1] == Split(1)


def test_parts_and_products_of_axes_are_understood(tmp_path: Path) -> None:
    name = product(compiled(tmp_path / "plain"))

    by_number = compiled(tmp_path / "number", ops=(OpConfig(name, {"out:0": 2, "out:1": 2}),))
    by_product = compiled(tmp_path / "product", ops=(OpConfig(name, {"out:0": "data*tensor"}),))

    placements = by_number.compilation.lowered.native["y"].placements
    assert [(p.axis, p.outer) for p in placements] == [(0, 1), (1, 1)]  # type: ignore[union-attr]
    placements = by_product.compilation.lowered.native["y"].placements
    assert [(p.axis, p.outer) for p in placements] == [(0, 1), (0, 1)]  # type: ignore[union-attr]


def test_a_pattern_splits_the_way_forward_and_gradients_follow(tmp_path: Path) -> None:
    """The gradient is a MatMul too, of two dimensions."""
    split = compiled(tmp_path, OF_TIMES, ops=(OpConfig("MatMul*", {"out:2": "tensor"}),))

    assert split.compilation.lowered.native["y"].splits() == [(1, Split(2))]


WRITTEN_AS_OTHERS = """
step (double[8,3,6] x) => (double loss) {
    v = MatMul (x, W)
    y = RMSNormalization (v, scale)
    s = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (s)
}
"""


def test_a_split_of_an_operator_that_is_written_as_others_names_those_that_take_it(tmp_path: Path) -> None:
    model = parse(WRITTEN_AS_OTHERS, opset=23)
    for name, shape in (("W", (6, 6)), ("scale", (6,))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape), name))
    model.graph.node[1].name = "norm"
    step = build_training_graph(model, loss="loss", optimizer=SGD(0.1), parameters=EVERYTHING)
    ops = (OpConfig("norm", {"out:1": "tensor"}),)
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 1, "tensor": 3}, ops=ops)

    with pytest.raises(
        BadStrategy, match="'norm' is written as other operators, not all of which"
    ) as refused:
        compile_step(import_training_graph(step), tmp_path / "out", "1x3", strategy, "global")

    assert refused.value.at == "ops[0]: split: out:1"
    assert "name those that can, of 'norm/" in refused.value.fix


def test_blocks_that_do_not_divide_an_axis_are_refused_with_its_size(tmp_path: Path) -> None:
    ops = (OpConfig("*MatMul*", {"in:1:1/4": "tensor"}),)

    with pytest.raises(
        BadStrategy, match="cannot split in:1:1/4 into 2 parts: 'W' has 6 entries there, which"
    ):
        compiled(tmp_path, ops=ops)
