"""Nodes whose meaning depends on sizes keep it on a piece."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from partc.passes.layouts.meshes import Mesh
from partc.passes.lowering.lower_node import local_bounds
from partc.passes.lowering.lowered_graph import FactorPart, PartNumber
from partc.passes.rules.sharding_rule import ShardingRule
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)
from tests.checks.oracle import Oracle

# 8 ranks have one sample each: a piece has size 1 where the whole has 8.
STEP = """
step (double[8,4] x, double[8,3] t, double[4,3] W) => (double loss, double[4,3] W_next)
<double lr = {0.1}, int64[3] apart = {8, 1, 4}, int64[2] flat = {8, 4}, double one = {1.0}> {
    wide = Reshape (x, apart)
    VIEW
    y = MatMul (same, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (same)
    dW = MatMul (xt, d)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""
VIEWS = {
    "squeeze without axes": "same = Squeeze (wide)",
    "reshape to a spelled shape": "same = Reshape (wide, flat)",
    "shape of a piece": "sizes = Shape (x) same = Reshape (wide, sizes)",
    "one size of a piece": (
        "sizes = Shape <end = 1> (x) n = Cast <to = 11> (sizes) share = Div (n, n)"
        " even = Squeeze (share) flattened = Reshape (wide, flat) same = Mul (flattened, even)"
    ),
    "number of elements": (
        "elements = Size (x) n = Cast <to = 11> (elements) flattened = Reshape (wide, flat)"
        " scaled = Div (flattened, n) same = Mul (scaled, n)"
    ),
    "zeros like a piece": (
        "sizes = Shape (x) zeros = ConstantOfShape <value = double[1] {0.0}> (sizes)"
        " flattened = Reshape (wide, flat) same = Add (flattened, zeros)"
    ),
    "expand to the shape of a piece": (
        "sizes = Shape (x) ones = Expand (one, sizes)"
        " flattened = Reshape (wide, flat) same = Mul (flattened, ones)"
    ),
}


@pytest.mark.parametrize("cluster", ["1x8", "2x1"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_piece_of_one_sample_is_treated_as_part_of_the_whole(
    view: str, cluster: str, tmp_path: Path
) -> None:
    training = import_text(STEP.replace("VIEW", VIEWS[view]), loss="loss", sample_axes={"x": 0, "t": 0})
    oracle = Oracle(training)

    compiled = compile_step(training, tmp_path / "out", cluster, "allreduce", "global")
    batches = random_batches(compiled.plan, 2)

    assert oracle.first_wrong(compiled, batches[0]) is None
    assert_trains_as_one_device(compiled, batches)


def in_parts(*parts: int) -> Callable[[int, int], int]:
    return lambda axis, number: number // parts[axis]


def rule_with(bounds: dict[int, tuple[tuple[int, int | None], ...]]) -> ShardingRule:
    return ShardingRule(((("d0",), ("part", "in")),), (), {"d0": 4, "part": 3, "in": 8}, bounds=bounds)


def test_numbers_that_count_entries_of_a_split_axis_are_divided() -> None:
    rule = rule_with({1: ((1, 0), (8, 1)), 2: ((3, 0), (16, 1))})

    assert {index: list(numbers) for index, numbers in local_bounds(rule, in_parts(1, 4)).items()} == {
        1: [1, 2],
        2: [3, 4],
    }


def test_inputs_whose_numbers_stay_are_left_out() -> None:
    rule = rule_with({1: ((0, None), (5, None)), 2: ((7, None), (8, 1))})

    assert list(local_bounds(rule, in_parts(2, 4))) == [2]
    assert local_bounds(rule, in_parts(2, 1)) == {}


def test_pads_that_take_away_are_divided_alike() -> None:
    assert local_bounds(rule_with({1: ((-8, 1), (16, 1))}), in_parts(1, 2))[1] == (-4, 8)


def test_what_differs_from_rank_to_rank_is_told_apart() -> None:
    own = PartNumber((FactorPart(7, (1,)),), 2)

    found = local_bounds(rule_with({1: ((0, 0), (14, 1))}), lambda axis, _: own if axis else 0)

    assert found == {1: (0, own)}
    mesh = Mesh("worker", (("data", 2), ("tensor", 4)))
    assert [own.of((0, part), mesh) for part in range(4)] == [4, 4, 4, 2]


def test_a_number_follows_every_axis_that_divides_its_factors() -> None:
    mesh = Mesh("worker", (("data", 2), ("tensor", 2), ("sequence", 2)))
    rows, columns = FactorPart(7, (0, 1)), FactorPart(5, (2,))

    sizes = [PartNumber((rows, columns), 3).of(place, mesh) for place in product(range(2), repeat=3)]
    starts = [
        PartNumber((rows, columns), 3, "start").of(place, mesh) for place in product(range(2), repeat=3)
    ]

    assert sizes == [3 * a * b for a in (2, 2, 2, 1) for b in (3, 2)]
    assert starts == [3 * a * b for a in (0, 2, 0, 2) for b in (3, 2)]  # of what the axis before left
