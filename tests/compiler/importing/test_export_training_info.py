"""To the standard's form and back: the same step, to the last bit."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.importing.training_info import export_training_info
from partc.passes.graph.training_graph import StoredTensor, TrainingGraph
from partc.runtime.data.feeds import open_source
from partc.runtime.errors import BadModel
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.variables import Constant
from tests.checks.command_line import CLUSTER, done, make_mlp

FORWARD = """
<ir_version: 10, opset_import: ["" : 21]>
forward (int64[6] ids) => (float[6,3] y) {
    h = Gather (E, ids)
    y = MatMul (h, W)
}
"""
FEEDS = {"ids": np.array([0, 2, 2, 4, 1, 0]), "targets": np.ones((6, 3), np.float32)}


def flat_step(optimizer: SGD | Momentum | Adagrad) -> onnx.ModelProto:
    forward, rng = onnx.parser.parse_model(FORWARD), np.random.default_rng(0)
    for name, shape in {"E": (5, 4), "W": (4, 3)}.items():
        value = rng.normal(size=shape).astype(np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return build_training_graph(forward, loss="mse", optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [SGD(), Momentum(), Adagrad()], ids=lambda o: type(o).__name__)
def test_a_round_trip_gives_the_same_step(optimizer: SGD | Momentum | Adagrad) -> None:
    flat = flat_step(optimizer)

    returned = import_training_graph(export_training_info(flat))

    original = import_training_graph(flat)
    assert set(returned.variables) == set(original.variables)
    assert returned.gradients == original.gradients
    assert returned.loss == original.loss
    assert returned.forward_outputs == original.forward_outputs
    for mine, other in zip(two_steps(returned), two_steps(original), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_the_graph_is_the_forward_model_alone() -> None:
    model = export_training_info(flat_step(Adagrad()))

    assert [node.op_type for node in model.graph.node] == ["Gather", "MatMul"]
    assert {tensor.name for tensor in model.graph.initializer} == {"E", "W"}
    assert next(iter(model.training_info[0].algorithm.input)).name == "targets"
    onnx.checker.check_model(model)


def test_a_model_without_bindings_is_refused() -> None:
    with pytest.raises(BadModel, match="fix: export a model that `partc grad` wrote"):
        export_training_info(onnx.parser.parse_model(FORWARD))


def two_steps(training: TrainingGraph) -> list[np.ndarray]:
    """Return the loss of both steps and the variables after them."""
    session = onnxruntime.InferenceSession(training.source, providers=["CPUExecutionProvider"])
    values = {name: first_value(training, name) for name in sorted(training.variables)}
    losses = []
    for _ in range(2):
        names = [training.loss, *(training.variables[name].next for name in values)]
        loss, *following = session.run(names, {**values, **FEEDS})
        values = dict(zip(values, following, strict=True))
        losses.append(loss)
    return [*losses, *values.values()]


def first_value(training: TrainingGraph, name: str) -> np.ndarray:
    variable = training.variables[name]
    if isinstance(variable.initial, StoredTensor):
        return variable.initial.load()
    assert isinstance(variable.initial, Constant)
    return np.full(variable.shape, variable.initial.value, variable.dtype)


def test_grad_writes_the_form_that_compile_reads(tmp_path: Path) -> None:
    folder = make_mlp(tmp_path, "--optimizer", "momentum", "--format", "training-info")

    done("compile", folder / "train.onnx", "-c", CLUSTER, "-o", folder / "out")

    written = onnx.load(folder / "train.onnx")
    assert len(written.training_info[0].update_binding) == 8  # 4 parameters, a velocity each
    assert "MatMul" in {node.op_type for node in written.training_info[0].algorithm.node}
    make_mlp(tmp_path, "--optimizer", "momentum")
    done("compile", folder / "train.onnx", "-c", CLUSTER, "-o", folder / "flat")
    pair = [read_plan_folder(folder / name) for name in ("out", "flat")]
    source = open_source("synthetic", pair[0].plan)
    batches = [source.total(step) for step in range(2)]
    mine, other = (train_in_process(plan, batches).variables for plan in pair)
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, other[name])
