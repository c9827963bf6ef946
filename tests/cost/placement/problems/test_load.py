from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from partc.cost.placement.problems.load import device_loads, greatest_load, is_contiguous, violations
from partc.cost.placement.problems.problem import BadPlacementProblem, Node, NodePlacement, Problem
from tests.builders.placements import has_order, random_problem


def chain(*, memory: int = 100) -> Problem:
    """a -> b -> c and a -> c; a's output costs 2, b's 1/2."""
    nodes = [
        Node(name, Fraction(10), Fraction(work), cost, Fraction(4))
        for name, work, cost in (("a", 3, Fraction(2)), ("b", 4, Fraction(1, 2)), ("c", 5, Fraction(0)))
    ]
    return Problem(tuple(nodes), ((0, 1), (1, 2), (0, 2)), 2, 1, Fraction(memory))


def test_an_output_is_paid_once_by_every_accelerator_that_holds_some_of_its_family() -> None:
    loads = device_loads(chain(), NodePlacement((0, 1, 1)))

    assert loads == (3 + 2, 4 + 5 + 2, 0)


def test_a_cpu_pays_no_transfers_and_its_neighbours_do() -> None:
    loads = device_loads(chain(), NodePlacement((0, 2, 0)))

    assert loads == (3 + 5 + 2 + Fraction(1, 2), 0, 10)


def test_an_answer_of_one_accelerator_pays_its_work_alone() -> None:
    assert greatest_load(chain(), NodePlacement((1, 1, 1))) == 12


@pytest.mark.parametrize(
    ("device_of", "change", "what"),
    [
        ((0, 0), {}, "2 devices are given for 3 nodes"),
        ((0, 0, 3), {}, "'c' is on device 3"),
        ((0, 0, -1), {}, "'c' is on device -1"),
        ((0, 0, 1), {"accelerator_memory": Fraction(7)}, "accelerator 0 holds 8"),
        ((0, 1, 0), {}, "no order"),
    ],
)
def test_an_answer_that_is_not_allowed_is_refused(
    device_of: tuple[int, ...], change: dict, what: str
) -> None:
    found = violations(replace(chain(), **change), NodePlacement(device_of), contiguous=True)

    assert len(found) == 1 and what in found[0]


def test_a_divided_colour_and_an_unsupported_node_are_refused() -> None:
    nodes = list(chain().nodes)
    nodes[0] = replace(nodes[0], colour=7)
    nodes[1] = replace(nodes[1], colour=7, accelerator_time=None)
    problem = replace(chain(), nodes=tuple(nodes))

    memory, colours = violations(problem, NodePlacement((2, 1, 2)), contiguous=False)
    assert "accelerator 1" in memory
    assert "colour 7 is on devices [1, 2]" in colours
    assert violations(problem, NodePlacement((2, 2, 0)), contiguous=False) == ()


def test_backward_nodes_do_not_count_for_contiguity() -> None:
    problem = chain()
    backward = replace(problem, nodes=(*problem.nodes[:2], replace(problem.nodes[2], backward=True)))

    assert not is_contiguous(problem, NodePlacement((0, 1, 0)))
    assert is_contiguous(backward, NodePlacement((0, 1, 0)))


@pytest.mark.parametrize("seed", range(30))
def test_contiguous_means_that_some_order_of_the_devices_fits_every_edge(seed: int) -> None:
    problem, random = random_problem(seed, accelerators=3), Random(seed)
    placements = [NodePlacement(tuple(random.randrange(4) for _ in problem.nodes)) for _ in range(20)]

    assert [is_contiguous(problem, p) for p in placements] == [has_order(problem, p) for p in placements]


def test_a_problem_with_a_negative_time_is_refused() -> None:
    nodes = (replace(chain().nodes[0], cpu_time=Fraction(-1)), *chain().nodes[1:])

    with pytest.raises(BadPlacementProblem, match="node 'a'"):
        replace(chain(), nodes=nodes)
