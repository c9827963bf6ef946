"""Element types that ONNX Runtime cannot train in are refused when compiling, by the kind of node."""

from io import StringIO
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from rich.console import Console

from partc.compiler.api import inspect
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.loss_scaling import StaticScale
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.inspect import inspect_graph
from partc.compiler.planning.check_kernels import check_cpu_kernels
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import UnsupportedModel
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

# {t} is an element type, w a parameter.
PRODUCT = "({t}[4,3] x, {t}[3,2] w) => ({t} loss) { h = MatMul (x, w) y = Tanh (h) z = Mul (y, y)"
CONV = "({t}[4,2,5,5] x, {t}[3,2,3,3] w) => ({t} loss) { y = Conv (x, w) z = Mul (y, y)"
GELU = "({t}[4,3] x, {t}[3,2] w) => ({t} loss) { h = MatMul (x, w) z = Erf (h)"
TABLE = "(int64[4] x, {t}[5,2] w) => ({t} loss) { h = Gather (w, x) z = Mul (h, h)"
AUTOCAST = """(float[4,3] x, float[3,2] w) => (float loss) { a = Cast <to = 16> (x) b = Cast <to = 16> (w)
    h = MatMul (a, b) y = Cast <to = 1> (h) z = Mul (y, y)"""


def step_of(body: str, element: str, **update: object) -> onnx.ModelProto:
    text = body.replace("{t}", element) + " loss = ReduceMean <keepdims = 0> (z) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    w = model.graph.input.pop()
    shape = [size.dim_value for size in w.type.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(w.type.tensor_type.elem_type)
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    model.graph.initializer.append(numpy_helper.from_array(values, "w"))
    options = UpdateOptions(**update)  # type: ignore[arg-type]
    return build_training_graph(model, loss="loss", optimizer=SGD(lr=0.1), update=options)


def training_of(body: str, element: str, **update: object) -> TrainingGraph:
    return import_training_graph(step_of(body, element, **update))


REFUSED = {
    "bfloat16 variable": (PRODUCT, "bfloat16", {}, "variable 'w' is in bfloat16"),
    "bfloat16 data": (PRODUCT, "bfloat16", {"loss_scale": StaticScale(8.0)}, "data input 'x' is in bfloat16"),
    "bfloat16 inside": (AUTOCAST, "float", {}, "no kernel for MatMul in bfloat16"),
    "bfloat16 table": (TABLE, "bfloat16", {"loss_scale": StaticScale(8.0)}, "no kernel for .* in bfloat16"),
    "float64 convolution": (CONV, "double", {}, "no kernel for Conv in float64"),
    "float64 error function": (GELU, "double", {}, "no kernel for Erf in float64"),
    "float16 table": (TABLE, "float16", {}, "adds no rows in float16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_type_without_kernels_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    body, element, update, expected = REFUSED[case]
    training = training_of(body, element, **update)

    with pytest.raises(UnsupportedModel, match=expected):
        compile_step(training, tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", REFUSED)
def test_inspect_gives_the_reason_for_which_compile_refuses(case: str) -> None:
    body, element, update, _ = REFUSED[case]
    step = step_of(body, element, **update)
    with pytest.raises(UnsupportedModel) as refusal:
        check_cpu_kernels(import_training_graph(step))

    told = shown(step)

    assert str(refusal.value) in told
    assert "--batch global" not in told


def test_inspect_knows_no_refusal_of_what_compiles() -> None:
    assert "partc compile refuses" not in shown(step_of(PRODUCT, "float"))


def shown(step: onnx.ModelProto) -> str:
    console = Console(width=400, file=StringIO(), record=True)
    console.print(inspect(step).render())
    return console.export_text()


TRAINED = {
    "float16": (PRODUCT, "float16", {}),
    "float16 convolution": (CONV, "float16", {}),
    "float16 table, float32 masters": (TABLE, "float16", {"loss_scale": StaticScale(8.0)}),
    "float64": (PRODUCT, "double", {}),
    "float64 table": (TABLE, "double", {}),
}


@pytest.mark.parametrize("case", TRAINED)
def test_a_type_with_kernels_is_trained(case: str, tmp_path: Path) -> None:
    body, element, update = TRAINED[case]
    compiled = compile_step(training_of(body, element, **update), tmp_path / "out")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=5))


def test_bfloat16_is_inspected() -> None:
    inspected = inspect_graph(training_of(PRODUCT, "bfloat16"))

    assert [(entry.name, entry.dtype, entry.nbytes) for entry in inspected.variables] == [
        ("w", "bfloat16", 12)
    ]
    assert {entry.dtype for entry in inspected.data_inputs} == {"bfloat16"}
