from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from partc.cost.placement.problems.problem import Node, Problem
from partc.cost.placement.throughput.conflicts import find_conflict, pack, refuse
from tests.builders.placements import optimum, random_problem


def sized(
    *sizes: int, memory: int, accelerators: int = 2, edges: tuple[tuple[int, int], ...] = ()
) -> Problem:
    nodes = [Node(f"n{i}", Fraction(1), Fraction(1), Fraction(0), Fraction(s)) for i, s in enumerate(sizes)]
    return Problem(tuple(nodes), edges, accelerators, 0, Fraction(memory))


def test_the_smallest_conflict_and_the_smallest_changes_are_found() -> None:
    conflict = find_conflict(sized(1, 6, 1, 6, 6, memory=11), contiguous=False)

    assert conflict is not None and conflict.smallest
    assert [conflict.nodes, conflict.least_memory, conflict.least_accelerators] == [(1, 3, 4), 12, 3]


def test_a_node_that_is_too_large_conflicts_alone_and_no_count_helps() -> None:
    conflict = find_conflict(sized(3, 9, memory=8), contiguous=False)

    assert conflict is not None
    assert [conflict.nodes, conflict.least_memory, conflict.least_accelerators] == [(1,), 9, None]


def test_each_accelerator_is_filled_up_to_its_own_memory() -> None:
    problem = replace(sized(5, 4, 3, memory=8), own_memory=(Fraction(4), Fraction(8)))
    short = replace(sized(5, 4, 4, memory=8), own_memory=(Fraction(4), Fraction(8)))

    placement = pack(problem)

    assert placement is not None and placement.device_of == (1, 0, 1)
    assert find_conflict(problem, contiguous=False) is None
    assert pack(short) is None
    conflict = find_conflict(short, contiguous=False)
    assert conflict is not None
    assert [conflict.nodes, conflict.least_memory, conflict.least_accelerators] == [(0, 1, 2), 8, None]


def test_an_order_of_parts_may_conflict_where_packing_does_not() -> None:
    problem = sized(3, 5, 2, memory=5, edges=((0, 1), (1, 2)))

    assert find_conflict(problem, contiguous=False) is None
    conflict = find_conflict(problem, contiguous=True)
    assert conflict is not None
    assert [conflict.nodes, conflict.least_memory, conflict.least_accelerators] == [(0, 1, 2), 7, 3]


def test_the_refusal_says_what_would_fit() -> None:
    error = refuse(sized(6, 6, 6, memory=11), contiguous=False)

    assert "3 nodes of size 18 conflict on 2 accelerators of memory 11" in error.what
    assert error.fix == "give accelerators of memory 12, or 3 accelerators, or a CPU"


@pytest.mark.parametrize("seed", range(12))
def test_conflicts_agree_with_trying_everything(seed: int) -> None:
    problem = random_problem(seed, nodes=6, cpus=0, backward=False)
    problem = replace(
        problem, accelerator_memory=sum(n.size for n in problem.nodes) * Fraction(45 + 2 * seed, 100)
    )

    for contiguous in (False, True):
        conflict = find_conflict(problem, contiguous=contiguous)
        assert (conflict is None) == (optimum(problem, contiguous=contiguous) is not None)
        if conflict is None:
            continue
        assert optimum(_only(problem, conflict.nodes), contiguous=False) is None or contiguous
        if conflict.least_memory is not None:
            enough = replace(problem, accelerator_memory=conflict.least_memory)
            less = replace(problem, accelerator_memory=conflict.least_memory - 1)
            assert optimum(enough, contiguous=contiguous) is not None
            assert optimum(less, contiguous=contiguous) is None
        if conflict.least_accelerators is not None:
            more = replace(problem, accelerators=conflict.least_accelerators)
            assert optimum(more, contiguous=contiguous) is not None
        if conflict.smallest:
            count = len({problem.colours[node] for node in conflict.nodes})
            for colours in combinations(range(max(problem.colours) + 1), count - 1):
                nodes = tuple(i for i, colour in enumerate(problem.colours) if colour in colours)
                assert not nodes or optimum(_only(problem, nodes), contiguous=False) is not None


def _only(problem: Problem, nodes: tuple[int, ...]) -> Problem:
    """The nodes alone, without edges."""
    return replace(problem, nodes=tuple(problem.nodes[node] for node in nodes), edges=())
