from fractions import Fraction

import pytest

from partc.cost.placement.problems.load import greatest_load, violations
from partc.cost.placement.problems.problem import Node, Problem
from partc.cost.placement.throughput.contiguous import place_contiguously
from partc.runtime.errors import NoPlacement
from tests.builders.placements import optimum, random_problem
from tests.sampling import sampled

EXACT = 1 - Fraction(1, 1_000_000)


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.long) for n in range(20, 40))]
)
def test_answers_are_the_optimum_and_bounds_are_below_it(seed: int) -> None:
    problem = random_problem(seed, backward=seed % 2 == 1)
    best = optimum(problem, contiguous=True)
    assert best is not None

    solution = place_contiguously(problem, seconds=120)

    assert violations(problem, solution.placement, contiguous=True) == ()
    assert solution.value == greatest_load(problem, solution.placement)
    assert solution.certified_bound <= best <= solution.value
    assert solution.value == best or solution.value <= best * Fraction(1001, 1000)
    assert solution.certified_bound >= best * Fraction(999, 1000)


@pytest.mark.parametrize("seed", sampled(range(8), (0, 1, 2, 3)))
def test_accelerators_alone_and_several_cpus_work_too(seed: int) -> None:
    problem = random_problem(seed, accelerators=1 + seed % 3, cpus=(seed % 2) * 2, memory=False)
    best = optimum(problem, contiguous=True)
    assert best is not None

    solution = place_contiguously(problem, seconds=120)

    assert solution.certified_bound <= best <= solution.value <= best * Fraction(1001, 1000)


def test_what_fits_nowhere_is_refused() -> None:
    node = Node("a", Fraction(1), Fraction(1), Fraction(0), size=Fraction(5))

    with pytest.raises(NoPlacement):
        place_contiguously(Problem((node,), (), 2, 0, Fraction(4)), seconds=1)


def test_two_free_groups_of_one_family_are_charged_its_cost_once() -> None:
    work, none, one = Fraction(10), Fraction(0), Fraction(1)
    heads = [Node(name, work * 9, work, one) for name in ("a", "d")]
    free = [Node(name, none, none, none, backward=True) for name in ("b", "c")]
    problem = Problem((*heads, *free), ((0, 2), (0, 3), (1, 2), (1, 3)), 2, 0, Fraction(1))

    solution = place_contiguously(problem, seconds=2)

    assert optimum(problem, contiguous=True) == solution.value == 11
    assert solution.certified_bound == 11


def test_a_family_that_costs_nearly_all_of_the_load_may_be_divided() -> None:
    nodes = [Node(name, Fraction(9), Fraction(1), Fraction(10), size=Fraction(5)) for name in ("a", "b")]
    problem = Problem(tuple(nodes), ((0, 1),), 2, 0, Fraction(5))

    solution = place_contiguously(problem, seconds=2)

    assert solution.value == solution.certified_bound == 11
