"""Buffers that a PyTorch module renews at every step, as the signature of its exported program tells."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.exporter_facts import exporter_facts
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.bindings import read_bindings
from tests.builders.graphs.exported_models import as_exported, stored_model

NET = """net (float[4, 3] x) => (float loss) {
    mul = Mul (w, norm_u) h = Mul (x, mul) y = Mul (h, w) loss = ReduceMean <keepdims = 0> (y) }"""
W, U = np.array([1.0, 2.0, 3.0], np.float32), np.array([0.5, 0.25, 2.0], np.float32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def net(renewed: dict[str, str], text: str = NET) -> onnx.ModelProto:
    stored = stored_model(text, {"w": W, "norm_u": U})
    return as_exported(stored, parameters=("w",), buffers=("norm_u",), renewed=renewed)


def test_a_renewed_buffer_has_its_next_value_and_passes_no_gradient() -> None:
    training = build_training_graph(net({"norm_u": "mul"}), loss="loss", optimizer=SGD(1.0))
    state = read_bindings(training, None).state

    after = dict(zip(state, ReferenceEvaluator(training).run(list(state.values()), {"x": X}), strict=True))

    assert after.keys() == {"w", "norm_u"}
    np.testing.assert_allclose(after["norm_u"], W * U)
    np.testing.assert_allclose(after["w"], W - X.sum(0) * W * U / 12, rtol=1e-6)


@pytest.mark.parametrize("renewed", [{}, {"norm_u": "gone"}])
def test_without_a_next_value_a_buffer_is_constant(renewed: dict[str, str]) -> None:
    training = build_training_graph(net(renewed), loss="loss", optimizer=SGD(1.0))

    assert read_bindings(training, None).state.keys() == {"w"}


def test_running_statistics_are_renewed_by_their_normalisation() -> None:
    text = """net (float[4, 3] x) => (float loss) {
        mul = Identity (norm_u) y = BatchNormalization (x, w, w, w, norm_u)
        loss = ReduceMean <keepdims = 0> (y) }"""

    assert not exporter_facts(net({"norm_u": "mul"}, text)).renewed
