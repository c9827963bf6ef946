"""onnxruntime-training's artifacts (tests/fixtures/make_ort_training_artifacts.py) against its own steps."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from partc.compiler.importing.bindings import Bindings, write_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.importing.ort_training.import_artifacts import read_artifacts
from partc.compiler.importing.ort_training.read_checkpoint import read_checkpoint
from partc.passes.graph.training_graph import StoredTensor, TrainingGraph, Variable
from partc.runtime.errors import BadModel, UnsupportedModel
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.variables import Constant
from tests.builders.plans.compiled_steps import Batch, assert_trains_as_one_device, compile_step

ARTIFACTS = Path(__file__).parents[2] / "fixtures" / "ort_training"
RATE = np.array([0.01], np.float32)
MODELS = ["cnn", "transformer", "embedding", "fused"]


@pytest.fixture(scope="module")
def imported() -> dict[str, TrainingGraph]:
    return {name: import_training_graph(ARTIFACTS / name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_equal_onnxruntime_trainings_own(name: str, imported: dict[str, TrainingGraph]) -> None:
    training = imported[name]
    expected = np.load(ARTIFACTS / name / "expected.npz")
    session = onnxruntime.InferenceSession(training.source, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    values = {variable.name: first_value(variable) for variable in training.variables.values()}
    losses = []

    for batch in batches_of(name):
        results = dict(zip(outputs, session.run(None, {**values, **batch}), strict=True))
        losses.append(results[training.loss])
        values = {variable.name: results[variable.next] for variable in training.variables.values()}

    np.testing.assert_allclose(losses, expected["loss"], rtol=1e-5)
    for key in (key for key in expected if key.startswith("after/")):
        np.testing.assert_allclose(values[key.removeprefix("after/")], expected[key], rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize(
    ("name", "strategy"), [("cnn", "allreduce"), ("transformer", "hybrid"), ("embedding", "ps")]
)
def test_four_ranks_train_them_as_one_device(
    tmp_path: Path, imported: dict[str, TrainingGraph], name: str, strategy: str
) -> None:
    sizes = {} if name == "cnn" else {"batch": 8}
    compiled = compile_step(
        import_training_graph(ARTIFACTS / name), tmp_path, "2x2", strategy, "global", sizes
    )

    assert_trains_as_one_device(compiled, batches_of(name))


def test_an_embeddings_gradient_is_sparse(imported: dict[str, TrainingGraph]) -> None:
    sparse = {
        name: {parameter for parameter, gradient in training.gradients.items() if gradient.is_sparse}
        for name, training in imported.items()
    }

    assert sparse == {"cnn": set(), "transformer": {"E"}, "embedding": {"E"}, "fused": set()}


def test_what_onnxruntime_fuses_below_the_standards_opset_is_read() -> None:
    model = onnx.load(ARTIFACTS / "fused" / "training_model.onnx")

    assert [opset.version for opset in model.opset_import if opset.domain == ""] == [14]
    ops = {node.op_type for node in model.graph.node if node.domain == ""}
    assert {"LayerNormalization", "SimplifiedLayerNormalization"} <= ops


def flat_step(name: str, rate: float) -> onnx.ModelProto:
    """A training model's own nodes, gradient ops of com.microsoft among them, and SGD behind them."""
    folder = ARTIFACTS / name
    model, checkpoint = onnx.load(folder / "training_model.onnx"), read_checkpoint(folder / "checkpoint")
    graph, state = model.graph, {}
    accumulated = {n.input[0]: n.input[1] for n in graph.node if n.op_type == "InPlaceAccumulatorV2"}
    nodes = [node for node in graph.node if node.op_type != "InPlaceAccumulatorV2"]
    loss = graph.output[0]
    inputs = [info for info in graph.input if "accumulation" not in info.name and "reset" not in info.name]
    outputs = [loss]
    for variable, tensor in checkpoint.trained.items():
        gradient = accumulated[f"{variable}_grad.accumulation.buffer"]
        nodes.append(onnx.helper.make_node("Mul", [gradient, "rate"], [f"{variable}/step"]))
        nodes.append(onnx.helper.make_node("Sub", [variable, f"{variable}/step"], [f"{variable}_next"]))
        described = onnx.helper.make_tensor_value_info(f"{variable}_next", tensor.data_type, tensor.dims)
        outputs.append(described)
        state[variable] = f"{variable}_next"
    constant = onnx.numpy_helper.from_array(np.array(rate, np.float32), "rate")
    initials = [*checkpoint.trained.values(), constant]
    step = onnx.helper.make_graph(nodes, "step", inputs, outputs, [*graph.initializer, *initials])
    flat = onnx.helper.make_model(step, opset_imports=model.opset_import, ir_version=8)
    write_bindings(flat, Bindings(state=state, loss=loss.name))
    return flat


