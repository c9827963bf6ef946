"""The rows of images split by name: which ops are asked, and what is done where images end."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.api import inspect
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import OpConfig
from partc.passes.layouts.layouts import Split
from partc.runtime.errors import BadUsage
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)
from tests.checks.training_steps import EVERYTHING

ROWS = {"batch": "data", "out:2": "spatial"}
WHOLE = {"batch": "data"}


def step(inputs: str, nodes: str) -> onnx.ModelProto:
    text = f"""<ir_version: 10, opset_import: ["": 18]> net ({inputs}) => (float loss) {{
        {nodes} t = Tanh (y) square = Mul (t, t) loss = ReduceMean <keepdims = 0> (square) }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(2)
    for value in model.graph.input[1:]:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        stored = rng.normal(scale=0.3, size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(stored, value.name))
    del model.graph.input[1:]
    return build_training_graph(model, loss="loss", optimizer=SGD(0.1), parameters=EVERYTHING)


def compiled(model: onnx.ModelProto, folder: Path, cluster: str = "1x2", name: str = "spatial=2") -> Compiled:
    return compile_step(import_training_graph(model), folder / "out", cluster, name, "global")


def starts(step: Compiled) -> list[Start]:
    return [i for i in step.plan.instructions if isinstance(i, Start)]


def test_what_follows_a_split_image_is_not_asked(tmp_path: Path) -> None:
    model = step(
        "float[4,3,8,6] x, float[4,3,3,3] a, float[4] s, float[4] z, float[4] m, float[4] v, "
        "float[4,4,1,1] b",
        "c = Conv <pads = [1,1,1,1]> (x, a) n, u, w = BatchNormalization <training_mode = 1> (c, s, z, m, v) "
        "p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (n) y = Conv (p, b)",
    )

    result = compiled(model, tmp_path)

    assert result.compilation.strategy.ops == (OpConfig("Conv:c", ROWS),)
    assert {start.kind for start in starts(result)} == {"all_reduce"}  # 3x3 reads x alone, which all have


def test_rows_are_gathered_where_images_end(tmp_path: Path) -> None:
    """The dense layer's weight [512, 6] is larger than what it reads, [4, 512]."""
    model = step(
        "float[4,3,8,8] x, float[8,3,3,3] a, float[512,6] W",
        "c = Conv <pads = [1,1,1,1]> (x, a) r = Tanh (c) f = Flatten (r) y = MatMul (f, W)",
    )

    result = compiled(model, tmp_path)

    assert result.compilation.strategy.ops == (OpConfig("Conv:c", ROWS), OpConfig("Flatten:f", WHOLE))
    gathered = [start.payload_bytes for start in starts(result) if "gather" in start.kind]
    assert gathered == [4 * 512 * 4]
    assert_trains_as_one_device(result, random_batches(result.plan, 2))


def test_rows_are_split_again_behind_an_op_that_keeps_them_whole(tmp_path: Path) -> None:
    model = step(
        "float[4,3,10,6] x, float[4,3,3,3] a, float[4,4,3,3] b",
        "h = Conv <pads = [1,1,1,1]> (x, a) rows = Constant <value_int = 2> () i = CumSum (h, rows) "
        "y = Conv <pads = [1,1,1,1]> (i, b)",
    )

    result = compiled(model, tmp_path)

    assert result.compilation.strategy.ops == (OpConfig("Conv:h", ROWS), OpConfig("Conv:y", ROWS))
    assert_trains_as_one_device(result, random_batches(result.plan, 2))


def test_windows_that_pad_nothing_go_on_with_the_split_of_what_they_read(tmp_path: Path) -> None:
    model = step(
        "float[4,3,10,6] x, float[4,3,3,3] a, float[4,4,3,3] b, float[4,4,3,3] c",
        "h = Conv <pads = [1,1,1,1]> (x, a) i = Conv (h, b) y = Conv <pads = [1,1,1,1]> (i, c)",
    )

    result = compiled(model, tmp_path)

    assert result.compilation.strategy.ops == (OpConfig("Conv:h", ROWS),)
    native = result.compilation.lowered.native
    assert all(Split(2) in native[name].placements for name in ("h", "i", "y"))
    assert_trains_as_one_device(result, random_batches(result.plan, 2))


def test_rows_that_do_not_divide_stay_split(tmp_path: Path) -> None:
    """Of 7 rows the first rank has 4, of the 4 that windows of stride 2 make each has 2."""
    model = step(
        "float[4,3,7,6] x, float[4,3,3,3] a, float[4] s, float[4] z, float[4] m, float[4] v, "
        "float[4,4,3,3] b, float[4,4,3,3] c",
        "h = Conv <pads = [1,1,1,1]> (x, a) n, u, w = BatchNormalization <training_mode = 1> (h, s, z, m, v) "
        "i = Conv <pads = [1,1,1,1], strides = [2,2]> (n, b) y = Conv <pads = [1,1,1,1]> (i, c)",
    )

    result = compiled(model, tmp_path)

    assert result.compilation.strategy.ops == (OpConfig("Conv:h", ROWS),)
    native = result.compilation.lowered.native
    assert Split(2, uneven=7) in native["n"].placements
    assert Split(2) in native["i"].placements
    assert {start.kind for start in starts(result)} == {"all_reduce", "exchange", "shift_ahead", "shift_back"}
    assert_trains_as_one_device(result, random_batches(result.plan, 2))


WINDOWS = (
    "AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]>",  # means of fewer rows at the image's ends
    "AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1>",
    "AveragePool <kernel_shape = [3,3], strides = [2,2], pads = [0,0,0,0], ceil_mode = 1>",
    "AveragePool <kernel_shape = [3,3], strides = [2,2], pads = [1,1,0,0], ceil_mode = 1, "
    "count_include_pad = 1>",
    'AveragePool <kernel_shape = [3,2], strides = [2,1], auto_pad = "SAME_UPPER">',
    "MaxPool <kernel_shape = [3,3], strides = [2,2], pads = [0,0,0,0], ceil_mode = 1>",
    'MaxPool <kernel_shape = [3,3], auto_pad = "SAME_LOWER">',
    "LpPool <kernel_shape = [2,2], strides = [2,2]>",
    "LpPool <kernel_shape = [3,3], strides = [1,2], pads = [1,0,1,1], p = 3>",
)


@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.long), 11])
@pytest.mark.parametrize("pool", WINDOWS)
def test_a_pool_is_split(pool: str, rows: int, tmp_path: Path) -> None:
    model = step(
        f"float[4,3,{rows},8] x, float[4,3,3,3] a, float[4,4,1,1] b",
        f"c = Conv <pads = [1,1,1,1]> (x, a) p = {pool} (c) y = Conv (p, b)",
    )

    result = compiled(model, tmp_path)

    assert_in_rows(result, "p")


