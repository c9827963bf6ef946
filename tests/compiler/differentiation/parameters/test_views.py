"""A view is found where each element agrees, and told as the only one; its nodes make it."""

import numpy as np
import onnx
import pytest
from onnx import helper

from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.parameters.views import find_view
from tests.checks.training_steps import session

RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, 4)).astype(np.float32)
K = RNG.normal(size=(3, 4, 5, 2)).astype(np.float32)
LARGE = RNG.normal(size=(1200, 64)).astype(np.float32)
ZEROS = np.zeros((4, 4), np.float32)

VIEWS = {
    "itself": (W, W),
    "reshaped": (W, W.reshape(8, 2)),
    "unsqueezed": (W, W[None]),
    "transposed": (W, W.T),
    "a row": (W, W[0]),
    "a column": (W, W[:, 1]),
    "rows": (W, W[1:]),
    "every second row": (W, W[::2]),
    "every other, of both axes": (W, W[::3, 1::2]),
    "rows, transposed": (W, W[1:3].T),
    "rows, flat": (W, W[:2].reshape(-1)),
    "an element": (W, W[1, 2:3]),
    "transposed, reshaped": (W, W.T.reshape(2, 8)),
    "reshaped, permuted": (W, W.reshape(2, 2, 4).transpose(1, 0, 2)),
    "permuted, reshaped": (K, K.transpose(1, 0, 2, 3).reshape(4, 30)),
    "all axes permuted": (K, K.transpose(3, 2, 1, 0)),
    "a part, permuted": (K, K[:, 1:3, ::2, 0].transpose(1, 0, 2)),
    "heads of a part": (LARGE, LARGE[400:800].reshape(4, 100, 64).transpose(2, 0, 1)),
    "a scale": (np.ones((), np.float32), np.ones((1, 1), np.float32)),
    "ones along one axis": (np.ones(4, np.float32), np.ones((1, 4, 1), np.float32)),
}


@pytest.mark.parametrize(("source", "copy"), VIEWS.values(), ids=VIEWS)
def test_a_view_is_found_and_made(source: np.ndarray, copy: np.ndarray) -> None:
    view = find_view(source, np.ascontiguousarray(copy))

    assert view is not None
    nodes, constants = view.nodes("w", "c", NodeBuilder(("w", "c")).fresh)
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        for name, array in (("w", source), ("c", copy))
    ]
    graph = helper.make_graph(nodes, "view", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(session(model).run(None, {"w": source})[0], copy)


OTHERS = {
    "other values": (W, W + 1),
    "one other value": (W, np.where(np.arange(16).reshape(4, 4) == 15, 0, W).astype(np.float32)),
    "backwards": (W, W[::-1]),
    "a row twice": (W, W[[1, 1]]),
    "of another type": (W, W.astype(np.float64)),
    "larger": (W[:2], W),
    "a part of large random values": (LARGE, RNG.normal(size=(64, 64)).astype(np.float32)),
    "a matrix that is its transpose": (np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)),
    "a row of zeros": (ZEROS, ZEROS[0]),
    "zeros in another shape": (ZEROS, ZEROS.reshape(2, 8)),
}


@pytest.mark.parametrize(("source", "copy"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_view_or_one_of_several_is_not_found(source: np.ndarray, copy: np.ndarray) -> None:
    assert find_view(source, np.ascontiguousarray(copy)) is None


@pytest.mark.parametrize(
    ("shape", "operations", "permutation"),
    [
        ((4, 4), {"t"}, (1, 0)),
        ((4, 4), {"permute", "clone"}, (1, 0)),
        ((1, 4, 4), {"unsqueeze"}, (0,)),
        ((2, 8), {"view"}, (0,)),
        ((4, 4), {"clone"}, (0,)),
    ],
)
def test_names_of_operations_tell_views_of_equal_values_apart(
    shape: tuple[int, ...], operations: set[str], permutation: tuple[int, ...]
) -> None:
    view = find_view(ZEROS, ZEROS.reshape(shape), frozenset(operations))

    assert view is not None
    assert view.order.permutation == permutation


def test_an_axis_of_one_that_moves_is_a_permutation_too() -> None:
    column = W[:, :1]

    view = find_view(column, np.ascontiguousarray(column.T), frozenset({"t"}))

    assert view is not None
    assert not view.order.is_permuted
