"""A training step that JAX wrote (tests/fixtures/make_jax_step.py), against JAX's own steps."""

from pathlib import Path

import numpy as np
import onnxruntime

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.graph.training_graph import StoredTensor
from tests.builders.plans.compiled_steps import Batch, assert_trains_as_one_device, compile_step

FIXTURES = Path(__file__).parents[2] / "fixtures"


def batches() -> list[Batch]:
    expected = np.load(FIXTURES / "jax_step.npz")
    return [
        {name: expected[f"{step}/{name}"] for name in ("tokens", "labels")}
        for step in range(len(expected["loss"]))
    ]


def test_three_steps_equal_jaxs_and_the_tables_gradient_is_sparse() -> None:
    training = import_training_graph(FIXTURES / "jax_step.onnx")
    expected = np.load(FIXTURES / "jax_step.npz")
    session = onnxruntime.InferenceSession(training.source, providers=["CPUExecutionProvider"])
    values, losses = {}, []
    for name, variable in training.variables.items():
        assert isinstance(variable.initial, StoredTensor)
        values[name] = variable.initial.load()

    for batch in batches():
        names = ["loss", *(training.variables[name].next for name in values)]
        loss, *following = session.run(names, {**values, **batch})
        values = dict(zip(values, following, strict=True))
        losses.append(loss)

    np.testing.assert_allclose(losses, expected["loss"], rtol=1e-5)
    for name, value in values.items():
        np.testing.assert_allclose(value, expected[f"after/{name}"], rtol=1e-5, atol=1e-6)
    assert [name for name, gradient in training.gradients.items() if gradient.is_sparse] == ["table"]


def test_four_ranks_train_it_as_one_device(tmp_path: Path) -> None:
    training = import_training_graph(FIXTURES / "jax_step.onnx")

    compiled = compile_step(training, tmp_path, "2x2", "hybrid", "global")

    assert_trains_as_one_device(compiled, batches())
