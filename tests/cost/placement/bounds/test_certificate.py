from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random

import numpy as np
import pytest

from partc.cost.placement.bounds.certificate import ONE, Certificate, Enumeration, holds
from partc.cost.placement.bounds.covering import set_load, try_load
from partc.cost.placement.problems.problem import Node, Problem
from tests.builders.placements import optimum, random_problem

NEVER_ENDS = float("inf")


def certified(problem: Problem, load: Fraction) -> Certificate | None:
    return try_load(problem, load, (), deadline_s=NEVER_ENDS).certificate


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 12))]
)
def test_the_most_valuable_set_is_that_of_trying_all(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(seed, nodes=9, memory=False)
    load = sum(n.accelerator_time or 0 for n in problem.nodes) * Fraction(random.randint(3, 8), 10)
    sets = Enumeration.below(problem, load)
    assert sets is not None
    values = np.array([random.randint(-ONE // 4, ONE) for _ in range(sets.groups.count)], np.int64)
    columns = [np.array(c, np.bool_) for c in product([False, True], repeat=sets.groups.count)]
    best = max(int(values[c].sum()) for c in columns if set_load(sets.groups, c) <= sets.cap_ticks)

    found, worths, bound, _ = sets.best_sets(values, floor=-1, most=1_000_000)
    _, _, relaxed, _ = sets.best_sets(values, floor=-1, most=1_000_000, buckets=4, relaxed=True)
    _, _, beamed, _ = sets.best_sets(values, floor=-1, most=2)
    _, bucketed, still, _ = sets.best_sets(values, floor=-1, most=1_000_000, buckets=4)

    assert int(worths[0]) == bound == best == int(values[found[0]].sum())
    assert min(relaxed, beamed, still) >= best >= max(bucketed, default=-1)


@pytest.mark.parametrize("seed", range(12))
def test_a_load_above_the_optimum_is_never_certified(seed: int) -> None:
    problem = random_problem(seed, memory=False)
    best = optimum(problem, contiguous=False)
    assert best is not None

    for share in (Fraction(70, 100), Fraction(95, 100), Fraction(1)):
        certificate = certified(problem, best * share)
        assert certificate is None or holds(problem, certificate)
    assert certified(problem, best * Fraction(1_000_001, 1_000_000)) is None


def three_equal_nodes() -> Problem:
    """Three nodes of work 2 on two accelerators: a load of 4, where work alone bounds it by 3."""
    nodes = tuple(Node(f"n{i}", Fraction(9), Fraction(2), Fraction(1)) for i in range(3))
    return Problem(nodes, (), 2, 0, Fraction(1))


def test_what_whole_nodes_forbid_is_certified() -> None:
    certificate = certified(three_equal_nodes(), Fraction(39, 10))

    assert certificate is not None and holds(three_equal_nodes(), certificate)


@pytest.mark.parametrize(
    "change",
    [
        {"load": Fraction(41, 10)},
        {"values": (ONE, ONE, -ONE)},
        {"values": (ONE // 2, ONE // 2, ONE // 2, ONE // 2)},
        {"values": (0, 0, 0)},
        {"values": (ONE, 0, 0)},
        {"cpu_rate": Fraction(-1)},
    ],
)
def test_tampered_multipliers_are_refused(change: dict) -> None:
    certificate = certified(three_equal_nodes(), Fraction(39, 10))
    assert certificate is not None

    assert not holds(three_equal_nodes(), replace(certificate, **change))


def test_multipliers_that_a_cpu_undercuts_are_refused() -> None:
    with_cpu = replace(
        three_equal_nodes(),
        cpus=1,
        nodes=tuple(replace(n, cpu_time=Fraction(1)) for n in three_equal_nodes().nodes),
    )
    certificate = certified(three_equal_nodes(), Fraction(39, 10))
    assert certificate is not None

    assert optimum(with_cpu, contiguous=False) == 2
    assert not holds(with_cpu, certificate)
    assert not holds(with_cpu, replace(certificate, cpu_rate=Fraction(ONE)))