TRANSPOSED = (
    "strides = [2,2]",
    "strides = [2,2], pads = [1,1,1,1], output_padding = [1,1]",
    "strides = [3,1], pads = [0,1,1,0]",  # every third row is in no window
    "dilations = [2,1], pads = [2,0,0,1]",
    'strides = [2,1], auto_pad = "SAME_UPPER"',
    "strides = [2,2], output_shape = [17, 15]",
    "strides = [2,1], group = 2",
)


@pytest.mark.parametrize("rows", [8, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize("windows", TRANSPOSED)
def test_a_transposed_convolution_is_split(windows: str, rows: int, tmp_path: Path) -> None:
    kernel = [2, 3] if "strides = [3" in windows else [3, 3]
    groups = 2 if "group" in windows else 1
    channels = 4 // groups
    if "output_shape" in windows and rows == 7:
        windows = windows.replace("17", "15")
    model = step(
        f"float[4,3,{rows},7] x, float[4,3,3,3] a, float[4,{channels},{kernel[0]},3] b, float[4] c, "
        f"float[{channels * groups},{channels * groups},1,1] d",
        f"h = Conv <pads = [1,1,1,1]> (x, a) u = ConvTranspose <{windows}> (h, b, c) y = Conv (u, d)",
    )

    result = compiled(model, tmp_path)

    assert_in_rows(result, "u")


def assert_in_rows(result: Compiled, windows: str) -> None:
    """See that ranks have rows of what windows make, that no image is gathered, and what is trained."""
    lowered = result.compilation.lowered
    assert any(isinstance(p, Split) and p.axis == 2 for p in lowered.native[windows].placements)
    assert not [start for start in starts(result) if "gather" in start.kind]
    assert_trains_as_one_device(result, random_batches(result.plan, 2))


def test_with_tensor_and_sharded_variables(tmp_path: Path) -> None:
    model = step(
        "float[4,3,8,6] x, float[8,3,3,3] a, float[6,8,1,1] b, float[6,12] W",
        "h = Conv <pads = [1,1,1,1]> (x, a) r = Tanh (h) i = Conv (r, b) g = GlobalAveragePool (i) "
        "f = Flatten (g) y = MatMul (f, W)",
    )

    for name in ("spatial=2,tensor=2", "fsdp=2,spatial=2"):
        result = compiled(model, tmp_path / name, "2x2", name)
        assert_trains_as_one_device(result, random_batches(result.plan, 2))


def test_a_step_without_images_is_refused(tmp_path: Path) -> None:
    model = step("float[4,6] x, float[6,6] W", "y = MatMul (x, W)")

    with pytest.raises(
        BadUsage, match="no windows of a convolution or pooling make as many rows as there are workers, 2"
    ) as refusal:
        compiled(model, tmp_path)

    assert refusal.value.fix == "use --strategy tensor=2"
    compiled(model, tmp_path / "as said", "1x2", "tensor=2")


def test_groups_list_the_rows_that_windows_make() -> None:
    model = step(
        "float[4,3,16,6] x, float[8,3,5,3] a", "y = Conv <pads = [2,1,1,1], strides = [2, 1]> (x, a)"
    )

    (group,) = [group for group in inspect(model).groups if group.op == "Conv"]

    assert group.splits["out:2"] == 8
    assert group.splits["out:3"] == 6
