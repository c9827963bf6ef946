from collections.abc import Callable
from itertools import product

from partc.passes.layouts.meshes import Mesh
from partc.passes.lowering.local_bounds import local_bounds
from partc.passes.lowering.lowered_graph import FactorPart, PartNumber
from partc.passes.rules.sharding_rule import ShardingRule


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
