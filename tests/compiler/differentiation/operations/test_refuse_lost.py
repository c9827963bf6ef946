"""What a file lost of a module, and its metadata tells: it is refused, and says what can be done."""

import numpy as np
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.operations.follow_operations import follow_operations
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.exported_models import call, with_operations
from tests.builders.graphs.foreign_steps import parse

ENTROPY = """net (float[6, 3] x, int64[6] labels) => (float loss) {
    loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (x, labels) }"""


@pytest.mark.parametrize(
    ("arguments", "named"), [("%x, %labels, None, 1, -100, 0.1", ""), ("%x, %labels", "label_smoothing: 0.1")]
)
def test_label_smoothing_that_was_left_out_is_refused(arguments: str, named: str) -> None:
    operation = call("cross_entropy_loss.default", arguments, named)

    with pytest.raises(UnsupportedModel, match=r"left out a label smoothing of 0\.1") as refusal:
        follow_operations(with_operations(parse(ENTROPY), {"loss": operation}))

    assert refusal.value.fix.startswith("write it out: 0.9 * nll_loss")


@pytest.mark.parametrize(
    "arguments", ["%x, %labels", "%x, %labels, None, 1, -100, 0.0", "%x, %labels, %w, 2"]
)
def test_labels_that_are_not_smoothed_are_fine(arguments: str) -> None:
    model = with_operations(parse(ENTROPY), {"loss": call("cross_entropy_loss.default", arguments)})

    assert follow_operations(model) is model


LOOKED_UP = """net (float[9, 3] table, int64[6] ids) => (float loss) {
    rows = Gather (table, ids) loss = ReduceMean <keepdims = 0> (rows) }"""


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        (call("embedding.default", "%p_table, %ids, -1, True"), "divided by how often"),
        (call("embedding.default", "%p_table, %ids, 2, True"), "divided by how often"),
        (call("embedding_renorm.default", "%detach, %clone, 1.0, 2.0"), "scaled down to max_norm"),
    ],
)
def test_embeddings_whose_gradient_or_table_is_scaled_are_refused(operation: str, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        follow_operations(with_operations(parse(LOOKED_UP), {"rows": operation}))


MASKED = """net (float[6, 3] x) => (float loss) {
    y = Mul (x, bernoulli_1) loss = ReduceMean <keepdims = 0> (y) }"""


@pytest.mark.parametrize(("read", "is_refused"), [("bernoulli_1", True), ("bernoulli_2", False)])
def test_what_was_drawn_once_is_refused(read: str, is_refused: bool) -> None:
    model = with_operations(parse(MASKED), {"y": call("mul.Tensor", f"%x, %{read}")})
    model.graph.initializer.append(numpy_helper.from_array(np.ones((6, 3), np.float32), "bernoulli_1"))

    if not is_refused:
        assert follow_operations(model) is model
        return
    with pytest.raises(UnsupportedModel, match="drew 'bernoulli_1' once") as refusal:
        follow_operations(model)
    assert "optimize=False" in refusal.value.fix