def test_flat_steps_with_its_gradient_ops_equal_its_own(tmp_path: Path) -> None:
    onnx.save(flat_step("fused", rate=0.01), tmp_path / "train.onnx")
    training = import_training_graph(tmp_path / "train.onnx")

    compiled = compile_step(training, tmp_path / "out", "2x2", "hybrid", "global", {"batch": 8})

    batches = [{k: v for k, v in batch.items() if k != "learning_rate"} for batch in batches_of("fused")]
    result = train_in_process(compiled.folder, batches)
    expected = np.load(ARTIFACTS / "fused" / "expected.npz")
    for key in (key for key in expected if key.startswith("after/")):
        found = result.variables[key.removeprefix("after/")]
        np.testing.assert_allclose(found, expected[key], rtol=1e-4, atol=3e-6)


def test_a_flat_step_with_an_op_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    model = flat_step("fused", rate=0.01)
    next(node for node in model.graph.node if node.op_type == "GeluGrad").op_type = "NewGrad"

    with pytest.raises(BadModel, match=r"'NewGrad'(.|\n)*fix: correct the op"):
        import_training_graph(model)


def test_the_step_is_standard_onnx() -> None:
    model = read_artifacts(ARTIFACTS / "transformer")

    assert {node.domain for node in model.graph.node} == {""}
    onnx.checker.check_model(model, full_check=True)


def test_an_op_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    folder = shutil.copytree(ARTIFACTS / "embedding", tmp_path / "artifacts")
    model = onnx.load(folder / "training_model.onnx")
    next(node for node in model.graph.node if node.op_type == "ReluGrad").op_type = "NewGrad"
    onnx.save(model, folder / "training_model.onnx")

    with pytest.raises(UnsupportedModel, match=r"'NewGrad'(.|\n)*fix: generate the artifacts without"):
        import_training_graph(folder)


@pytest.mark.parametrize("length", [0, 12, 200, 1000])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes((ARTIFACTS / "cnn" / "checkpoint").read_bytes()[:length])

    with pytest.raises(BadModel, match="fix: save it again"):
        read_checkpoint(path)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no checkpoint"):
        read_checkpoint(tmp_path / "checkpoint")


def batches_of(name: str) -> list[Batch]:
    expected = np.load(ARTIFACTS / name / "expected.npz")
    return [
        {key.split("/")[1]: expected[key] for key in expected if key.startswith(f"{step}/")}
        | {"learning_rate": RATE}
        for step in range(len(expected["loss"]))
    ]


def first_value(variable: Variable) -> np.ndarray:
    if isinstance(variable.initial, StoredTensor):
        return variable.initial.load()
    assert isinstance(variable.initial, Constant)
    return np.full(variable.shape, variable.initial.value, variable.dtype)


@pytest.mark.parametrize("op_type", ["Reshape", "SoftmaxCrossEntropyLossGrad"])
def test_an_op_of_a_domain_that_is_not_imported_is_refused(tmp_path: Path, op_type: str) -> None:
    folder = tmp_path / "artifacts"
    shutil.copytree(ARTIFACTS / "transformer", folder)
    model = onnx.load(folder / "training_model.onnx")
    next(node for node in model.graph.node if node.op_type == op_type).domain = "elsewhere"
    onnx.save(model, folder / "training_model.onnx")

    with pytest.raises(UnsupportedModel, match=r"(?s)cannot be converted.*elsewhere.*at:.*fix: generate"):
        import_training_graph(folder)
