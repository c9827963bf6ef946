from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest

from partc.cost.placement.latency.latency import list_schedule, place_for_latency
from partc.cost.placement.latency.schedule import (
    Schedule,
    makespan,
    path_bound,
    run_in_order,
    schedule_violations,
    topological_order,
)
from partc.cost.placement.problems.problem import Node, NodePlacement, Problem
from tests.builders.placements import every_placement, random_problem


def fork(*, cost: int = 2) -> Problem:
    """a is read by b and c; accelerators take 1, 4 and 4, an output costs 2 between devices."""
    nodes = [
        Node(name, Fraction(10 * work), Fraction(work), Fraction(cost), Fraction(1))
        for name, work in (("a", 1), ("b", 4), ("c", 4))
    ]
    return Problem(tuple(nodes), ((0, 1), (0, 2)), 2, 1, Fraction(10))


def best_makespan(problem: Problem) -> Fraction:
    """Try every placement, and every order of nodes that edges allow."""
    count = len(problem.nodes)
    orders = [
        order
        for order in permutations(range(count))
        if all(order.index(a) < order.index(b) for a, b in problem.edges)
    ]
    schedules = (run_in_order(problem, p, order) for p in every_placement(problem) for order in orders)
    return min(makespan(problem, s) for s in schedules if not schedule_violations(problem, s))


def test_an_input_from_another_device_arrives_later_by_its_cost() -> None:
    schedule = run_in_order(fork(), NodePlacement((0, 0, 1)), [0, 1, 2])

    assert schedule.starts == (0, 1, 3)
    assert makespan(fork(), schedule) == 7


@pytest.mark.parametrize(
    ("device_of", "starts", "what"),
    [
        ((0, 0, 1), (0, 1, 2), "'c' starts before its input from 'a'"),
        ((0, 0, 0), (0, 1, 4), "runs 'c' before another has ended"),
        ((0, 0, 1), (0, 1), "not every node has a start"),
        ((0, 0, 1), (-1, 1, 3), "'a' starts before 0"),
        ((0, 0, 5), (0, 1, 3), "'c' is on device 5"),
    ],
)
def test_a_schedule_that_is_not_allowed_is_refused(device_of: tuple, starts: tuple, what: str) -> None:
    schedule = Schedule(NodePlacement(device_of), tuple(map(Fraction, starts)))

    assert what in schedule_violations(fork(), schedule)[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 6))])
def test_answers_are_the_optimum_and_bounds_are_below_it(seed: int) -> None:
    problem = replace(random_problem(seed, nodes=5, backward=False), cpus=1)
    best = best_makespan(problem)

    solution = place_for_latency(problem, seconds=2)

    assert schedule_violations(problem, solution.schedule) == ()
    assert solution.value == makespan(problem, solution.schedule) == best
    assert solution.value <= solution.list_value
    assert max(solution.certified_bound, solution.solver_bound) <= best


def test_the_longest_path_bounds_a_chain_exactly() -> None:
    problem = replace(fork(), edges=((0, 1), (1, 2)))
    listed = list_schedule(problem)

    assert listed is not None
    assert path_bound(problem) == makespan(problem, listed) == 9
    assert topological_order(problem) == [0, 1, 2]
