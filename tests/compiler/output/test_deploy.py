"""trained.onnx computes what the forward part of the training graph computes with the trained variables."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import partc
from partc.compiler.output.deploy import write_trained_model
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.errors import BadPlan
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from tests.builders.graphs.foreign_steps import SGD
from tests.builders.plans.compiled_steps import compile_step as compile_and_check
from tests.builders.plans.compiled_steps import import_text, random_batches
from tests.checks.command_line import CLUSTER
from tests.checks.training_steps import EVERYTHING

Arrays = dict[str, np.ndarray]


def train(folder: PlanFolder, steps: int = 3) -> tuple[Arrays, Arrays]:
    """Train, save the variables as Runner does, and return them and another batch."""
    *batches, last = random_batches(folder.plan, steps + 1)
    trained = train_in_process(folder, batches).variables
    write_arrays(folder.path / TRAINED_FILE, trained)
    return trained, last


def run(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = {info.name: feeds[info.name] for info in session.get_inputs()}
    return dict(zip(names, session.run(names, wanted), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> PlanFolder:
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=4)
    train = partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.Momentum(0.1))
    return partc.compile(train, CLUSTER, tmp_path / "out", strategy="ps")


def test_the_trained_model_computes_the_forward_part(folder: PlanFolder) -> None:
    trained, batch = train(folder)
    batch = {name: array[:4] for name, array in batch.items()}

    path = write_trained_model(folder)

    onnx.checker.check_model(str(path), full_check=True)
    expected = run(onnx.load(folder.path / "train.onnx"), trained | batch)["logits"]
    actual = run(onnx.load(path), {"x": batch["x"]})
    np.testing.assert_allclose(actual.pop("logits"), expected, rtol=1e-6)
    assert actual == {}


def test_the_trained_model_has_no_trace_of_training(folder: PlanFolder) -> None:
    train(folder)

    model = onnx.load(write_trained_model(folder))

    assert [info.name for info in model.graph.input] == ["x"]
    assert {tensor.name for tensor in model.graph.initializer} >= {"layer0.weight", "layer1.bias"}
    assert not any(
        "velocity" in tensor.name or "accumul" in tensor.name for tensor in model.graph.initializer
    )
    assert not [node for node in model.graph.node if "gradient" in node.name]
    assert not model.metadata_props


def test_a_foreign_graph_without_forward_outputs_gives_its_loss(tmp_path: Path) -> None:
    training = import_text(SGD.replace("float ", "double ").replace("float[", "double["))
    folder = compile_and_check(training, tmp_path / "out").folder
    trained, batch = train(folder)

    model = onnx.load(write_trained_model(folder))

    assert [output.name for output in model.graph.output] == ["loss"]
    share = {name: array[:8] for name, array in batch.items()}
    expected = run(onnx.load(folder.path / "train.onnx"), trained | share)["loss"]
    np.testing.assert_allclose(run(model, share)["loss"], expected)


def test_writing_the_trained_model_leaves_the_plan_valid(folder: PlanFolder) -> None:
    train(folder)
    write_trained_model(folder)

    assert read_plan_folder(folder.path).plan == folder.plan


def test_variables_are_not_put_into_another_model_than_they_were_trained_in(folder: PlanFolder) -> None:
    train(folder)
    model = folder.path / "train.onnx"
    model.write_bytes(model.read_bytes().replace(b"logits", b"bitlog"))

    with pytest.raises(BadPlan, match="a file of the plan was changed"):
        write_trained_model(folder)


def test_a_trained_model_drops_nothing(tmp_path: Path) -> None:
    text = """net (float[4,6] x) => (float[4,6] y) { r = Constant <value = float {0.5}> ()
        on = Constant <value = bool {1}> () h = Mul (x, W) y = Dropout (h, r, on) }"""
    network = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    network.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 6), np.float32), "W"))
    step = partc.build_training_graph(
        network, loss="mse", optimizer=partc.Momentum(0.1), parameters=EVERYTHING
    )
    folder = partc.compile(step, CLUSTER, tmp_path / "out", strategy="allreduce")
    trained, batch = train(folder)

    deployed = run(onnx.load(write_trained_model(folder)), {"x": batch["x"][:4]})

    np.testing.assert_array_equal(deployed["y"], batch["x"][:4] * trained["W"])


NORMALISED = """
net (float[4, 3, 2, 2] x) => (float[4, 3, 2, 2] y) {
    h, mean1, var1 = BatchNormalization <momentum = 0.8, training_mode = 1> (x, scale, bias, mean, var)
    flat = Reshape (h, rows)
    z, mean3, var3 = BatchNormalization <training_mode = 1> (flat, scale2, bias2, mean2, var2)
    y = Reshape (z, images)
}
"""


def test_a_trained_model_normalises_by_running_statistics(tmp_path: Path) -> None:
    network = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {NORMALISED}')
    rng = np.random.default_rng(0)
    for name, size in (("", 3), ("2", 12)):
        for kind in ("scale", "bias", "mean", "var"):
            value = rng.uniform(0.5, 1.5, size).astype(np.float32)
            network.graph.initializer.append(onnx.numpy_helper.from_array(value, kind + name))
    for name, sizes in (("rows", [4, 12]), ("images", [4, 3, 2, 2])):
        network.graph.initializer.append(onnx.numpy_helper.from_array(np.array(sizes), name))
    step = partc.build_training_graph(network, loss="mse", optimizer=partc.SGD(0.1))
    folder = partc.compile(step, CLUSTER, tmp_path / "out", strategy="allreduce", batch="global")
    trained, batch = train(folder)
    x = batch["x"][:4]

    deployed = run(onnx.load(write_trained_model(folder)), {"x": x})

    h = _normalised(x, *(trained[kind] for kind in ("scale", "bias", "mean", "var")))
    z = _normalised(h.reshape(4, 12), *(trained[f"{kind}2"] for kind in ("scale", "bias", "mean", "var")))
    np.testing.assert_allclose(deployed["y"], z.reshape(4, 3, 2, 2), rtol=1e-5, atol=1e-6)


def _normalised(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, mean: np.ndarray, variance: np.ndarray
) -> np.ndarray:
    channels = (1, -1, *[1] * (x.ndim - 2))
    slope = scale / np.sqrt(variance + 1e-5)
    return np.asarray((x - mean.reshape(channels)) * slope.reshape(channels) + bias.reshape(channels))
