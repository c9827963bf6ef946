"""What a solver hands back: an answer, and two lower bounds, each with its name."""

from dataclasses import dataclass
from fractions import Fraction

from partc.cost.placement.bounds.certificate import Certificate
from partc.cost.placement.problems.load import greatest_load, violations
from partc.cost.placement.problems.problem import Node, NodePlacement, Problem


@dataclass(frozen=True)
class Solution:
    """`value`: the answer's greatest load, as the checker computes it. Bounds hold for every answer."""

    placement: NodePlacement
    value: Fraction
    solver_bound: Fraction
    certified_bound: Fraction
    certificate: str
    seconds: float
    multipliers: Certificate | None = None


def checked_value(problem: Problem, placement: NodePlacement, *, contiguous: bool) -> Fraction | None:
    """Return the answer's greatest load, or None where the checker does not allow it."""
    if violations(problem, placement, contiguous=contiguous):
        return None
    return greatest_load(problem, placement)


def work_bound(problem: Problem) -> Fraction:
    """Bound every load from below: all work divided without rest or transfers, and the longest node.

    Within a time T the CPUs take over the nodes whose accelerator time is greatest for their CPU time, the
    last one in part, and the accelerators share the rest. The bound is the least T for which that is enough.
    """
    longest = max((min(_times(problem, i)) for i in range(len(problem.nodes))), default=Fraction(0))
    low, high = longest, sum((min(_times(problem, i)) for i in range(len(problem.nodes))), Fraction(0))
    low, high = min(low, high), max(low, high)
    if _work_left(problem, low) <= problem.accelerators * low:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        fits = _work_left(problem, middle) <= problem.accelerators * middle
        low, high = (low, middle) if fits else (middle, high)
    return low


def _times(problem: Problem, index: int) -> list[Fraction]:
    node = problem.nodes[index]
    times = [node.cpu_time] if problem.cpus else []
    return times + (
        [node.accelerator_time] if problem.accelerators and node.accelerator_time is not None else []
    )


def _work_left(problem: Problem, time: Fraction) -> Fraction:
    """Least accelerator work that remains when the CPUs take the best share of it within `time`."""
    room = problem.cpus * time
    left = Fraction(0)
    for node in sorted(problem.nodes, key=_worth, reverse=True):
        work = node.accelerator_time
        share = Fraction(1) if node.cpu_time <= room else room / node.cpu_time
        room -= share * node.cpu_time
        if share < 1 and work is None:
            return Fraction(10) ** 30
        left += (1 - share) * (work or 0)
    return left


def _worth(node: Node) -> Fraction:
    work, cpu_time = node.accelerator_time, node.cpu_time
    if work is None or cpu_time == 0:
        return Fraction(10) ** 30
    return work / cpu_time
