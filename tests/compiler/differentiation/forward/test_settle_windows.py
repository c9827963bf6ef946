"""Poolings of which rounding up would begin a window in the padding behind the image."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.forward.settle_windows import settle_windows
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.model_files.open_model import open_model
from partc.compiler.options import GraphOptions
from partc.passes.graph.infer_facts import infer_facts
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.checks.oracle import Oracle
from tests.checks.training_steps import EVERYTHING

OPSETS = (13, 17, 20, 21, 22)
WINDOWS = "kernel_shape = [2,2], strides = [2,2], pads = [1,1,1,1], ceil_mode = 1"
# Of 7 rows the last window reaches beyond the padding; of 5 columns another would begin in it.
MIXED = "kernel_shape = [3,2], strides = [3,2], pads = [0,1,1,1], ceil_mode = 1"
# Each makes 3 x 3 of its image.
POOLINGS = {
    "MaxPool": (WINDOWS, "5,5"),
    "MaxPool_mixed": (MIXED, "7,5"),
    "AveragePool": (WINDOWS, "5,5"),
    "AveragePool_counting": (f"{WINDOWS}, count_include_pad = 1", "5,5"),
    "AveragePool_mixed": (MIXED, "7,5"),
    "AveragePool_counting_mixed": (f"{MIXED}, count_include_pad = 1", "7,5"),
    "LpPool": (WINDOWS, "5,5"),
    "LpPool_mixed": (MIXED, "7,5"),
}

# Of opset 18 on, a LpPool may round up.
CASES = [(name, opset) for name in POOLINGS for opset in OPSETS if opset >= 18 or "LpPool" not in name]
STEP = GraphOptions(state={"W": "W_next"}, loss="loss")


def pooling(name: str, opset: int = 21) -> onnx.ModelProto:
    attributes, image = POOLINGS[name]
    return parse(
        f"""step (float[4,2,{image}] x, float[18,3] W) => (float loss, float[18,3] W_next) {{
            p = {name.split("_")[0]} <{attributes}> (x)
            f = Flatten (p)
            y = MatMul (f, W)
            s = Mul (y, y)
            loss = ReduceMean <keepdims = 0> (s)
            W_next = Sub (W, loss)
        }}""",
        opset,
    )


@pytest.mark.parametrize(("name", "opset"), CASES)
@pytest.mark.parametrize("strategy", ["data=2", "spatial=3"])
def test_a_step_is_computed_as_on_one_device(name: str, opset: int, strategy: str, tmp_path: Path) -> None:
    training = import_training_graph(pooling(name, opset), STEP, needs_initial=False)
    oracle = Oracle(training)

    compiled = compile_step(training, tmp_path / "out", f"1x{strategy[-1]}", strategy, "global")

    assert oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0], 1e-5) is None


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", ["MaxPool", "AveragePool"])
def test_types_that_onnx_s_count_left_in_the_file_do_not_count(name: str, opset: int) -> None:
    inferred = onnx.shape_inference.infer_shapes(pooling(name, opset))

    training = import_training_graph(inferred, STEP, needs_initial=False)

    assert infer_facts(training, {}).shape("p") == (4, 2, 3, 3)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", ["MaxPool", "AveragePool"])
def test_an_output_that_declares_no_sizes_has_those_of_the_windows(name: str, opset: int) -> None:
    model = parse(
        f"forward (float[1,1,5,5] x) => (float loss, float[a,b,c,d] t) {{ h = Mul (x, w) "
        f"y = {name} <{WINDOWS}> (h) t = Tanh (y) loss = ReduceSum <keepdims = 0> (t) }}",
        opset,
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "w"))

    step = build_training_graph(model, loss="loss", optimizer=SGD(0.25), parameters=EVERYTHING)

    (t,) = open_model(step).run(["t"], {"x": np.ones((1, 1, 5, 5), np.float32), "w": np.ones(1, np.float32)})
    assert t.shape == (1, 1, 3, 3)


def pads_and_rounding(attributes: str, image: str) -> tuple[list[int], int]:
    """Return what a MaxPool's attributes are made of."""
    model = parse(f"pooled (float[1,1,{image}] x) => (float[1,1,h,w] y) {{ y = MaxPool <{attributes}> (x) }}")

    settle_windows(model)

    found = {a.name: helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
    return list(found.get("pads", [])), found["ceil_mode"]


def test_windows_are_no_longer_rounded_up_where_none_reaches_beyond_the_padding() -> None:
    assert pads_and_rounding(WINDOWS, "5,5") == ([1, 1, 1, 1], 0)


def test_padding_ends_with_the_last_window_where_others_reach_beyond_theirs() -> None:
    assert pads_and_rounding(MIXED, "7,5") == ([0, 1, 1, 0], 1)


@pytest.mark.parametrize("image", ["4,4", "6,5", "h,5"])
def test_other_poolings_stay(image: str) -> None:
    stays = "kernel_shape = [3,3], strides = [2,2], pads = [0,0,1,1], ceil_mode = 1"

    assert pads_and_rounding(stays, image) == ([0, 0, 1, 1], 1)


def test_columns_that_no_window_reads_beside_rows_beyond_the_end_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="leave out the last 1 of 5 entries of axis 3") as refused:
        pads_and_rounding("kernel_shape = [2,1], strides = [2,3], ceil_mode = 1", "3,5")

    assert "slice those entries off" in refused.value.fix


def test_windows_whose_gaps_reach_beyond_a_kernel_s_length_have_a_gradient() -> None:
    model = parse(
        "forward (float[1,2,7] x) => (float loss) { h = Mul (x, a) "
        "y = MaxPool <kernel_shape = [2], strides = [3], dilations = [2], ceil_mode = 1> (h) "
        "s = Mul (y, y) loss = ReduceSum <keepdims = 0> (s) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "a"))

    step = build_training_graph(model, loss="loss", optimizer=SGD(0.25), parameters=EVERYTHING)

    x = np.arange(14, dtype=np.float32).reshape(1, 2, 7) / 14
    (a_next,) = open_model(step).run(["a_next"], {"x": x, "a": np.ones(1, np.float32)})
    winners = x[:, :, [2, 5, 6]]
    np.testing.assert_allclose(a_next, 1 - 0.25 * 2 * (winners**2).sum(keepdims=True)[0, 0], rtol=1e-6)
