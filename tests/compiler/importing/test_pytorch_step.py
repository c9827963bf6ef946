"""A training step that PyTorch wrote (tests/fixtures/make_pytorch_step.py), through import and analysis."""

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.graph.training_graph import StoredTensor
from partc.passes.roles.find_gradients import find_gradients
from partc.passes.roles.find_roles import find_roles
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_parameter_has_a_gradient_and_the_embeddings_is_sparse(dtype: str) -> None:
    training = import_training_graph(FIXTURES / f"pytorch_step_{dtype}.onnx")

    gradients = find_gradients(training)

    assert {name for name, gradient in gradients.items() if gradient.is_sparse} == {"embedding.weight"}
    assert set(gradients) == {name for name in training.variables if not name.endswith(".velocity")}
    roles = find_roles(training).variables
    assert all(roles[f"{name}.velocity"].parameter == name for name in gradients)
    assert training.data_inputs["tokens"].high == 50
    assert training.data_inputs["labels"].high == 10


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_analysis_does_not_change_the_step(dtype: str) -> None:
    path = FIXTURES / f"pytorch_step_{dtype}.onnx"
    training = import_training_graph(path)
    find_gradients(training)
    changed = gs.export_onnx(training.graph)
    changed.ir_version = 10
    rng = np.random.default_rng(0)
    feeds = {"tokens": rng.integers(0, 50, (8, 6)), "labels": rng.integers(0, 10, (8, 6))}
    for name, variable in training.variables.items():
        is_stored = isinstance(variable.initial, StoredTensor)
        feeds[name] = variable.initial.load() if is_stored else np.zeros(variable.shape, dtype)

    for one, other in zip(run(onnx.load(path), feeds), run(changed, feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-7)


@pytest.mark.parametrize("strategy", ["allreduce", "ps", "hybrid"])
def test_four_ranks_train_it_as_one_device_although_they_ignore_unequally_many_labels(
    tmp_path: Path, strategy: str
) -> None:
    training = import_training_graph(FIXTURES / "pytorch_step_float64.onnx")
    compiled = compile_step(training, tmp_path / "out", "2x2", strategy, "global")
    batches = random_batches(compiled.plan, steps=3)
    for batch in batches:
        batch["labels"][:2, 1:] = -100

    assert_trains_as_one_device(compiled, batches)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(sorted(output.name for output in session.get_outputs()), feeds)
