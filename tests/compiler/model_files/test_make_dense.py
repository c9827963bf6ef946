"""Sparse tensors train as the dense ones that ONNX Runtime makes of them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.model_files.make_dense import make_dense
from partc.compiler.model_files.model_file import read_model
from partc.compiler.model_files.open_model import open_model
from partc.compiler.options import GraphOptions
from partc.runtime.errors import PartcError
from tests.builders.graphs.foreign_steps import SGD as STEP
from tests.builders.graphs.foreign_steps import parse, with_zeros
from tests.checks.training_steps import session, train

DENSE = np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 2, 0]], np.float32)
FLAT, BY_AXIS = np.array([1, 10]), np.array([[0, 1], [3, 1]])
FORWARD = """
forward (float[8,4] x) => (float loss) {
    w = Add (W, SP)
    y = MatMul (x, w)
    squares = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (squares)
}
"""
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def sparse(
    indices: np.ndarray = FLAT, shape: tuple[int, ...] = (4, 3), values: tuple[float, ...] = (1, 2)
) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        numpy_helper.from_array(np.array(values, np.float32), "SP"),
        numpy_helper.from_array(indices, "SP_indices"),
        shape,
    )


def forward(tensor: onnx.SparseTensorProto) -> onnx.ModelProto:
    model = parse(FORWARD)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "W"))
    model.graph.sparse_initializer.append(tensor)
    return model


@pytest.mark.parametrize("indices", [FLAT, BY_AXIS], ids=["flat", "by axis"])
def test_a_forward_model_with_a_sparse_initializer_trains(indices: np.ndarray) -> None:
    model = forward(sparse(indices))

    (loss,), _ = train(build_training_graph(model, loss="loss", optimizer=SGD(0.1)), [{"x": X}])

    assert loss == pytest.approx(float(session(model).run(None, {"x": X})[0]), rel=1e-6)
    assert len(model.graph.sparse_initializer) == 1


def test_a_step_with_a_sparse_initializer_is_read(tmp_path: Path) -> None:
    text = STEP.replace("y = MatMul (x, W)", "w = Add (W, SP) y = MatMul (x, w)")
    model = with_zeros(parse(text), "W")
    model.graph.sparse_initializer.append(sparse())
    onnx.save(model, tmp_path / "step.onnx")

    for source in (model, tmp_path / "step.onnx"):
        training = import_training_graph(source, GraphOptions(state={"W": "W_next"}))
        assert np.array_equal(training.graph.tensors()["SP"].values, DENSE)


def test_sparse_tensors_of_bodies_and_constants_are_made_dense(tmp_path: Path) -> None:
    model = parse("""
    step (float[4,3] x) => (float[4,3] y) <bool yes = {1}> {
        made = If (yes) <then_branch = a () => (float[4,3] s) { s = Identity (SP) },
                         else_branch = b () => (float[4,3] t) { t = Identity (x) }>
        y = Add (made, constant)
    }""")
    model.graph.node[0].attribute[0].g.sparse_initializer.append(sparse())
    model.graph.node.insert(0, helper.make_node("Constant", [], ["constant"], sparse_value=sparse()))
    onnx.save(model, tmp_path / "model.onnx")

    (y,) = open_model(read_model(tmp_path / "model.onnx")).run(None, {"x": np.zeros((4, 3), np.float32)})

    assert np.array_equal(y, 2 * DENSE)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (sparse(np.array([1, 12])), r"indices outside of its shape \[4, 3\]"),
        (sparse(np.array([[0, 1], [3, 3]])), "indices outside of its shape"),
        (sparse(np.array([10, 1])), "indices that do not ascend"),
        (sparse(np.array([1])), r"indices of shape \[1\] for 2 values"),
        (sparse(shape=(1 << 20, 1 << 20)), "made dense, which takes 4398046511104 bytes"),
        (sparse(shape=(4, -3)), "negative size"),
    ],
    ids=["outside", "outside by axis", "descending", "too few", "huge", "negative"],
)
def test_sparse_tensors_that_are_wrong_or_huge_are_refused_by_name(
    tensor: onnx.SparseTensorProto, what: str
) -> None:
    with pytest.raises(PartcError, match=rf"(?s){what}.*sparse tensor 'SP'"):
        make_dense(forward(tensor))
