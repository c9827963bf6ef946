import numpy as np
import pytest

from partc.runtime.jobs.results import assemble_outputs, owners_of, pieces_among
from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.program import Output
from partc.runtime.plan.variables import PlanVariable, Uniform, VariablePiece
from tests.builders.plans.hand_made_plans import plan_of, rank

TABLE = PlanVariable("E", "float32", (8, 2), Uniform(0.0, 1.0, 0), "parameter")


def test_shards_are_put_in_row_order_once() -> None:
    ranks = [
        rank(0, ("server",), None, {}, pieces=(VariablePiece("E", "a", rows_box((8, 2), 5, 8)),)),
        rank(1, ("server",), None, {}, pieces=(VariablePiece("E", "b", rows_box((8, 2), 0, 5)),)),
        rank(
            2,
            ("server",),
            None,
            {},
            pieces=(
                VariablePiece("E", "c", rows_box((8, 2), 0, 5)),
                VariablePiece("E", "d", rows_box((8, 2), 8, 8)),
            ),
        ),
    ]

    owners = owners_of(plan_of(ranks, [], variables=(TABLE,)))["E"]

    assert [owner.piece.value for owner in owners] == ["b", "c", "a"]
    assert [owner.piece.value for owner in pieces_among(owners)] == ["b", "a"]


def test_a_whole_copy_is_enough() -> None:
    ranks = [rank(r, ("worker",), r, {}, pieces=(VariablePiece("E", "E"),)) for r in range(3)]

    owners = owners_of(plan_of(ranks, [], variables=(TABLE,)))["E"]

    assert [owner.rank for owner in pieces_among(owners)] == [0]


@pytest.mark.parametrize(
    ("layout", "expected"), [("whole", [1, 2]), ("split", [1, 2, 3, 4]), ("per_replica", [[1, 2], [3, 4]])]
)
def test_outputs_are_put_together_in_replica_order(layout: str, expected: list[object]) -> None:
    ranks = [rank(1, ("worker",), 0, {}), rank(0, ("worker",), 1, {})]
    plan = plan_of(ranks, [], outputs=(Output("probs", "p", layout, 0),))

    outputs = assemble_outputs(plan, {1: {"probs": np.array([1, 2])}, 0: {"probs": np.array([3, 4])}})

    np.testing.assert_array_equal(outputs["probs"], expected)
