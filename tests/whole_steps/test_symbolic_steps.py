"""Steps with symbolic and computed sizes, distributed: N ranks against one device."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.passes.graph.facts import UNKNOWN
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.checks.training_steps import EVERYTHING
from tests.compiler.differentiation.sizes.test_symbolic_broadcasts import with_parameters

HEADER = '<ir_version: 10, opset_import: ["": 21]> g '

# The first state is zeros of a computed shape, which every rank could make whole.
RECURRENT = """(float[batch,3,4] x, float[1,15,4] a, float[1,15,5] b) => (float loss) {
    s = Shape <end = 1> (x) one = Constant <value_ints = [1]> () five = Constant <value_ints = [5]> ()
    t = Concat <axis = 0> (one, s, five) nought = Constant <value = float {0.0}> () h0 = Expand (nought, t)
    xt = Transpose <perm = [1,0,2]> (x) y, yh = GRU <hidden_size = 5> (xt, a, b, , , h0)
    k = Mul (y, y) loss = ReduceMean <keepdims = 0> (k) }"""

# Rows of a position table, as many as the data says: their gradient is summed over the batch, or is not.
POSITIONS = """(float[4,3,2] x, int64[1] n, float[6,2] a, float[2,2] b) => (float loss) {
    zero = Constant <value_ints = [0]> () axis = Constant <value_ints = [1]> ()
    places = Constant <value = int64[1,6] {0,1,2,3,4,5}> () p = Slice (places, zero, n, axis)
    e = Gather (a, p) h = MatMul (x, b) y = Add (h, e) k = Tanh (y) loss = ReduceMean <keepdims = 0> (k) }"""

# As many samples count as the data says, and their gradient is divided along its columns.
COUNTED = """(double[6,4] x, double[6] m, double[6,4] a, double[6] b) => (double loss) {
    h = Gemm <transB = 1> (x, a, b) nought = Constant <value = double {0}> () counts = Greater (m, nought)
    found = NonZero (counts) column = Transpose <perm = [1,0]> (found) k = GatherND (h, column)
    two = Constant <value = double {2}> () square = Pow (k, two)
    loss = ReduceMean <keepdims = 0> (square) }"""

# Times and samples are one axis before as many columns as the data says: running sums want it whole.
PICKED = """(double[3,6,4,2] x, double[4] m, double[2,2] a, double[2] b) => (double loss) {
    y = MatMul (x, a) h = Add (y, b) rows = Constant <value_ints = [18, 4, 2]> () flat = Reshape (h, rows)
    nought = Constant <value = double {0}> () counts = Greater (m, nought) found = NonZero (counts)
    all = Constant <value_ints = [-1]> () columns = Reshape (found, all) k = Gather <axis = 1> (flat, columns)
    zero = Constant <value = int64 {0}> () sums = CumSum (k, zero) t = Tanh (sums)
    loss = ReduceMean <keepdims = 0> (t) }"""


def step_of(text: str) -> TrainingGraph:
    model = with_parameters(HEADER + text, names="ab")
    return import_training_graph(
        build_training_graph(model, loss="loss", optimizer=SGD(lr=0.5), parameters=EVERYTHING)
    )


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_a_recurrent_layer_with_a_symbolic_batch(batch: str, tmp_path: Path) -> None:
    compiled = compile_step(step_of(RECURRENT), tmp_path, batch=batch, sizes={"batch": 8})

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 3))


@pytest.mark.parametrize("batch", ["per-replica", "global"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_whose_number_only_the_data_says(rows: int, batch: str, tmp_path: Path) -> None:
    compiled = compile_step(step_of(POSITIONS), tmp_path, batch=batch)
    batches = [{**feeds, "n": np.array([rows])} for feeds in random_batches(compiled.plan, 3)]

    assert_trains_as_one_device(compiled, batches)


@pytest.mark.parametrize("rows", [1, 4])
def test_columns_of_rows_whose_number_only_the_data_says_are_gathered(rows: int, tmp_path: Path) -> None:
    mesh = {"data": 2, "tensor": 2, "sequence": 2}
    kept = {"b": {"data": AxisSplit(0), "tensor": AxisSplit(0)}}
    split = OpConfig("Pow:square/gradient/Mul_1", {"out:1": "sequence"})
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh=mesh, variables=kept, ops=(split,))
    compiled = compile_step(step_of(COUNTED), tmp_path / "out", "2x4", strategy, "global")
    counted = np.where(np.arange(6) < rows, 1.0, -1.0)
    batches = [{**feeds, "m": counted} for feeds in random_batches(compiled.plan, 3)]

    assert_trains_as_one_device(compiled, batches)


@pytest.mark.parametrize("columns", [1, 3])
def test_a_factor_before_columns_whose_number_only_the_data_says_is_gathered(
    columns: int, tmp_path: Path
) -> None:
    step = build_training_graph(
        with_parameters(HEADER + PICKED, names="ab"),
        loss="loss",
        optimizer=SGD(lr=0.5),
        parameters=EVERYTHING,
    )
    training = import_training_graph(step, GraphOptions(sample_axes={"x": 1, "m": None}))
    compiled = compile_step(training, tmp_path, "1x2", "allreduce", "global")
    counted = np.where(np.arange(4) < columns, 1.0, -1.0)

    assert_trains_as_one_device(
        compiled, [{**feeds, "m": counted} for feeds in random_batches(compiled.plan, 3)]
    )


def test_a_size_that_only_data_says_is_not_fixed() -> None:
    training = step_of(POSITIONS)
    facts = infer_facts(training, {})

    open_shapes = {name for name, shape in facts.shapes.items() if UNKNOWN in shape}
    assert {"p", "e"} <= open_shapes
    assert not open_shapes & facts.fixed_shapes


def test_a_symbol_in_value_info_does_not_hide_the_size_that_is_assumed() -> None:
    model = onnx.parser.parse_model(
        HEADER + "(float[batch,4] x, float[4,2] w) => (float loss, float[4,2] w_next) {"
        "h = MatMul (x, w) loss = ReduceSum <keepdims = 0> (h) w_next = Identity (w) }"
    )
    model.graph.value_info.append(helper.make_tensor_value_info("h", 1, ["batch", 2]))
    model.graph.value_info.append(helper.make_tensor_value_info("loss", 1, []))
    training = import_training_graph(model, GraphOptions(state={"w": "w_next"}), needs_initial=False)

    assert infer_facts(training, {"batch": 8}).shape("h") == (8, 2)
