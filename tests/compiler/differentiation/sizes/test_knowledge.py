"""What is computed of sizes while a gradient is derived: nodes that cannot be computed stay unknown."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from partc.compiler.differentiation.sizes.knowledge import _run

# What the reference implementation raises within: TypeError, KeyError, AssertionError, ZeroDivisionError, ...
UNCOMPUTABLE: dict[str, dict[str, Any]] = {
    "Expand": {},
    "Softsign": {},
    "Cast": {"to": -3},
    "EyeLike": {"dtype": -1},
    "DepthToSpace": {"blocksize": 0},
    "StringConcat": {},
    "Nothing": {},
}


@pytest.mark.parametrize("op", UNCOMPUTABLE)
def test_a_node_that_the_reference_cannot_compute_stays_unknown(op: str) -> None:
    node = helper.make_node(op, ["a", "b"], ["c"], **UNCOMPUTABLE[op])

    assert _run(node, {"a": np.ones((2,), np.int64), "b": np.ones((2, 2), np.float32)}, 20) == []


def test_a_node_that_it_can_compute_is_known() -> None:
    node = helper.make_node("Add", ["a", "b"], ["c"])

    (result,) = _run(node, {"a": np.array([1, 2]), "b": np.array([3, 4])}, 20)

    assert result.tolist() == [4, 6]
