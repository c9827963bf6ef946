"""The dynamic program and the integer program find the least sum that trying everything finds."""

from itertools import product

import numpy as np
import pytest

from partc.passes.search.additive.additive_costs import AdditiveCosts, ConfigNumbers
from partc.passes.search.additive.configuration_program import solve_configurations
from partc.passes.search.additive.eliminate_operators import check_reduces, eliminate_operators
from partc.runtime.errors import BadUsage, NoPlacement

LINE = [(0, 1), (1, 2), (2, 3), (3, 4)]
DIAMONDS = [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3), (3, 4)]  # a skip, and two branches
TREE = [(0, 1), (0, 2), (2, 3), (2, 4)]
APART = [(0, 1), (3, 4)]
ALL = [(j, k) for k in range(5) for j in range(k)]


def drawn(pairs: list[tuple[int, int]], seed: int, limit: float = np.inf) -> AdditiveCosts:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, size=5)
    return AdditiveCosts(
        [f"op{number}" for number in range(5)],
        [rng.random(size) for size in sizes],
        {(j, k): rng.random((sizes[j], sizes[k])) for j, k in pairs},
        [rng.integers(0, 1 << 20, size=(size, 2)).astype(float) for size in sizes],
        np.full(2, limit),
    )


def least(costs: AdditiveCosts) -> tuple[float, ConfigNumbers]:
    choices = product(*(range(len(own)) for own in costs.own_s))
    return min((costs.total_s(choice), choice) for choice in choices if costs.fits(choice))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pairs", [LINE, DIAMONDS, TREE, APART], ids=["line", "diamonds", "tree", "apart"])
def test_both_find_the_least_sum_of_all(pairs: list[tuple[int, int]], seed: int) -> None:
    costs = drawn(pairs, seed)
    total_s, choice = least(costs)

    assert eliminate_operators(costs) == choice
    proven = solve_configurations(costs, seconds=30.0, seed=seed)
    assert proven.choice == choice
    assert proven.bound_s <= proven.total_s == pytest.approx(total_s)
    assert proven.bound_s == pytest.approx(total_s, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_integer_program_takes_any_graph_and_keeps_to_memory(seed: int) -> None:
    limit = 2.4 * (1 << 20)
    free, bound = drawn(ALL, seed), drawn(ALL, seed, limit)
    assert not bound.fits(least(free)[1]), "memory forbids what is least without it"

    proven = solve_configurations(bound, seconds=30.0, seed=seed)

    assert proven.choice == least(bound)[1]


def test_operators_that_do_not_reduce_are_refused_by_name() -> None:
    with pytest.raises(BadUsage, match="do not reduce") as refusal:
        eliminate_operators(drawn(ALL, 0))

    assert "'op0', 'op1', 'op2'" in str(refusal.value)
    check_reduces(["a", "b", "c"], [(0, 1), (1, 2), (0, 2)])


def test_variables_that_fit_to_the_byte_are_taken() -> None:
    sizes = [np.array([[600.0, 0.0], [0.0, 600.0]])] * 4
    costs = AdditiveCosts(["a", "b", "c", "d"], [np.array([0.0, 1.0])] * 4, {}, sizes, np.full(2, 1200.0))

    proven = solve_configurations(costs, seconds=30.0, seed=0)

    assert proven.total_s == pytest.approx(2.0)


def test_variables_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(NoPlacement, match="under no configurations"):
        solve_configurations(drawn(LINE, 0, limit=10.0), seconds=30.0, seed=0)
