"""The training steps that PyTorch made references for: tests/fixtures/make_optimizer_references.py."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Optimizer
from tests.checks.training_steps import Arrays

PATH = Path(__file__).parents[1] / "fixtures" / "optimizer_references.npz"
with np.load(PATH) as references:
    REFERENCES = dict(references)
STEPS = len(REFERENCES["x"])

LINEAR = "(double[batch,3] x) => (double[batch,2] y) { h = MatMul (x, W) y = Add (h, b) }"
LOOKUP = "(int64[batch] ids) => (double[batch,2] y) { y = Gather (E, ids) }"
DENSE_LOOKUP = "(int64[batch] ids) => (double[batch,2] y) { F = Identity (E) y = Gather (F, ids) }"
STACKED = """(double[batch,3] x) => (double loss) {
    y = MatMul (x, V) squares = Mul (y, y) loss = ReduceMean <keepdims = 0> (squares) }"""


def forward(text: str) -> onnx.ModelProto:
    """Parse a forward graph whose parameters begin as PyTorch's did."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> test {text}')
    read = {name for node in model.graph.node for name in node.input}
    for name in ("W", "b", "E", "V"):
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(REFERENCES[f"start/{name}"], name))
    return model


def step_of(text: str, optimizer: Optimizer, **options: object) -> onnx.ModelProto:
    loss = "loss" if text == STACKED else "mse"
    return build_training_graph(forward(text), loss=loss, optimizer=optimizer, **options)  # type: ignore[arg-type]


def batches(text: str) -> list[Arrays]:
    """Return the batches of five steps."""
    names = {LINEAR: ("x", "targets"), STACKED: ("x",)}.get(text, ("ids", "targets"))
    return [{name: REFERENCES[name][step] for name in names} for step in range(STEPS)]


def assert_equals_reference(case: str, after: Arrays) -> None:
    """Compare the parameters with PyTorch's."""
    expected = {key.split("/")[1]: value for key, value in REFERENCES.items() if key.startswith(f"{case}/")}
    assert expected
    for name, value in expected.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-9, atol=1e-12, err_msg=f"{case}/{name}")
