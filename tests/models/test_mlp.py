from typing import Literal

import numpy as np
import onnx
import pytest

from partc.models.mlp import MlpOptions, mlp
from tests.builders.graphs.forward_models import run_with_parameters


@pytest.mark.parametrize(
    ("activation", "function"), [("Relu", lambda v: np.maximum(v, 0)), ("Tanh", np.tanh)]
)
def test_logits_equal_a_direct_computation(activation: Literal["Relu", "Tanh"], function: np.ufunc) -> None:
    model = mlp(MlpOptions(sizes=(5, 7, 3), activation=activation, dtype="float64"))
    x = np.random.default_rng(0).normal(size=(4, 5))

    logits, w = run_with_parameters(model, "logits", {"x": x})

    hidden = function(x @ w["layer0.weight"] + w["layer0.bias"])
    np.testing.assert_allclose(logits, hidden @ w["layer1.weight"] + w["layer1.bias"], rtol=1e-12)


def test_the_batch_is_open_unless_given() -> None:
    def batch(model: onnx.ModelProto) -> int | str:
        dimension = model.graph.input[0].type.tensor_type.shape.dim[0]
        return dimension.dim_param or dimension.dim_value

    assert batch(mlp(MlpOptions())) == "batch"
    assert batch(mlp(MlpOptions(batch=8))) == 8
