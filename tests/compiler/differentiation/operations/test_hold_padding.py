"""The row of an embedding that stands for padding: read, and not trained."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.bindings import read_bindings
from tests.builders.graphs.exported_models import call, with_operations
from tests.builders.graphs.foreign_steps import parse

LOOKED_UP = """net ({ids}[2, 3] ids, float[2, 3, 4] t) => (float loss) {{
    rows = Gather (table, ids) d = Sub (rows, t) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q) }}"""
TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)
IDS = np.array([[2, 0, 2], [4, 1, 1]])


def step(operation: str, ids: str) -> tuple[float, np.ndarray]:
    """Return the loss of a step of SGD, and how the table changes."""
    model = with_operations(parse(LOOKED_UP.format(ids=ids)), {"rows": operation})
    model.graph.initializer.append(numpy_helper.from_array(TABLE, "table"))
    training: onnx.ModelProto = build_training_graph(model, loss="loss", optimizer=SGD(1.0))
    following = read_bindings(training, None).state["table"]
    feeds = {"ids": IDS.astype(ids), "t": np.ones((2, 3, 4), np.float32)}
    loss, after = ReferenceEvaluator(training).run(["loss", following], feeds)
    return float(loss), after - TABLE


@pytest.mark.parametrize("ids", ["int64", "int32"])
def test_the_row_of_padding_stays_and_is_read(ids: str) -> None:
    whole_loss, whole = step(call("embedding.default", "%p_table, %ids"), ids)
    loss, held = step(call("embedding.default", "%p_table, %ids, 2"), ids)

    assert loss == whole_loss
    assert whole[2].any()
    assert not held[2].any()
    np.testing.assert_array_equal(np.delete(held, 2, 0), np.delete(whole, 2, 0))


@pytest.mark.parametrize("rest", ["", ", -1", ", -1, False"])
def test_without_padding_all_rows_are_trained(rest: str) -> None:
    _, changed = step(call("embedding.default", f"%p_table, %ids{rest}"), "int64")

    assert changed.any(axis=1).tolist() == [True, True, True, False, True]
