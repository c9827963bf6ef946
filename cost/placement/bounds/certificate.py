"""Lower bounds that are checked in whole numbers, from multipliers alone: nothing of the solver is believed.

Claim: no placement has a load below T. Let y[g] be a number per group and m >= 0 one for the CPUs, with

    y[g] <= m cpu[g]                                    for every group that a CPU runs below T   (1)
    y(S) <= v                                           for every set S of load below T         (2)
    sum y - m T CPUs > v accelerators                                                           (3)

A placement below T divides the groups between accelerators, each worth at most v by (2), and CPUs, each
worth at most m T by (1): together no more than the right side of (3) allows, a contradiction. (2) is
checked by enumeration (`pricing_kernel.price`) over a relaxation: memory is unlimited, and loads are
rounded down.

The linear program whose dual this is has a variable per set of groups: the configuration relaxation of bin
packing (Gilmore and Gomory 1961), here with cuts in a set's load. Equal accelerators make no symmetry in
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from partc.cost.placement.bounds.frontier import Frontier, build_frontier
from partc.cost.placement.bounds.pricing_kernel import SHIFT, completions, price
from partc.cost.placement.problems.groups import Groups, Ints, group_nodes
from partc.cost.placement.problems.problem import Problem

LOAD_BITS = 22
VALUE_BITS = 26
ONE = 1 << VALUE_BITS
BUCKETS = (1 << 11, 1 << 14)
SLOPES = (0.5, 0.8, 0.92, 0.98, 1.0, 1.03, 1.08, 1.18, 1.4, 2.0, 4.0)


@dataclass(frozen=True)
class Certificate:
    """Multipliers that prove that no placement's load is below `load`: one per node's group, and the CPUs'.

    `values[g] / 2^26` is y[g]; `cpu_rate / 2^26` is m per tick.
    """

    load: Fraction
    values: tuple[int, ...]
    cpu_rate: Fraction


@dataclass(frozen=True)
class Enumeration:
    """The sets of a load below T, ready to be enumerated: coarse ticks, `cap` the most a set may load."""

    groups: Groups
    frontier: Frontier
    paid: Ints
    work: Ints
    cap: int
    cap_ticks: int

    @classmethod
    def below(cls, problem: Problem, load: Fraction) -> "Enumeration | None":
        """Prepare the sets of a load below `load`; None where the frontier has too many states."""
        groups = group_nodes(problem, contiguous=False, undercut=load)
        frontier = build_frontier(groups)
        if frontier is None:
            return None
        cap_ticks = groups.ticks(load, up=True) - 1
        shift = max(0, cap_ticks.bit_length() - LOAD_BITS)
        cap = cap_ticks >> shift
        # What is heavier than the cap is in no set, however much heavier: so no sum can overflow.
        paid = np.minimum(frontier.paid >> shift, cap + 1)
        work = np.minimum(groups.work >> shift, cap + 1)
        return cls(groups, frontier, paid, work, cap, cap_ticks)

    @property
    def may_be_on_cpu(self) -> "np.typing.NDArray[np.bool_]":
        """Per group: whether a CPU could run it at all."""
        return (self.groups.cpu <= self.cap_ticks) & (self.groups.problem.cpus > 0)

    def best_sets(
        self,
        values: Ints,
        *,
        floor: int,
        most: int,
        columns: int = 1,
        buckets: int = 0,
        relaxed: bool = False,
    ) -> tuple[np.ndarray, Ints, int, int]:
        """Find sets of a value above `floor`: (sets bool[found, groups], values, bound on all, labels).

        `buckets`: how many loads are told apart, 0 for all (see pricing_kernel).
        """
        line = self.frontier
        rate = (1 << SHIFT + VALUE_BITS) / max(self.cap, 1)
        slopes = np.array([int(rate * slope) for slope in SLOPES], np.int64)
        parts = (line.order, line.first, line.next, self.paid, self.work, values, slopes)
        table = completions(*parts)
        width = max(1, self.cap // buckets) if buckets else 1
        sets, set_values, bound, labels = price(*parts, table, self.cap, floor, most, columns, width, relaxed)
        return sets, set_values, int(bound), int(labels)


def holds(problem: Problem, certificate: Certificate, *, most_labels: int = 2_000_000) -> bool:
    """Check a certificate, without trusting where it came from: whole numbers and fractions only."""
    enumeration = Enumeration.below(problem, certificate.load)
    if enumeration is None or len(certificate.values) != enumeration.groups.count or certificate.cpu_rate < 0:
        return False
    return proves(enumeration, certificate.values, certificate.cpu_rate, most_labels=most_labels)


def proves(enumeration: Enumeration, values: Sequence[int], cpu_rate: Fraction, *, most_labels: int) -> bool:
    """Whether (1), (2) and (3) hold for the load below which `enumeration` was prepared."""
    groups = enumeration.groups
    pairs = zip(values, groups.cpu, enumeration.may_be_on_cpu, strict=True)
    if any(on_cpu and value > cpu_rate * int(cpu) for value, cpu, on_cpu in pairs):
        return False
    if max(map(abs, values), default=0) > 64 * ONE:
        return False
    spare = sum(values) - cpu_rate * enumeration.cap_ticks * groups.problem.cpus
    if groups.problem.accelerators == 0:
        return spare > 0
    worth = spare / groups.problem.accelerators
    if worth <= 0:
        return False
    needed = int(-(-worth // 1)) - 1
    if needed < 0:
        return False
    exact = np.array(values, np.int64)
    for buckets in BUCKETS:
        *_, bound, _ = enumeration.best_sets(
            exact, floor=needed, most=most_labels, buckets=buckets, relaxed=True
        )
        if bound <= needed:
            return True
    return False
