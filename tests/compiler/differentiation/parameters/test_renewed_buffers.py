"""Buffers that a PyTorch module renews at every step, as the signature of its exported program tells."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.exporter_facts import exporter_facts
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.bindings import read_bindings
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.exported_models import as_exported, stored_model

NET = """net (float[4, 3] x) => (float loss) {
    mul = Mul (w, norm_u) h = Mul (x, mul) y = Mul (h, w) loss = ReduceMean <keepdims = 0> (y) }"""
W, U = np.array([1.0, 2.0, 3.0], np.float32), np.array([0.5, 0.25, 2.0], np.float32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def net(
    renewed: dict[str, str], text: str = NET, operations: dict[str, str] | None = None
) -> onnx.ModelProto:
    """`norm_u` stands for itself, or for what `folded` was folded into."""
    folded = {"norm_u": ("folded",)} if "folded" in renewed else {}
    return as_exported(
        stored_model(text, {"w": W, "norm_u": U}),
        parameters=("w",),
        buffers=("norm_u",),
        renewed=renewed,
        folded=folded,
        operations=operations,
    )


def test_a_renewed_buffer_has_its_next_value_and_passes_no_gradient() -> None:
    training = build_training_graph(net({"norm_u": "mul"}), loss="loss", optimizer=SGD(1.0))
    state = read_bindings(training, None).state

    after = dict(zip(state, ReferenceEvaluator(training).run(list(state.values()), {"x": X}), strict=True))

    assert after.keys() == {"w", "norm_u"}
    np.testing.assert_allclose(after["norm_u"], W * U)
    np.testing.assert_allclose(after["w"], W - X.sum(0) * W * U / 12, rtol=1e-6)


def test_a_gradient_passes_where_the_buffer_is_detached_when_it_is_read() -> None:
    text = NET.replace("mul = Mul (w, norm_u)", "detach = Identity (norm_u) mul = Mul (w, detach)")
    model = net({"norm_u": "mul"}, text, operations={"detach": "%b_norm_u"})
    training = build_training_graph(model, loss="loss", optimizer=SGD(1.0))
    state = read_bindings(training, None).state

    after = dict(zip(state, ReferenceEvaluator(training).run(list(state.values()), {"x": X}), strict=True))

    np.testing.assert_allclose(after["norm_u"], W * U)
    np.testing.assert_allclose(after["w"], W - 2 * X.sum(0) * W * U / 12, rtol=1e-6)


def test_a_buffer_that_the_module_does_not_renew_is_constant() -> None:
    training = build_training_graph(net({}), loss="loss", optimizer=SGD(1.0))

    assert read_bindings(training, None).state.keys() == {"w"}


@pytest.mark.parametrize("renewed", [{"norm_u": "gone"}, {"folded": "mul"}])
def test_a_buffer_whose_next_value_was_left_out_or_that_was_folded_is_refused(
    renewed: dict[str, str],
) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"renews its buffer '{min(renewed)}' at every step"
    ) as refusal:
        build_training_graph(net(renewed), loss="loss", optimizer=SGD(1.0))

    assert "optimize=False" in refusal.value.fix


def test_running_statistics_are_renewed_by_their_normalisation() -> None:
    text = """net (float[4, 3] x) => (float loss) {
        mul = Identity (norm_u) y = BatchNormalization (x, w, w, w, norm_u)
        loss = ReduceMean <keepdims = 0> (y) }"""

    assert not exporter_facts(net({"norm_u": "mul"}, text)).renewed
