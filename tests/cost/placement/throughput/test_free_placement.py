from fractions import Fraction

import pytest

from partc.cost.placement.bounds.certificate import holds
from partc.cost.placement.problems.load import greatest_load, violations
from partc.cost.placement.problems.problem import Node, Problem
from partc.cost.placement.throughput.free_placement import place_freely
from partc.cost.placement.throughput.solution import work_bound
from partc.runtime.errors import NoPlacement
from tests.builders.placements import optimum, random_problem


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 12))]
)
def test_answers_are_the_optimum_and_bounds_are_below_it(seed: int) -> None:
    problem = random_problem(seed, accelerators=2 + seed % 2, nodes=6)
    best = optimum(problem, contiguous=False)
    assert best is not None

    solution = place_freely(problem, seconds=2)

    assert violations(problem, solution.placement, contiguous=False) == ()
    assert solution.value == greatest_load(problem, solution.placement)
    assert solution.value <= best * Fraction(1001, 1000)
    assert max(solution.certified_bound, solution.solver_bound) <= best
    if solution.multipliers is not None:
        assert holds(problem, solution.multipliers)


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_of_work_is_below_the_optimum(seed: int) -> None:
    problem = random_problem(seed, nodes=6)
    best = optimum(problem, contiguous=False)

    assert best is not None and work_bound(problem) <= best


def test_what_fits_nowhere_is_refused() -> None:
    node = Node("a", Fraction(1), Fraction(1), Fraction(0), size=Fraction(5))

    with pytest.raises(NoPlacement):
        place_freely(Problem((node,), (), 2, 0, Fraction(4)), seconds=1)
